"""Research and analysis of published models at their real size: keys and shapes of transformers' own class."""

import copy
import logging
import math

import pytest
from autoport.analysis.step import make_plan
from autoport.errors import Refusal
from autoport.port import Options
from autoport.research.step import research
from checkpoints import write_checkpoint
from published import PUBLISHED

# Disk keys differ from the class's for these; without a decoder class of their own they are no ports yet.
OTHER_KEYS = {
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3.2",
    "gemma-3-4b",
    "llama-4-scout",
    "qwen3-vl-8b",
}
EXPERTS = {"qwen3-30b-a3b", "qwen2-57b-a14b", "mixtral-8x7b", "phi-3.5-moe", "gpt-oss-20b"}


def keys_of(name):
    """Keys and shapes of the class on the meta device, as it saves them."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.disable(logging.WARNING)
    config = CONFIG_MAPPING[PUBLISHED[name]["model_type"]].from_dict(copy.deepcopy(PUBLISHED[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    logging.disable(logging.NOTSET)
    tied = set(model._tied_weights_keys or {}) if config.tie_word_embeddings else set()
    return {
        key.replace("lm_head.", "embed_out.") if name == "gpt-neox-20b" else key: ("BF16", tuple(value.shape))
        for key, value in model.state_dict().items()
        if key not in tied
    }


def plan_of(tmp_path, name):
    return make_plan(
        "model", *research(str(write_checkpoint(tmp_path, PUBLISHED[name], keys_of(name)))), Options()
    )


# What an expert would note: reference, recommended TP, and a word of the comparison.
EXPECTED = {
    "llama-3.1-8b": ("llama3", 2, "factor 8"),
    "mistral-7b-v0.1": ("llama3", 2, "window of 4096 tokens in 32 layers"),
    "qwen2.5-7b": ("llama3", 2, "with bias on q, k and v"),
    "qwen3-8b": ("qwen3", 2, "rms norm on q and k before rope"),
    "gemma-2b": ("llama3", 2, "embeddings times 45.2548"),
    "gemma-2-9b": ("llama3", 2, "softcap 50"),
    "gemma-3-1b": ("qwen3", 2, "window of 512 tokens in 22 layers"),
    "phi-3-mini-4k": ("llama3", 2, "window of 2047 tokens"),
    "phi-4": ("llama3", 2, "40 query and 10 KV heads"),
    "stablelm-2-1.6b": ("llama3", 2, "LayerNorm, with a bias"),
    "olmo-1b": ("llama3", 2, "LayerNorm, no weight"),
    "olmo-2-7b": ("qwen3", 2, "before the residual sum"),
    "granite-3.1-8b": ("llama3", 1, "branches times 0.22"),
    "command-r": ("llama3", 4, "neighbours paired"),
    "command-r7b": ("smollm3", 2, "none in 8 of 32 layers (NoPE)"),
    "glm-4-9b": ("llama3", 2, "64 dimensions of a head"),
    "glm-4-9b-0414": ("llama3", 2, "norms before and after attention and MLP"),
    "smollm3-3b": ("smollm3", 2, "none in 9 of 36 layers (NoPE)"),
    "falcon-40b": ("llama3", 8, "attention and MLP in parallel, a norm each"),
    "gpt-neox-20b": ("llama3", 4, "24 dimensions of a head"),
    "gpt2": ("llama3", 1, "learned positions"),
    "starcoder2-3b": ("llama3", 2, "plain, gelu_tanh"),
    "minitron-4b": ("llama3", 2, "times 1 + w"),
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


@pytest.mark.parametrize("name", ["llama-3.1-8b", "phi-4", "falcon-40b", "gpt2"])
def test_the_ranks_hold_each_weight_once(tmp_path, name):
    """At TP 1 the plan's bytes are the checkpoint's (a tied head is held twice), however tensors are fused."""
    plan = plan_of(tmp_path, name)
    total = sum(2 * math.prod(shape) for _, shape in keys_of(name).values())
    if plan.architecture.head.tied:
        total += 2 * plan.architecture.vocab_size * plan.architecture.hidden_size
    assert plan.tp.candidates[0].weight_bytes_per_rank == total


@pytest.mark.parametrize(("name", "rule"), [("phi-3.5-mini", "SCOPE-ROPE"), ("phi-4-mini", "SCOPE-ROPE")])
def test_what_cannot_be_ported_says_why(tmp_path, name, rule):
    with pytest.raises(Refusal, match=rule) as caught:
        plan_of(tmp_path, name)
    assert all(problem.next_step for problem in caught.value.problems)
