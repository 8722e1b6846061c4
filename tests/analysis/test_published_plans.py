"""Research and analysis of published models at their real size: keys and shapes of transformers' own class."""

import json
import math
import re
import time

import pytest
from autoport.analysis.estimate import estimate_parallelism
from autoport.analysis.step import make_plan
from autoport.errors import Refusal
from autoport.research.step import research
from autoport.step import Options
from checkpoints import write_checkpoint
from published import PUBLISHED
from published_keys import keys_of


def plan_of(tmp_path, name):
    return make_plan(
        "model", *research(str(write_checkpoint(tmp_path, PUBLISHED[name], keys_of(name)))), Options()
    )


# What an expert would note: reference, recommended TP, and a word of the comparison.
EXPECTED = {
    "llama-3.1-8b": ("llama3", 2, "factor 8"),
    "mistral-7b-v0.1": ("llama3", 2, "window of 4096 tokens in all 32 layers"),
    "qwen2.5-7b": ("llama3", 2, "with bias on q, k and v"),
    "qwen3-8b": ("qwen3", 2, "RMSNorm on each head of q and k before rope"),
    "gemma-2b": ("llama3", 2, "embeddings times 45.2548"),
    "gemma-2-9b": ("llama3", 2, "softcap 50"),
    "gemma-3-1b": ("qwen3", 2, "in layers 0-4, 6-10, 12-16, 18-22, 24-25 (22 of 26)"),
    "phi-3-mini-4k": ("llama3", 2, "window of 2047 tokens"),
    "phi-4": ("llama3", 2, "40 query and 10 KV heads"),
    "stablelm-2-1.6b": ("llama3", 2, "LayerNorm, with a bias"),
    "olmo-1b": ("llama3", 2, "LayerNorm, no weight"),
    "olmo-2-7b": ("qwen3", 2, "before the residual sum"),
    "granite-3.1-8b": ("llama3", 2, "branches times 0.22"),
    "command-r": ("llama3", 4, "neighbours paired"),
    "command-r7b": ("smollm3", 2, "none (NoPE) in layers 3, 7, 11, 15, 19, 23, 27, 31 (8 of 32)"),
    "glm-4-9b": ("llama3", 2, "64 dimensions of a head"),
    "glm-4-9b-0414": ("llama3", 2, "norms before and after attention and MLP"),
    "smollm3-3b": ("smollm3", 2, "none (NoPE) in layers 3, 7, 11, 15, 19, 23, 27, 31, 35 (9 of 36)"),
    "falcon-40b": ("llama3", 8, "attention and MLP in parallel, a norm each"),
    "gpt-neox-20b": ("llama3", 4, "24 dimensions of a head"),
    "gpt2": ("llama3", 2, "learned positions"),
    "starcoder2-3b": ("llama3", 2, "plain, gelu_tanh"),
    "minitron-4b": ("llama3", 2, "times 1 + w"),
}


EXPECTED |= {
    "qwen3-30b-a3b": ("qwen3_moe", 4, "128 experts of 768, 8 per token, in all 48 layers"),
    "qwen2-57b-a14b": ("gpt_oss", None, "shared experts"),
    "mixtral-8x7b": ("qwen3_moe", 8, "softmax over all; renormalised"),
    "gpt-oss-20b": ("gpt_oss", 4, "gate and up clamped at 7.0"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_model_is_planned_whole(tmp_path, name):
    plan = plan_of(tmp_path, name)
    reference, size, text = EXPECTED[name]
    assert plan.reference_model == reference
    assert plan.tp.recommended == size
    assert any(text in section.target for section in plan.sections), [
        section.target for section in plan.sections
    ]
    assert all(section.source for section in plan.sections)


@pytest.mark.parametrize(
    ("name", "rule", "present"),
    [
        ("glm-4-9b-0414", "PIT-BLOCK", False),  # sandwich, with Llama's name for the norm before the MLP
        ("gemma-2-9b", "PIT-BLOCK", True),
        ("olmo-2-7b", "PIT-BLOCK", True),
        ("gpt-neox-20b", "PIT-BLOCK", True),  # it norms the layer's input
        ("phi-3.5-mini", "PIT-WINDOW", False),  # 262144 tokens, with 131072 positions
        ("mistral-7b-v0.1", "PIT-WINDOW", True),
    ],
)
def test_a_pitfall_is_named_where_it_exists(tmp_path, name, rule, present):
    assert (rule in {item.rule for item in plan_of(tmp_path, name).pitfalls}) == present


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("gpt-neox-20b", {"PIT-FUSED": "for one KV head after the other its q, k and v"}),
        ("glm-4-9b", {"PIT-FUSED": "the gate, then up"}),
        ("gpt-oss-20b", {"PIT-FUSED": "gate and up in turn"}),
        ("gpt2", {"PIT-CONV1D": "[in, out]"}),
        ("olmo-2-7b", {"PIT-QK-NORM": "over all heads"}),
        ("command-r7b", {"PIT-NOPE": "8 of 32 layers do not rotate (derived: modeling_cohere2.py rotates"}),
        ("smollm3-3b", {"PIT-NOPE": "9 of 36 layers do not rotate (config.json: no_rope_layers (1: rotates"}),
        ("phi-3.5-mini", {"PIT-LONGROPE": "cos and sin are scaled, too"}),
    ],
)
def test_a_pitfall_says_what_this_model_does(tmp_path, name, texts):
    found = {item.rule: item.text for item in plan_of(tmp_path, name).pitfalls}
    for rule, text in texts.items():
        assert text in found[rule]


@pytest.mark.parametrize(
    ("name", "section", "field", "text"),
    [
        ("llama-3.1-8b", "attention", "source", "head_dim derived: LlamaConfig.__post_init__ (transformers"),
        ("qwen3-8b", "attention", "source", "scale: modeling_qwen3.py:"),
        ("starcoder2-3b", "rope", "target", "theta 999999.442"),
        ("gpt-oss-20b", "rope", "target", "truncate false"),
        ("olmo-2-7b", "attention", "target", "RMSNorm on all heads together of q and k"),
        (
            "qwen2-57b-a14b",
            "moe",
            "target",
            "shared experts of 20480 together, times the sigmoid of a projection",
        ),
        ("phi-3.5-mini", "attention", "target", "never binds: the model has 131072 positions"),
        ("glm-4-9b", "rope", "change", "partial rotation, interleaved pairs"),
        ("glm-4-9b", "rope", "source", "config.json: partial_rotary_factor"),
        ("gpt-neox-20b", "rope", "source", "config.json: rotary_pct"),
        ("smollm3-3b", "rope", "source", "config.json: no_rope_layers"),
        ("qwen2-57b-a14b", "moe", "target", "softmax over all; not renormalised"),
    ],
)
def test_a_section_says_what_is_there_and_from_where(tmp_path, name, section, field, text):
    plan = plan_of(tmp_path, name)
    assert text in getattr(next(item for item in plan.sections if item.name == section), field)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "phi-4", "falcon-40b", "gpt2"])
def test_the_ranks_hold_each_weight_once(tmp_path, name):
    """At TP 1 the plan's bytes are the checkpoint's (a tied head is held twice), however tensors are fused."""
    plan = plan_of(tmp_path, name)
    total = sum(2 * math.prod(shape) for _, shape in keys_of(name).values())
    if plan.architecture.head.tied:
        total += 2 * plan.architecture.vocab_size * plan.architecture.hidden_size
    assert plan.tp.candidates[0].weight_bytes_per_rank == total


@pytest.mark.parametrize("name", ["phi-3.5-mini", "phi-4-mini"])
def test_long_contexts_of_phi_3_are_planned_with_what_decides_their_factors(tmp_path, name):
    plan = plan_of(tmp_path, name)
    (pitfall,) = [item for item in plan.pitfalls if item.rule == "PIT-LONGROPE"]
    assert "max_model_len is up to 4096 takes the short factors" in pitfall.text


def test_float32_is_told_with_its_price(tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "olmo-1b", PUBLISHED["olmo-1b"] | {"torch_dtype": "float32"})
    plan = plan_of(tmp_path, "olmo-1b")
    assert "in float32" in next(item.target for item in plan.sections if item.name == "weights")
    (pitfall,) = [item.text for item in plan.pitfalls if item.rule == "PIT-DTYPE"]
    assert "(config.json: torch_dtype), twice the bytes" in pitfall
    assert "PIT-DTYPE" not in {item.rule for item in plan_of(tmp_path, "olmo-2-7b").pitfalls}


def test_layers_with_experts_are_named(tmp_path, monkeypatch):
    changes = {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    monkeypatch.setitem(PUBLISHED, "qwen3-moe-with-dense", PUBLISHED["qwen3-30b-a3b"] | changes)
    sections = {item.name: item.target for item in plan_of(tmp_path, "qwen3-moe-with-dense").sections}
    assert "in layers 1-2 (2 of 3)" in sections["moe"]
    assert "intermediate 6144" in sections["mlp"]


def test_hundreds_of_billions_of_parameters_in_seconds(tmp_path):
    started = time.process_time()
    keys = keys_of("qwen3-235b-a22b")
    made = time.process_time()
    facts, checkpoint = research(str(write_checkpoint(tmp_path, PUBLISHED["qwen3-235b-a22b"], keys)))
    plan = make_plan("model", facts, checkpoint, Options())
    assert len(checkpoint.tensors) == 36945
    assert time.process_time() - made < 5 + (made - started)
    assert plan.tp.recommended == 32
    (candidate,) = [item for item in plan.tp.candidates if item.tp_size == 16]
    assert [violation.rule for violation in candidate.violations] == ["MEM"]
    assert plan.ep.candidates[0].experts_per_group == 2


def test_a_model_that_fits_no_tp_size_is_planned_over_all_ranks(tmp_path):
    plan = plan_of(tmp_path, "mixtral-8x22b")
    assert plan.tp.recommended is None
    broken = {item.tp_size: {v.rule for v in item.violations} for item in plan.tp.candidates}
    assert broken[8] == {"MEM"}
    assert broken[16] == {"R2"}
    assert plan.reference_model == "gpt_oss"
    assert plan.ep.recommended == 8
    chosen = next(item for item in plan.ep.candidates if item.tp_size == 8)
    assert (chosen.ep_degree, chosen.experts_per_group) == (8, 1)
    assert {v.rule for item in plan.ep.candidates for v in item.violations} >= {"EP1", "R2", "R1"}
    assert "whole world" in plan.ep.note


def test_a_bias_of_the_head_is_as_the_config_says(tmp_path):
    keys = keys_of("phi-3.5-moe")
    assert "lm_head.bias" in keys
    folder = write_checkpoint(tmp_path, PUBLISHED["phi-3.5-moe"], keys)
    facts, checkpoint = research(str(folder))
    plan = make_plan("model", facts, checkpoint, Options())
    assert plan.architecture.head.bias
    assert plan.architecture.hf_name == "PhiMoEForCausalLM"
    assert not facts.unconsumed
    del checkpoint.tensors["lm_head.bias"]
    with pytest.raises(Refusal, match=r"BIAS-CONFLICT: the head has no bias .* lm_head_bias is true"):
        make_plan("model", facts, checkpoint, Options())


def test_experts_whose_share_the_kernel_refuses_are_padded(tmp_path):
    """2880 / 16 = 180 is no multiple of 16."""
    plan = plan_of(tmp_path, "gpt-oss-120b")
    (candidate,) = [item for item in plan.tp.candidates if item.tp_size == 16]
    assert (
        "2880 is filled up with zeros to 3072" in candidate.padded[0].text
    )  # as the plugin's own model does
    assert plan.tp.recommended == 16


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "deepseek-v3.2"])
def test_latent_attention_is_sized_and_refused_with_the_way_forward(tmp_path, name):
    with pytest.raises(Refusal, match="multi-head latent attention") as caught:
        plan_of(tmp_path, name)
    problem, *features = caught.value.problems
    assert "deepseek_v32/" in problem.next_step
    assert any(re.fullmatch(r"modeling_deepseek_v\w+\.py:\d+, \w+Attention", item.where) for item in features)
    estimate = estimate_parallelism(str(tmp_path), 4096, 1)
    assert estimate.experts is not None
    assert all(
        item.kv_bytes_per_rank == estimate.plan.candidates[0].kv_bytes_per_rank
        for item in estimate.plan.candidates
    )


@pytest.mark.parametrize(
    "name", sorted(set(PUBLISHED) - {"gemma-3-4b", "llama-4-scout", "qwen3-vl-8b", "falcon-7b"})
)
def test_the_estimate_from_a_config_is_the_size_of_the_class(tmp_path, name):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    parts = estimate_parallelism(str(folder), 128, 1).plan.parts
    keys = keys_of(name)
    size = 2 * sum(math.prod(shape) for _, shape in keys.values())
    if not any("lm_head" in key or "embed_out" in key for key in keys):
        size += PUBLISHED[name]["vocab_size"] * PUBLISHED[name].get("hidden_size", 768) * 2
    assert sum(part.total for part in parts.values()) == pytest.approx(size, rel=0.01)


def test_the_embedding_factor_of_gemma_is_rounded_as_its_class_does(tmp_path):
    plan = plan_of(tmp_path, "gemma-2-9b")
    assert plan.architecture.embedding.scale_rounded
    assert "times 59.8665 in their dtype" in " ".join(section.target for section in plan.sections)


def test_what_stays_in_float32_counts_four_bytes(tmp_path):
    parts = plan_of(tmp_path, "qwen3-30b-a3b").tp.parts
    assert parts["model.layers.{i}.mlp.router_weight"].copied == 48 * 2048 * 128 * 4
    parts = plan_of(tmp_path, "gemma-2b").tp.parts
    assert parts["model.norm.weight"].copied == 2048 * 4
