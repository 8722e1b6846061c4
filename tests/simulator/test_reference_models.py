"""The simulator's own models: each is one graph, and computes what the Hugging Face class does."""

import pytest
import torch
from autoport.validation import reference, twin
from vllm_neuron.model.registry import get_models
from vllm_neuron.simulator.activate import activate, deactivate

SMALL = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False, "dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attention_bias": False,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = ROPE | {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4}
CONFIGS = {
    "LlamaForCausalLM": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "rope_parameters": ROPE},
    "SmolLM3ForCausalLM": {
        "model_type": "smollm3", "rope_parameters": ROPE, "no_rope_layers": [1, 0], "tie_word_embeddings": True,
    },
    "Qwen3MoeForCausalLM": EXPERTS | {"model_type": "qwen3_moe", "rope_parameters": ROPE, "norm_topk_prob": True},
    "GptOssForCausalLM": EXPERTS | {
        "model_type": "gpt_oss", "rope_parameters": YARN, "attention_bias": True, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory):
    activate(1, 0, tmp_path_factory.mktemp("rank") / "init")
    yield
    deactivate()


def test_every_registered_model_is_here():
    assert CONFIGS.keys() == dict(get_models()).keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_reference_model_is_one_graph_and_right(tmp_path, name):
    from transformers import AutoConfig
    from vllm_neuron.simulator.harness import Harness

    twin.build(SMALL | CONFIGS[name] | {"architectures": [name]}, tmp_path, seed=0)
    config = AutoConfig.from_pretrained(tmp_path)
    config.dtype = torch.float32
    harness = Harness(
        dict(get_models())[name],
        config,
        str(tmp_path),
        neuron_config={"on_device_sampling_config": None},
        dtype=torch.float32,
        num_blocks=16,
        max_model_len=128,
        num_batched_tokens_buckets=[128],
        num_seqs_buckets=[4],
    )
    calls = []
    hook = harness.model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    ids = torch.randint(512, (71,), generator=torch.Generator().manual_seed(0)).tolist()
    sequence = harness.add(ids[:70])
    eager = [harness.prefill(sequence), harness.decode([sequence], ids[70:])]

    expected = reference.logits(reference.load(tmp_path, torch.float32), ids)[-2:]
    torch.testing.assert_close(torch.cat(eager), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    hook.remove()
    torch.compiler.reset()
    prefill, decode = calls
    compiled = torch.compile(harness.model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**prefill)[:1], eager[0])
    torch.testing.assert_close(compiled(**decode)[:1], eager[1])
