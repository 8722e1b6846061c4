"""SmolLM3ForCausalLM on the vLLM Neuron backend."""

from .config import SmolLM3Config, UnsupportedConfigError
from .factory import SmolLM3ForCausalLM

__all__ = ["SmolLM3Config", "SmolLM3ForCausalLM", "UnsupportedConfigError"]
