"""config.json in, facts with sources out; every fault one clear refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from autoport.errors import Refusal
from autoport.research.config import load_config, read_facts
from autoport.research.config_types import type_conflicts
from autoport.research.source import open_source
from autoport.schema.facts import Facts
from checkpoints import real_config, small_config


def facts_of(tmp_path: Path, config: Any) -> Facts:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_facts(open_source(str(tmp_path)))


def problems_of(tmp_path: Path, config: Any) -> dict[str, str]:
    with pytest.raises(Refusal) as caught:
        facts_of(tmp_path, config)
    for problem in caught.value.problems:
        assert problem.next_step
        assert problem.where.endswith("config.json")
    return {problem.rule: problem.found for problem in caught.value.problems}


def test_every_field_names_the_key_it_was_read_from(tmp_path):
    facts = facts_of(tmp_path, real_config("llama-3.2-1b"))
    assert facts.architecture.value == "LlamaForCausalLM"
    assert facts.fields["num_layers"].value == 16
    assert facts.fields["num_layers"].source == "config.json: num_hidden_layers"
    assert facts.fields["norm_eps"].value == 1e-5
    assert facts.fields["tie_word_embeddings"].value is True
    assert facts.fields["dtype"].source == "config.json: torch_dtype"
    assert facts.warnings == []
    assert facts.unconsumed == {}


def test_a_field_left_out_takes_the_class_default_and_says_so(tmp_path):
    facts = facts_of(tmp_path, small_config(rms_norm_eps=..., tie_word_embeddings=...))
    assert facts.fields["norm_eps"].value == 1e-6
    assert facts.fields["norm_eps"].source.startswith("LlamaConfig default (transformers ")
    assert "configuration_llama.py:" in facts.fields["norm_eps"].source
    assert facts.fields["tie_word_embeddings"].value is False
    assert facts.fields["tie_word_embeddings"].source.startswith("LlamaConfig default")


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rope_scaling", "sliding_window"])
def test_null_is_the_same_as_absent(tmp_path, key):
    absent = facts_of(tmp_path, small_config(**{key: ...}))
    null = facts_of(tmp_path, small_config(**{key: None}))
    values = [{name: fact.value for name, fact in facts.fields.items()} for facts in (absent, null)]
    values[1].pop("sliding_window", None)
    assert values[0] == values[1]


def test_null_switches_a_window_off_that_the_class_would_default_to(tmp_path):
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    absent = facts_of(tmp_path, small_config(**mistral))
    assert absent.fields["sliding_window"].value == 4096
    assert absent.fields["sliding_window"].source.startswith("MistralConfig default")
    null = facts_of(tmp_path, small_config(**mistral, sliding_window=None))
    assert null.fields["sliding_window"].value is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps is None; the class takes float"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; the class takes int | list[int] | None"),
        ({"eos_token_id": [2, "3"]}, "[2, '3']"),
        ({"bos_token_id": 1.0}, "bos_token_id is 1.0"),
        ({"bos_token_id": True}, "bos_token_id is True"),
        ({"initializer_range": 1}, "the class takes float"),
        ({"attention_dropout": "none"}, "attention_dropout is 'none'"),
    ],
)
def test_what_the_config_class_rejects_is_refused_with_its_line(tmp_path, changes, found):
    text = problems_of(tmp_path, small_config(**changes))["CFG-CLASS"]
    assert found in text
    assert re.search(r"configuration_llama\.py:\d+\)", text)


def test_the_class_is_asked_whether_it_takes_the_architecture(tmp_path):
    config = small_config(hidden_size=60, num_attention_heads=8, head_dim=8)
    assert "hidden_size % num_attention_heads != 0" in problems_of(tmp_path, config)["CFG-CLASS"]


def test_transformers_rejects_and_takes_the_same_configs(tmp_path):
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig

    for key in ("vocab_size", "eos_token_id", "hidden_act", "use_cache", "pretraining_tp", "rms_norm_eps"):
        for value in (None, True, 1, 1.0, "1", [1], ["1"]):
            try:
                LlamaConfig(**{key: value})
                taken = True
            except StrictDataclassError:
                taken = False
            conflicts = [name for name, _ in type_conflicts("llama", {key: value})]
            assert (not conflicts) == taken, (key, value)


def test_head_dim_of_the_config_wins_over_the_quotient(tmp_path):
    given = facts_of(tmp_path, small_config(head_dim=32)).fields["head_dim"]
    assert (given.value, given.source) == (32, "config.json: head_dim")
    derived = facts_of(tmp_path, small_config()).fields["head_dim"]
    assert derived.value == 16
    assert derived.source.startswith("derived")


def test_without_key_value_heads_every_head_has_its_own(tmp_path):
    fact = facts_of(tmp_path, small_config(num_key_value_heads=...)).fields["num_kv_heads"]
    assert fact.value == 4
    assert fact.source.startswith("derived")


def test_the_window_flag_of_qwen2_switches_its_window_off(tmp_path):
    facts = facts_of(tmp_path, real_config("qwen2-7b"))
    fact = facts.fields["sliding_window"]
    assert fact.value is None
    assert "use_sliding_window" in fact.source
    assert not facts.warnings  # the config contradicts nothing
    silent = {key: value for key, value in real_config("qwen2-7b").items() if key != "use_sliding_window"}
    (warning,) = facts_of(tmp_path, silent).warnings
    assert warning.startswith("sliding_window 131072 is not in force: use_sliding_window is false (")
    on = real_config("qwen2-7b") | {"use_sliding_window": True, "max_window_layers": 2}
    assert facts_of(tmp_path, on).fields["sliding_window"].value == 131072


def test_a_window_that_no_layer_has_is_none(tmp_path):
    config = real_config("qwen2-7b") | {"use_sliding_window": True, "max_window_layers": 28}
    fact = facts_of(tmp_path, config).fields["sliding_window"]
    assert fact.value is None
    assert "max_window_layers" in fact.source


def test_layer_types_must_fit_the_layers(tmp_path):
    config = small_config(layer_types=["full_attention"])
    assert "1 entries for 2 layers" in problems_of(tmp_path, config)["CFG-LAYER-TYPES"]
    config = small_config(layer_types=["linear_attention", "full_attention"])
    assert "linear_attention" in problems_of(tmp_path, config)["CFG-LAYER-TYPES"]
    config = small_config(layer_types=["sliding_attention", "full_attention"])
    assert "no sliding_window" in problems_of(tmp_path, config)["CFG-LAYER-TYPES"]


@pytest.mark.parametrize(
    ("architectures", "found"),
    [
        (..., "missing"),
        (None, "None"),
        ([], "[]"),
        (["LlamaForCausalLM", "LlamaModel"], "not one class name"),
        (["LlamaModel"], "not a causal language model"),
        (["LlamaForSequenceClassification"], "not a causal language model"),
        (["Llama ForCausalLM"], "not one class name"),
        ([7], "not one class name"),
        ("LlamaForCausalLM", "LlamaForCausalLM"),
    ],
)
def test_architectures_is_never_guessed(tmp_path, architectures, found):
    with pytest.raises(Refusal) as caught:
        facts_of(tmp_path, small_config(architectures=architectures))
    (problem,) = caught.value.problems
    assert problem.rule == "CFG-ARCH"
    assert found in problem.found
    assert '["LlamaForCausalLM"]' in problem.next_step


@pytest.mark.parametrize(("value", "found"), [(..., "missing"), (None, "None"), ("", "''")])
def test_transformers_needs_a_model_type(tmp_path, value, found):
    with pytest.raises(Refusal) as caught:
        facts_of(tmp_path, small_config(model_type=value))
    (problem,) = caught.value.problems
    assert problem.found == f"model_type is {found}"
    assert 'for LlamaForCausalLM it is "llama"' in problem.next_step


@pytest.mark.parametrize(
    ("config", "rule", "why"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "SCOPE-ARCH",
            "no intermediate_size",
        ),
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "SCOPE-ARCH", "no num_heads"),
        ({"architectures": ["NewForCausalLM"], "model_type": "new"}, "SCOPE-ARCH", "has no model_type 'new'"),
        (
            {"architectures": ["WhisperForCausalLM"], "model_type": "whisper", "is_encoder_decoder": True},
            "SCOPE-ARCH",
            "only decoders",
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "CFG-ARCH", "not a causal"),
        ({"architectures": ["ViTForImageClassification"], "model_type": "vit"}, "CFG-ARCH", "not a causal"),
    ],
)
def test_another_kind_of_model_is_one_problem(tmp_path, config, rule, why):
    with pytest.raises(Refusal) as caught:
        facts_of(tmp_path, config)
    (problem,) = caught.value.problems
    assert problem.rule == rule
    assert why in problem.found
    assert "references/coverage.md" in problem.next_step


@pytest.mark.parametrize(
    ("changes", "rule", "found"),
    [
        ({"hidden_size": "64"}, "CFG-TYPE", "hidden_size is '64', not a whole number"),
        ({"hidden_size": 64.0}, "CFG-TYPE", "not a whole number"),
        ({"num_hidden_layers": True}, "CFG-TYPE", "num_hidden_layers is True"),
        ({"num_attention_heads": -4}, "CFG-TYPE", "-4"),
        ({"vocab_size": 0}, "CFG-TYPE", "vocab_size is 0"),
        ({"vocab_size": 10**15}, "CFG-TYPE", "vocab_size is 1000000000000000"),
        ({"num_hidden_layers": 10**9}, "CFG-TYPE", "at most 10000 layers, heads or experts"),
        ({"num_attention_heads": 10**9}, "CFG-TYPE", "at most 10000 layers, heads or experts"),
        ({"num_key_value_heads": [2, 0]}, "CFG-PER-LAYER", "[2, 0]: layer 1 has none"),
        ({"hybrid_override_pattern": "M-M*-"}, "CFG-PER-LAYER", "M-M*-"),
        (
            {"block_configs": [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}]},
            "CFG-PER-LAYER",
            "layer 1 has no attention",
        ),
        ({"rms_norm_eps": "1e-5"}, "CFG-TYPE", "not a number"),
        ({"hidden_act": 3}, "CFG-TYPE", "hidden_act is 3"),
        ({"tie_word_embeddings": "false"}, "CFG-TYPE", "not true or false"),
        ({"num_key_value_heads": 3}, "CFG-GQA", "4 query heads are not a multiple of 3"),
        ({"hidden_size": 66}, "CFG-HEAD-DIM", "66"),
        ({"model_type": "no_such_type", "hidden_act": ...}, "SCOPE-ARCH", "config.json gives no activation"),
        ({"model_type": 3}, "CFG-MODEL-TYPE", "model_type is 3"),
        ({"dtype": "float32"}, "CFG-CONFLICT", "dtype 'float32', torch_dtype 'bfloat16'"),
        ({"text_config": {"hidden_size": 64}}, "CFG-NESTED", "both the top level and text_config"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, changes, rule, found):
    assert found in problems_of(tmp_path, small_config(**changes))[rule]


def test_what_makes_layers_differ_is_named_beside_an_unknown_class(tmp_path):
    blocks = [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}]
    changes = {"model_type": "nemotron-nas", "intermediate_size": None, "block_configs": blocks}
    problems = problems_of(tmp_path, small_config(**changes))
    assert problems.keys() == {"SCOPE-ARCH", "CFG-PER-LAYER"}
    assert "layer 1 has no attention" in problems["CFG-PER-LAYER"]


def test_all_problems_come_at_once(tmp_path):
    problems = problems_of(tmp_path, small_config(architectures=[], vocab_size="many", rope_theta=-1.0))
    assert problems.keys() == {"CFG-ARCH", "CFG-TYPE", "CFG-ROPE"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "not valid JSON"),
        ('{"vocab_size": 3', "not valid JSON"),
        ("[1, 2]", "not an object"),
        ('{"rms_norm_eps": NaN}', "NaN"),
        ('{"rms_norm_eps": Infinity}', "Infinity"),
        ("[" * 200_000, "nested too deep"),
        ('{"a": ' * 5_000 + "1" + "}" * 5_000, "nested too deep"),
        ('{"vocab_size": ' + "9" * 5_000 + "}", "a number of 5000 digits: 9"),
        ('{"vocab_size": ' + "9" * 401 + "}", "a number of 401 digits: 9"),
        ('{"vocab_size": 3, "a": {"b": 1, "b": 1}}', "key 'b' appears twice"),
        ('{"rope_theta": 1.0, "c": 2, "rope_theta": 2.0}', "key 'rope_theta' appears twice"),
        ('{"model_type": "\\ud800"}', "not valid JSON"),
    ],
)
def test_text_that_is_no_config_is_one_refusal(tmp_path, text, found):
    assert found in problems_of(tmp_path, text)["CFG-JSON"]


def test_a_huge_integer_elsewhere_does_no_harm(tmp_path):
    assert facts_of(tmp_path, small_config(model_max_length=10**30)).fields["hidden_size"].value == 64
    assert "not between 1 and" in problems_of(tmp_path, small_config(hidden_size=10**30))["CFG-TYPE"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"auto_map": "boom"}, "auto_map is 'boom', not an object"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": "foo"},
            "text_config is 'foo', not an object",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 0},
            "sliding_window is 0, which the class takes for a window of no tokens",
        ),
    ],
)
def test_a_value_that_would_be_dropped_is_refused(tmp_path, changes, found):
    assert found in problems_of(tmp_path, small_config(**changes))["CFG-TYPE"]


def test_a_window_that_is_switched_off_may_be_written_as_zero(tmp_path):
    """As Qwen2-MoE's class saves it."""
    off = small_config(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=0, use_sliding_window=False
    )
    assert facts_of(tmp_path, off).fields["sliding_window"].value is None


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 4096), ("num_hidden_layers", 32)])
def test_a_size_that_only_the_class_gives_is_said(tmp_path, name, value):
    config = small_config()
    del config[name]
    (warning,) = facts_of(tmp_path, config).warnings
    assert warning.startswith(f"config.json gives no {name}; the class has {value}")


def test_bytes_that_are_no_text_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(Refusal, match="CFG-MISSING-FILE"):
        load_config(open_source(str(tmp_path)))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(Refusal, match="CFG-JSON"):
        load_config(open_source(str(tmp_path)))


def test_a_huge_file_is_not_read(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(10**12)
    source = open_source(str(tmp_path))
    with pytest.raises(Refusal, match="CFG-SIZE"):
        load_config(source)
    assert source.bytes_read == 0


def test_remote_code_is_recorded_and_not_run(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w')")
    (tmp_path / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w')")
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    config = small_config(
        auto_map=auto_map, architectures=["XForCausalLM"], model_type="x", attention_bias=False
    )
    assert facts_of(tmp_path, config).remote_code == auto_map
    assert not marker.exists()


def test_keys_that_look_semantic_and_are_not_used_are_listed(tmp_path):
    dropout = {"attn_pdrop": 0.1, "residual_dropout": 0.1, "attn_dropout_prob": 0.1}
    config = small_config(embedding_multiplier=12.0, foo_scale=3.0, use_cache=True, eos_token_id=2, **dropout)
    assert facts_of(tmp_path, config).unconsumed == {"embedding_multiplier": 12.0, "foo_scale": 3.0}


def test_a_spelling_that_the_class_does_not_read_is_not_taken(tmp_path):
    facts = facts_of(tmp_path, small_config(layer_norm_eps=1e-3))
    assert facts.fields["norm_eps"].value == 1e-5
    assert facts.unconsumed == {"layer_norm_eps": 1e-3}


HUNYUAN = {"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "num_experts": 8}


def test_a_number_of_experts_per_token_for_each_layer_counts_when_it_is_one(tmp_path):
    fact = facts_of(tmp_path, small_config(**HUNYUAN, moe_topk=[2, 2])).fields["num_experts_per_tok"]
    assert (fact.value, fact.source) == (2, "derived: the same for every layer (config.json: moe_topk)")


@pytest.mark.parametrize(
    ("counts", "rule", "found", "step"),
    [
        (
            [2, 3],
            "SCOPE-MOE",
            "different numbers of experts per token: [2, 3] (config.json: moe_topk)",
            "only one",
        ),
        ([2, "2"], "CFG-TYPE", "moe_topk is '2', not a whole number", "correct moe_topk"),
        ([], "CFG-TYPE", "moe_topk is an empty list", "correct moe_topk"),
    ],
)
def test_other_lists_of_experts_per_token_are_refused_once(tmp_path, counts, rule, found, step):
    with pytest.raises(Refusal) as caught:
        facts_of(tmp_path, small_config(**HUNYUAN, moe_topk=counts))
    (problem,) = caught.value.problems
    assert problem.rule == rule
    assert found in problem.found
    assert problem.next_step.startswith(step)
