"""Architectures that the plugin registers with vLLM."""

from vllm_neuron.model.gpt_oss import GptOssForCausalLM
from vllm_neuron.model.llama3 import LlamaForCausalLM
from vllm_neuron.model.qwen3_moe import Qwen3MoeForCausalLM


def get_models() -> list[tuple[str, type]]:
    """Return (Hugging Face architecture string, factory class) pairs."""
    return [
        ("GptOssForCausalLM", GptOssForCausalLM),
        ("LlamaForCausalLM", LlamaForCausalLM),
        ("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM),
    ]
