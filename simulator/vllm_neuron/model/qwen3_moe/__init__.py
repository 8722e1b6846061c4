"""Qwen3MoeForCausalLM on the vLLM Neuron backend."""

from .config import Qwen3MoeConfig, UnsupportedConfigError
from .factory import Qwen3MoeForCausalLM

__all__ = ["Qwen3MoeConfig", "Qwen3MoeForCausalLM", "UnsupportedConfigError"]
