from .factory import NovaForCausalLM

__all__ = ["NovaForCausalLM"]
