"""LlamaForCausalLM on the vLLM Neuron backend."""

from .config import LlamaConfig, UnsupportedConfigError
from .factory import LlamaForCausalLM

__all__ = ["LlamaConfig", "LlamaForCausalLM", "UnsupportedConfigError"]
