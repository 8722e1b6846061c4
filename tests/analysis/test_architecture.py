"""Facts and headers -> Architecture; everything out of scope is refused with value, place and way forward."""

import re

import pytest
from autoport.analysis.architecture import describe_architecture
from autoport.analysis.incomplete import describe_with_gaps
from autoport.analysis.positions import rope_blocks
from autoport.errors import Refusal
from autoport.families import FAMILIES, find_family
from autoport.research.step import research
from checkpoints import llama_keys, real_config, small_config, write_checkpoint
from published import PUBLISHED

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def describe(tmp_path, config, keys=None):
    return describe_architecture(*research(str(write_checkpoint(tmp_path, config, keys))))


def refused(tmp_path, config, keys=None):
    with pytest.raises(Refusal) as caught:
        describe(tmp_path, config, keys)
    return caught.value.problems


@pytest.mark.parametrize(
    ("name", "rope", "qkv_bias", "tied", "head_dim"),
    [
        ("llama-3.2-1b", "llama3", False, True, 64),
        ("yi-6b", "default", False, False, 128),
        ("mistral-7b-v0.3", "default", False, False, 128),
        ("qwen2-7b", "default", True, False, 128),
        ("smollm2-135m", "default", False, True, 64),
    ],
)
def test_published_models(tmp_path, name, rope, qkv_bias, tied, head_dim):
    architecture = describe(tmp_path, real_config(name))
    assert architecture.hf_name == real_config(name)["architectures"][0]
    assert architecture.rope.kind == rope
    assert architecture.attention.qkv_bias is qkv_bias
    assert architecture.head.tied is tied
    assert architecture.attention.head_dim == head_dim
    assert architecture.dtype == "bfloat16"


def test_the_scaling_carries_its_four_numbers(tmp_path):
    rope = describe(tmp_path, real_config("llama-3.2-1b")).rope
    assert rope.theta == 500000.0
    assert rope.parameters == {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_without_a_dtype_the_headers_decide(tmp_path):
    config = small_config(torch_dtype=...)
    keys = {key: ("F32", shape) for key, (_, shape) in llama_keys(config).items()}
    assert describe(tmp_path, config, keys).dtype == "float32"


def test_keys_without_the_model_prefix(tmp_path):
    config = small_config()
    assert describe(tmp_path, config, llama_keys(config, prefix="")).num_layers == 2


def test_head_dim_is_checked_against_the_projections(tmp_path):
    config = small_config(head_dim=32)
    assert describe(tmp_path, config).attention.head_dim == 32
    (problem,) = refused(tmp_path, small_config(), llama_keys(config))
    assert problem.rule == "HEAD-DIM"
    assert "128 rows" in problem.found
    assert "write head_dim: 32" in problem.next_step


def test_kv_heads_are_checked_against_the_projections(tmp_path):
    keys = llama_keys(small_config(num_key_value_heads=1))
    (problem,) = refused(tmp_path, small_config(), keys)
    assert problem.rule == "KV-HEADS"
    assert "write num_key_value_heads: 1" in problem.next_step


# --- Biases ---

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}


def test_qwen2_has_biases_that_its_config_does_not_mention(tmp_path):
    assert describe(tmp_path, small_config(**QWEN2)).attention.qkv_bias is True


def test_a_bias_missing_from_one_layer_is_seen(tmp_path):
    config = small_config(**QWEN2)
    keys = llama_keys(config)
    del keys["model.layers.1.self_attn.v_proj.bias"]
    (problem,) = refused(tmp_path, config, keys)
    assert problem.rule == "BIAS-MIXED"
    assert "self_attn.v_proj on layers 0" in problem.found


@pytest.mark.parametrize(
    ("changes", "qkv_bias", "found"),
    [
        ({"attention_bias": False}, True, "attention_bias is false (config.json: attention_bias)"),
        ({}, True, "attention_bias is false (LlamaConfig default"),
        (QWEN2, False, "Qwen2ForCausalLM always has one"),
        (MISTRAL, True, "has none"),
    ],
)
def test_biases_that_contradict_the_class_are_refused(tmp_path, changes, qkv_bias, found):
    config = small_config(**changes)
    (problem,) = refused(tmp_path, config, llama_keys(config, qkv_bias=qkv_bias))
    assert problem.rule == "BIAS-CONFLICT"
    assert found in problem.found


def ernie_keys(config, mlp_bias_on):
    """Layer 0 is dense and layer 1 has experts; with the biases of use_bias."""
    keys = llama_keys(config, qkv_bias=True) | {"lm_head.bias": ("BF16", (256,))}
    for layer in range(2):
        keys[f"model.layers.{layer}.self_attn.o_proj.bias"] = ("BF16", (64,))
    for name, rows in (("gate_proj", 128), ("up_proj", 128), ("down_proj", 64)):
        weight = keys.pop(f"model.layers.1.mlp.{name}.weight")
        keys[f"model.layers.1.mlp.shared_experts.{name}.weight"] = weight
        keys[f"model.layers.1.mlp.shared_experts.{name}.bias"] = ("BF16", (rows,))
        if name in mlp_bias_on:
            keys[f"model.layers.0.mlp.{name}.bias"] = ("BF16", (rows,))
    return keys


@pytest.mark.parametrize(
    ("mlp_bias_on", "rules"),
    [(("gate_proj", "up_proj", "down_proj"), ["SCOPE-BIAS"]), (("up_proj",), ["SCOPE-BIAS", "BIAS-MIXED"])],
)
def test_biases_that_the_config_asks_for_are_refused_once(tmp_path, mlp_bias_on, rules):
    config = small_config(
        architectures=["Ernie4_5_MoeForCausalLM"],
        model_type="ernie4_5_moe",
        use_bias=True,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_layer_start_index=1,
        moe_layer_interval=1,
    )
    problems = refused(tmp_path, config, ernie_keys(config, mlp_bias_on))
    assert [problem.rule for problem in problems] == rules
    assert "in the shared experts and on the head (derived: not use_bias" in problems[0].found
    assert "--incomplete" not in problems[0].next_step
    with pytest.raises(Refusal, match="SCOPE-BIAS"):
        describe_with_gaps(*research(str(tmp_path)))


def test_every_bias_that_the_config_denies_is_named(tmp_path):
    config = small_config()
    keys = llama_keys(config, qkv_bias=True)
    for layer in range(2):
        keys[f"model.layers.{layer}.self_attn.o_proj.bias"] = ("BF16", (64,))
        keys[f"model.layers.{layer}.mlp.up_proj.bias"] = ("BF16", (128,))
    problems = refused(tmp_path, config, keys)
    assert {problem.rule for problem in problems} == {"BIAS-CONFLICT", "BIAS-MIXED"}
    found = "\n".join(problem.found for problem in problems)
    assert "the attention output has a bias in the checkpoint, but attention_bias is false" in found
    assert "mlp.up_proj on layers 0-1, mlp.down_proj on layers none" in found


def test_an_untied_head_must_be_there(tmp_path):
    keys = llama_keys(small_config(tie_word_embeddings=True))
    (problem,) = refused(tmp_path, small_config(), keys)
    assert problem.rule == "HEAD-MISSING"
    assert "tie_word_embeddings is false" in problem.found
    assert "no lm_head.weight" in problem.found
    assert "embedding model" in problem.next_step


def test_a_tied_head_that_differs_is_refused(tmp_path):
    config = small_config(tie_word_embeddings=True)
    keys = llama_keys(config) | {"lm_head.weight": ("F32", (256, 64))}
    (problem,) = refused(tmp_path, config, keys)
    assert problem.rule == "HEAD-TIED"
    assert "tie_word_embeddings: false" in problem.next_step


# --- Out of scope ---


@pytest.mark.parametrize(
    ("changes", "rule", "value"),
    [
        ({"model_type": "mistral", "sliding_window": None}, "SCOPE-ARCH", "'mistral'"),
        ({"hidden_act": "tanh"}, "SCOPE-ACTIVATION", "'tanh'"),
        ({"rope_scaling": {"type": "dynamic", "factor": "4"}}, "CFG-ROPE", "factor, found '4'"),
        (
            {
                "original_max_position_embeddings": 16,
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0]},
            },
            "CFG-ROPE",
            "long_factor, a list of 8 numbers, found [2.0]",
        ),
        ({"rope_scaling": {"rope_type": "xyz"}}, "SCOPE-ROPE", "'xyz' is unknown"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "SCOPE-ROPE", "'mrope'"),
        ({"partial_rotary_factor": 0.5}, "SCOPE-ROPE", "0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "SCOPE-ROPE", "0.25"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "CFG-ROPE", "llama3 RoPE needs factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": "1"}}, "CFG-ROPE", "low_freq_factor, found '1'"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "CFG-ROPE", "high_freq_factor 1.0"),
        ({"mlp_bias": True}, "BIAS-CONFLICT", "mlp_bias"),
        ({"torch_dtype": "float64"}, "SCOPE-DTYPE", "'float64'"),
        ({"head_dim": 15}, "SCOPE-HEAD-DIM", "15"),
    ],
)
def test_a_feature_of_the_config_is_refused(tmp_path, changes, rule, value):
    problems = refused(tmp_path, small_config(**changes))
    assert [problem.rule for problem in problems] == [rule]
    assert value in problems[0].found
    assert problems[0].where.endswith("config.json")
    assert problems[0].next_step


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"sliding_window": 64}, "SCOPE-WINDOW"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": True},
            "SCOPE-BIAS",
        ),
    ],
)
def test_what_the_class_ignores_is_no_part_of_the_port(tmp_path, changes, rule):
    (problem,) = refused(tmp_path, small_config(**changes))
    assert problem.rule == rule
    assert "ignores" in problem.found
    assert "remove" in problem.next_step


def test_a_class_name_in_other_capitals_is_the_same_class_and_stays_as_it_is_written():
    assert find_family("PhiMoEForCausalLM", "phimoe") is FAMILIES["PhimoeForCausalLM"]
    assert find_family("PhiMoEForCausalLM", "phi3") is None
    assert find_family("NewForCausalLM", "phimoe") is None


def test_the_exact_name_of_the_config_is_the_one_to_register(tmp_path):
    described = describe(tmp_path, small_config(architectures=["LLaMAForCausalLM"]))
    assert described.hf_name == "LLaMAForCausalLM"


def test_an_architecture_out_of_scope_is_the_only_problem(tmp_path):
    config = small_config(architectures=["MambaForCausalLM"], model_type="mamba", hidden_act="tanh")
    problem, feature = refused(tmp_path, config, {"backbone.layers.0.mixer.A_log": ("F32", (128, 16))})
    assert problem.rule == feature.rule == "SCOPE-ARCH"
    assert "MambaForCausalLM" in problem.found
    assert "references/coverage.md" in problem.next_step
    assert re.fullmatch(r"modeling_mamba\.py:\d+, MambaMixer", feature.where)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("deepseek-v3", "deepseek_v32"), ("gemma-3-4b", "qwen3_vl"), ("llama4-text", "gpt_oss")],
)
def test_a_class_that_is_no_llama_with_other_parts_is_written_by_hand_as_a_whole(tmp_path, name, nearest):
    config = PUBLISHED.get(name) or small_config(
        architectures=["Llama4ForCausalLM"], model_type="llama4_text", num_local_experts=4
    )
    found = research(str(write_checkpoint(tmp_path, config, llama_keys(small_config()))))
    for describe_class in (describe_architecture, describe_with_gaps):
        with pytest.raises(Refusal) as error:
            describe_class(*found)
        problem, *features = error.value.problems
        assert features
        assert {item.rule for item in error.value.problems} == {"SCOPE-ARCH"}
        assert f"reference model {nearest}/" in problem.next_step
        assert "--incomplete" not in problem.next_step


def test_a_class_whose_keys_are_not_llamas_is_one_problem_with_incomplete(tmp_path):
    config = small_config(architectures=["DiffLlamaForCausalLM"], model_type="diffllama")
    keys = llama_keys(small_config())
    keys = {key: value for key, value in keys.items() if "self_attn" not in key} | {
        f"model.layers.{i}.self_attn.qkv_proj.weight": ("BF16", (128, 64)) for i in (0, 1)
    }
    with pytest.raises(Refusal) as error:
        describe_with_gaps(*research(str(write_checkpoint(tmp_path, config, keys))))
    problem, feature = error.value.problems
    assert problem.rule == feature.rule == "SCOPE-ARCH"
    assert "cannot be planned as Llama with other parts: MAP-" in problem.found
    assert "by hand as a whole" in problem.next_step
    assert "differential attention" in feature.found


@pytest.mark.parametrize(
    ("suffix", "rule"),
    [
        ("self_attn.q_norm.weight", "SCOPE-QK-NORM"),
        ("self_attn.k_layernorm.weight", "SCOPE-QK-NORM"),
        ("input_layernorm.bias", "SCOPE-NORM"),
        ("self_attn.sinks", "SCOPE-SINK"),
        ("self_attn.kv_a_proj_with_mqa.weight", "SCOPE-MLA"),
        ("self_attn.qkv_proj.weight", "SCOPE-FUSED"),
        ("mlp.gate_up_proj.weight", "SCOPE-FUSED"),
        ("mlp.experts.0.gate_proj.weight", "SCOPE-MOE"),
        ("block_sparse_moe.gate.weight", "SCOPE-MOE"),
        ("mlp.shared_expert.up_proj.weight", "SCOPE-MOE"),
    ],
)
def test_a_foreign_part_of_the_last_layer_is_refused(tmp_path, suffix, rule):
    keys = llama_keys(small_config()) | {f"model.layers.1.{suffix}": ("BF16", (64,))}
    (problem,) = refused(tmp_path, small_config(), keys)
    assert problem.rule == rule
    assert suffix in problem.found
    assert "layers 1" in problem.found
    if "--incomplete" in problem.next_step:
        found = research(str(tmp_path))
        assert [gap.section for gap in describe_with_gaps(*found).gaps] == ["attention"]


@pytest.mark.parametrize(("key", "rule"), [("lm_head.bias", "SCOPE-BIAS"), ("model.norm.bias", "SCOPE-NORM")])
def test_a_foreign_key_outside_the_layers_is_refused(tmp_path, key, rule):
    (problem,) = refused(tmp_path, small_config(), llama_keys(small_config()) | {key: ("BF16", (64,))})
    assert problem.rule == rule
    assert key in problem.found
    assert "--incomplete" not in problem.next_step


@pytest.mark.parametrize(
    ("changes", "biases", "rule"),
    [
        ({"attention_bias": False}, True, "BIAS-CONFLICT"),
        ({"sliding_window": 64}, False, "SCOPE-WINDOW"),
    ],
)
def test_config_and_checkpoint_must_agree_with_incomplete_too(tmp_path, changes, biases, rule):
    config = small_config(**changes)
    write_checkpoint(tmp_path, config, llama_keys(config, qkv_bias=biases))
    with pytest.raises(Refusal, match=rule):
        describe_with_gaps(*research(str(tmp_path)))


def test_another_family_of_key_names_is_refused(tmp_path):
    (problem,) = refused(
        tmp_path, small_config(), {"transformer.h.0.attn.c_attn.weight": ("BF16", (64, 192))}
    )
    assert problem.rule == "SCOPE-KEYS"
    assert "transformer.h.0.attn.c_attn.weight" in problem.found


def test_every_feature_is_named_at_once(tmp_path):
    config = small_config(hidden_act="tanh", rope_scaling={"type": "xyz", "factor": 4.0})
    keys = llama_keys(config) | {"model.layers.0.self_attn.q_norm.weight": ("BF16", (16,))}
    rules = {problem.rule for problem in refused(tmp_path, config, keys)}
    assert rules == {"SCOPE-ACTIVATION", "SCOPE-ROPE", "SCOPE-QK-NORM"}


def test_single_values_beside_rope_blocks_are_none():
    parameters = {"factor": 4, "full_attention": {"rope_theta": 1e6}, "sliding_attention": 3}
    assert rope_blocks(parameters) == {"full_attention": {"rope_theta": 1e6}}
