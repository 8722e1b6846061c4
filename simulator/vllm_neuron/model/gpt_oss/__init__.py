"""GptOssForCausalLM on the vLLM Neuron backend."""

from .config import GptOssConfig, UnsupportedConfigError
from .factory import GptOssForCausalLM

__all__ = ["GptOssConfig", "GptOssForCausalLM", "UnsupportedConfigError"]
