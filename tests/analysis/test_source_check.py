"""The plan of every class agrees with what was read in transformers' modeling file; a wrong one does not."""

import json

import msgspec
import pytest
from autoport.analysis.architecture import assemble
from autoport.analysis.estimate import estimate_parallelism
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.source_check import source_problems
from autoport.analysis.step import make_plan
from autoport.analysis.traits import Traits
from autoport.errors import Refusal
from autoport.families import FAMILIES
from autoport.families.family import QkNormStyle, names_read
from autoport.research.config import read_facts
from autoport.research.source import open_source
from autoport.research.step import add_modeling, research
from autoport.step import Options
from checkpoints import small_config, write_checkpoint
from published import PUBLISHED

replace = msgspec.structs.replace


def facts_of(tmp_path, family, **config):
    config = {"architectures": [family.hf_name], "model_type": family.model_type} | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(str(tmp_path))
    facts = read_facts(source)
    add_modeling(source, facts)
    return facts


def problems_of(facts, family):
    architecture = assemble(Traits(family, facts), CheckpointKeys([], family.keys), "bfloat16")
    return [problem.found for problem in source_problems(facts, family, architecture)]


# What their config classes leave to the file.
WITH_VALUES = {"bloom": {"seq_length": 2048}, "glm4_moe": {"head_dim": 128}}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_declaration_agrees_with_its_class(tmp_path, name):
    family = FAMILIES[name]
    facts = facts_of(tmp_path, family, **WITH_VALUES.get(family.model_type, {}))
    assert facts.modeling.file.startswith("modeling_")
    assert problems_of(facts, family) == []


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("LlamaForCausalLM", {"norm": "layer"}, "input_layernorm has kind 'rms', the plan has 'layer'"),
        ("LlamaForCausalLM", {"norm_weight": "one_plus"}, "has weight 'plain', the plan has 'one_plus'"),
        ("LlamaForCausalLM", {"norm_rounding": "after_weight"}, "has rounding 'before_weight'"),
        ("LlamaForCausalLM", {"pairing": "interleaved"}, "rotate_half rotates [('half', 1)]"),
        ("LlamaForCausalLM", {"rope_sign": -1}, "sign -1"),
        (
            "LlamaForCausalLM",
            {"topology": "'parallel'"},
            "LlamaDecoderLayer is 'pre_norm', the plan has 'parallel'",
        ),
        ("LlamaForCausalLM", {"sinks": "True"}, "the plan has attention sinks"),
        ("GemmaForCausalLM", {"norm_rounding": "before_weight"}, "has rounding 'after_weight'"),
        (
            "Gemma3ForCausalLM",
            {"qk_norm": QkNormStyle(weight="one_plus")},
            "Gemma3Attention.q_norm has rounding 'after_weight', the plan has 'before_weight'",
        ),
        ("Gemma2ForCausalLM", {"norm_weight": "plain"}, "has weight 'one_plus', the plan has 'plain'"),
        ("GraniteForCausalLM", {"residual_scale": ""}, "multiplies by residual_multiplier 0.22"),
        ("GraniteForCausalLM", {"logit_scale": ""}, "divides by logits_scaling 16.0"),
        ("NanoChatForCausalLM", {"rope_sign": 1}, "sign 1"),
    ],
)
def test_a_wrong_declaration_is_caught(tmp_path, name, changes, found):
    granite = {"residual_multiplier": 0.22, "logits_scaling": 16.0} if name.startswith("Granite") else {}
    facts = facts_of(tmp_path, FAMILIES[name], **granite)
    assert problems_of(facts, FAMILIES[name]) == []
    assert any(found in text for text in problems_of(facts, replace(FAMILIES[name], **changes)))


def test_the_plan_is_refused_with_file_and_line(tmp_path):
    facts, checkpoint = research(str(write_checkpoint(tmp_path, small_config())))
    findings = [
        replace(finding, value=finding.value | {"kind": "layer"}) if finding.topic == "norm" else finding
        for finding in facts.modeling.findings
    ]
    facts.modeling = replace(facts.modeling, findings=findings)
    with pytest.raises(Refusal, match="SOURCE-CONFLICT") as caught:
        make_plan("small", facts, checkpoint, Options())
    assert caught.value.problems[0].where.startswith("modeling_llama.py:")


def test_a_key_that_the_declaration_reads_is_consumed(tmp_path):
    family = FAMILIES["GraniteForCausalLM"]
    assert {"residual_multiplier", "logits_scaling"} <= names_read(family)
    facts = facts_of(tmp_path, family, residual_multiplier=0.22, foo_multiplier=3.0)
    assert facts.unconsumed == {"foo_multiplier": 3.0}
    assert facts.declared["residual_multiplier"].value == 0.22
    assert (
        facts.declared["residual_multiplier"].source
        == "config.json: residual_multiplier, read by the declaration of GraniteForCausalLM"
    )


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("gemma-2-9b", {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}),
        ("command-r", {"logit_scale"}),
        ("gpt-oss-20b", {"swiglu_limit"}),
        ("falcon-7b", {"alibi", "bias", "parallel_attn"}),
    ],
)
def test_what_the_analysis_reads_is_not_put_to_the_user(tmp_path, name, declared):
    folder = write_checkpoint(tmp_path, PUBLISHED[name], {"model.layers.0.x.weight": ("BF16", (1,))})
    estimate = estimate_parallelism(str(folder), None, 1)
    assert declared <= set(estimate.facts.declared)
    assert not estimate.facts.unconsumed
