from .factory import MixaForCausalLM

__all__ = ["MixaForCausalLM"]
