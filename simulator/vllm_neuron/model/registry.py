"""Architectures that the plugin registers with vLLM."""

from vllm_neuron.model.gpt_oss import GptOssForCausalLM
from vllm_neuron.model.llama3 import LlamaForCausalLM
from vllm_neuron.model.qwen3 import Qwen3ForCausalLM
from vllm_neuron.model.qwen3_moe import Qwen3MoeForCausalLM
from vllm_neuron.model.smollm3 import SmolLM3ForCausalLM


def get_models() -> list[tuple[str, type]]:
    """Return (Hugging Face architecture string, factory class) pairs."""
    return [
        ("GptOssForCausalLM", GptOssForCausalLM),
        ("LlamaForCausalLM", LlamaForCausalLM),
        ("Qwen3ForCausalLM", Qwen3ForCausalLM),
        ("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM),
        ("SmolLM3ForCausalLM", SmolLM3ForCausalLM),
    ]
