"""Architectures that the plugin registers with vLLM."""

from vllm_neuron.model.llama3 import LlamaForCausalLM


def get_models() -> list[tuple[str, type]]:
    """Return (Hugging Face architecture string, factory class) pairs."""
    return [("LlamaForCausalLM", LlamaForCausalLM)]
