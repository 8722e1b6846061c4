"""RoPE in the forms of transformers 4 and 5 comes out as one."""

import json
from typing import get_args

import pytest
from autoport.errors import Refusal
from autoport.research.config import read_facts
from autoport.research.rope import SCALINGS
from autoport.research.source import open_source
from autoport.schema.architecture import Rope
from checkpoints import real_config, small_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def resolve(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(small_config(**changes)))
    facts = read_facts(open_source(str(tmp_path)))
    return facts.fields, facts.warnings


def test_both_forms_give_the_same_theta_with_its_own_source(tmp_path):
    new, _ = resolve(
        tmp_path, rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    )
    old, _ = resolve(tmp_path, rope_theta=500000.0, rope_scaling=None)
    assert new["rope_theta"].value == old["rope_theta"].value == 500000.0
    assert new["rope_theta"].source == "config.json: rope_parameters.rope_theta"
    assert old["rope_theta"].source == "config.json: rope_theta"
    assert new["rope_type"].value == old["rope_type"].value == "default"


def test_two_thetas_that_differ_are_a_warning_and_the_nested_one_wins(tmp_path):
    fields, warnings = resolve(
        tmp_path, rope_theta=10000, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    )
    assert fields["rope_theta"].value == 500000.0
    assert any("500000.0" in warning and "10000" in warning for warning in warnings)


def test_no_theta_is_the_labelled_default_of_transformers(tmp_path):
    fields, _ = resolve(tmp_path, rope_theta=...)
    assert fields["rope_theta"].value == 10000.0
    assert "modeling_rope_utils.py:" in fields["rope_theta"].source


@pytest.mark.parametrize("spelling", [{"rope_type": "llama3"}, {"type": "llama3"}])
def test_llama3_parameters_in_every_form(tmp_path, spelling):
    old, _ = resolve(tmp_path, rope_scaling=spelling | LLAMA3)
    new, _ = resolve(tmp_path, rope_theta=..., rope_parameters=spelling | LLAMA3 | {"rope_theta": 500000.0})
    for fields in (old, new):
        assert fields["rope_type"].value == "llama3"
        assert fields["rope_parameters"].value == LLAMA3
        assert fields["rope_theta"].value == 500000.0


def test_type_and_rope_type_that_differ_are_a_warning(tmp_path):
    fields, warnings = resolve(tmp_path, rope_scaling={"type": "linear", "rope_type": "llama3"} | LLAMA3)
    assert fields["rope_type"].value == "llama3"
    assert any("'linear'" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("changes", "ignored"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e6}}, "'factor': 8.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, None),  # the class puts it into a block
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, None),
    ],
)
def test_values_that_no_kind_of_layers_reads_are_a_warning(tmp_path, changes, ignored):
    olmo = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "rope_theta": ...}
    fields, warnings = resolve(tmp_path, **olmo | changes)
    assert fields["rope_type"].value == "per_layer_type"
    found = [text for text in warnings if "the class reads only the blocks" in text]
    assert len(found) == bool(ignored)
    assert all(ignored in text for text in found)


@pytest.mark.parametrize(
    ("block", "rope_type"),
    [
        ({"type": "linear", "factor": 4.0}, "linear"),
        ({"type": "su", "long_factor": [1.0]}, "longrope"),
        ({"type": "default", "mrope_section": [16, 24, 24]}, "mrope"),
        ({"rope_type": "xyz"}, "xyz"),
        ({"full_attention": {"rope_type": "default"}}, "per_layer_type"),
        ({"rope_theta": 1e6}, "default"),
        ({}, "default"),
    ],
)
def test_types_are_told_apart(tmp_path, block, rope_type):
    fields, _ = resolve(tmp_path, rope_theta=..., rope_parameters=block)
    assert fields["rope_type"].value == rope_type


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling has factor but no rope_type"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3', not an object"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type is 3"),
        ({"rope_scaling": {"rope_type": {}}}, "rope_scaling.rope_type is {}"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6', not a number"),
        ({"rope_theta": True}, "not a number"),
        ({"rope_theta": 0}, "not a finite number above zero"),
        ({"rope_theta": None}, "rope_theta is null"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e308}},
            "partial_rotary_factor is 1e+308",
        ),
    ],
)
def test_a_wrong_block_is_named(tmp_path, changes, found):
    with pytest.raises(Refusal, match="CFG-ROPE") as caught:
        resolve(tmp_path, **changes)
    assert found in str(caught.value)


def test_the_way_forward_lists_the_types_that_can_be_ported_with_their_numbers(tmp_path):
    with pytest.raises(Refusal, match="CFG-ROPE") as caught:
        resolve(tmp_path, rope_scaling={"factor": 8.0})
    (problem,) = caught.value.problems
    for kind, scaling in SCALINGS.items():
        if kind != "default":
            assert f"{kind} (with {', '.join(scaling.numbers + scaling.lists)})" in problem.next_step


def test_the_types_that_can_be_ported_are_those_of_the_description():
    assert set(SCALINGS) == set(get_args(Rope.__annotations__["kind"]))


def test_the_facts_agree_with_what_transformers_makes_of_the_same_config(tmp_path):
    from transformers import LlamaConfig

    for config in (real_config("llama-3.2-1b"), real_config("yi-6b"), real_config("smollm2-135m")):
        (tmp_path / "config.json").write_text(json.dumps(config))
        fields = read_facts(open_source(str(tmp_path))).fields
        reference = LlamaConfig.from_pretrained(tmp_path)
        expected = {"rope_type": fields["rope_type"].value, "rope_theta": fields["rope_theta"].value}
        assert reference.rope_parameters == expected | fields["rope_parameters"].value
