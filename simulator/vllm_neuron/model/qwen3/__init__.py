"""Qwen3ForCausalLM on the vLLM Neuron backend."""

from .config import Qwen3Config, UnsupportedConfigError
from .factory import Qwen3ForCausalLM

__all__ = ["Qwen3Config", "Qwen3ForCausalLM", "UnsupportedConfigError"]
