"""Facts that classes spell, derive or switch off in ways of their own; the kind behind each, not one model."""

import json

import pytest
from autoport import expressions
from autoport.errors import Refusal
from autoport.research.config import read_facts
from autoport.research.readings import READINGS
from autoport.research.source import open_source
from checkpoints import small_config
from published import PUBLISHED

ON, OFF, WINDOW = True, False, 512
BIGCODE = {
    "architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "n_head": 16, "n_embd": 2048,
    "n_layer": 24, "vocab_size": 49152, "n_positions": 2048,
}  # fmt: skip
GLM = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm", "head_dim": 128, "num_attention_heads": 32,
    "hidden_size": 4096,
}  # fmt: skip


def of(architecture, model_type, **changes):
    return small_config(architectures=[architecture], model_type=model_type, **changes)


def facts_of(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_facts(open_source(str(tmp_path)))


SMOLLM3 = ("SmolLM3ForCausalLM", "smollm3")
QWEN2, QWEN3 = ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")


@pytest.mark.parametrize(
    ("config", "field", "value", "source"),
    [
        (
            of(*SMOLLM3, num_hidden_layers=8, no_rope_layers=[1, 1, 1, 0, 1, 1, 1, 0]),
            "layer_rope", [ON, ON, ON, OFF] * 2, "1: rotates",
        ),
        (
            of(*SMOLLM3, num_hidden_layers=8, no_rope_layer_interval=4),
            "layer_rope", [ON, ON, ON, OFF] * 2, "configuration_smollm3.py",
        ),
        (
            of(*QWEN2, sliding_window=WINDOW, use_sliding_window=False),
            "layer_windows", [None] * 2, "configuration_qwen2.py",
        ),
        (
            of(*QWEN2, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=2, num_hidden_layers=6),
            "layer_windows", [None] * 2 + [WINDOW] * 4, "configuration_qwen2.py",
        ),
        (of(*QWEN3, sliding_window=WINDOW), "layer_windows", [None] * 2, "configuration_qwen3.py"),
        (
            of("Gemma3ForCausalLM", "gemma3_text", sliding_window=WINDOW, sliding_window_pattern=6,
               num_hidden_layers=12),
            "layer_windows", ([WINDOW] * 5 + [None]) * 2, "configuration_gemma3.py",
        ),
        (
            of("Cohere2MoeForCausalLM", "cohere2_moe", sliding_window=WINDOW, num_hidden_layers=8,
               first_k_dense_replace=2),
            "layer_rope", [ON] * 5 + [OFF, ON, ON], "prefix_dense_sliding_window_pattern",
        ),
        (of("MistralForCausalLM", "mistral", sliding_window=None), "layer_windows", [None] * 2, "is null"),
        (BIGCODE | {"multi_query": True}, "num_kv_heads", 1, "configuration_gpt_bigcode.py"),
        (BIGCODE | {"multi_query": False}, "num_kv_heads", 16, "configuration_gpt_bigcode.py"),
        (BIGCODE, "intermediate_size", 8192, "4 * n_embd"),
        (PUBLISHED["falcon-7b"], "num_kv_heads", 1, "multi_query"),
        (PUBLISHED["falcon-40b"], "num_kv_heads", 8, "num_kv_heads"),
        (GLM, "rope_parameters", {"partial_rotary_factor": 0.5}, "derived"),
        (PUBLISHED["qwen3-30b-a3b"] | {"num_experts": 64}, "num_experts", 64, "config.json: num_experts"),
        (PUBLISHED["olmo-1b"], "norm_eps", 1e-5, "a constant in the code of olmo"),
        (
            of("BioGptForCausalLM", "biogpt", layer_norm_eps=1e-12),
            "norm_eps", 1e-5, "a constant in the code of biogpt",
        ),
        (PUBLISHED["olmo-1b"], "rope_type", "default", "config.json: no rope_scaling or rope_parameters"),
        (
            {"architectures": ["MllamaForConditionalGeneration"], "text_config": PUBLISHED["qwen3-8b"]},
            "rope_type", "default", "config.json: no text_config.rope_scaling or text_config.rope_parameters",
        ),
    ],
)  # fmt: skip
def test_the_value_that_the_class_will_have(tmp_path, config, field, value, source):
    fact = facts_of(tmp_path, config).fields[field]
    assert fact.value == value
    assert source in fact.source


def test_a_window_that_the_class_switches_off_is_a_warning(tmp_path):
    facts = facts_of(tmp_path, of(*QWEN3, sliding_window=WINDOW))
    assert any("sliding_window 512" in warning for warning in facts.warnings)


@pytest.mark.parametrize(
    ("config", "rule", "found"),
    [
        (of(*SMOLLM3, num_hidden_layers=8, no_rope_layers=[1] * 7), "CFG-NOPE", "not a list of 8"),
        (PUBLISHED["deepseek-v3"] | {"scoring_func": "new"}, "CFG-ROUTER", "scoring_func is 'new'"),
        (PUBLISHED["deepseek-v3"] | {"topk_method": "new"}, "CFG-ROUTER", "topk_method is 'new'"),
        (PUBLISHED["deepseek-v3"] | {"moe_layer_freq": [0, 1]}, "CFG-LAYER-TYPES", "has 2 entries for 61 layers"),
        (PUBLISHED["deepseek-v3"] | {"qk_nope_head_dim": 2**40}, "CFG-TYPE", "qk_rope_head_dim is 1099511627840"),
        (PUBLISHED["mixtral-8x7b"] | {"num_experts_per_tok": 9}, "CFG-EXPERTS", "9 experts per token of 8"),
        (PUBLISHED["mixtral-8x7b"] | {"num_local_experts": 10**9}, "CFG-TYPE", "num_local_experts is 1000000000"),
        (PUBLISHED["deepseek-v3"] | {"n_shared_experts": 10**9}, "CFG-TYPE", "n_shared_experts is 1000000000"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_never_guessed(tmp_path, config, rule, found):
    with pytest.raises(Refusal, match=rule) as caught:
        facts_of(tmp_path, config)
    assert found in str(caught.value)


def test_readings_are_expressions():
    for fields in READINGS.values():
        for text in fields.values():
            expressions.parse(text)
