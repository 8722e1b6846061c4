"""The account of published models' configs, against the config classes and against what is known of the models."""

import copy
import json
import logging

import pytest
from autoport.research.aliases import ALIASES
from autoport.research.config import read_facts
from autoport.research.source import open_source
from published import PUBLISHED


def facts_of(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return read_facts(open_source(str(tmp_path)))


def values_of(tmp_path, name):
    return {field: fact.value for field, fact in facts_of(tmp_path, name).fields.items()}


SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "layer_types": "layer_types",
    "max_position_embeddings": "max_position_embeddings",
    "num_experts_per_tok": "num_experts_per_tok",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_facts_agree_with_the_config_class(tmp_path, name):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.disable(logging.WARNING)
    config = CONFIG_MAPPING[PUBLISHED[name]["model_type"]].from_dict(copy.deepcopy(PUBLISHED[name]))
    text = config.get_text_config()
    logging.disable(logging.NOTSET)
    facts = facts_of(tmp_path, name).fields
    for field, attribute in SAME.items():
        if field in facts and hasattr(text, attribute) and PUBLISHED[name]["model_type"] != "falcon":
            assert facts[field].value == getattr(text, attribute), field
    for fact in facts.values():
        assert fact.source.startswith(("config.json: ", "derived: ")) or " default " in fact.source, fact
    given = PUBLISHED[name].get("text_config", PUBLISHED[name])
    for field, fact in facts.items():
        spelled = [key for key in ALIASES.get(field, ()) if given.get(key) is not None]
        assert " default " not in fact.source or not spelled, (field, fact)
    expected = getattr(text, "rope_parameters", None)
    if expected is None:
        assert facts["rope_type"].value == "none"
        return
    found = facts["rope_parameters"].value
    if facts["rope_type"].value == "per_layer_type":
        assert found == expected
        return
    if "mrope_section" in expected:
        assert facts["rope_type"].value == "mrope"
        expected = expected | {"rope_type": "mrope"}
    expected = {key: value for key, value in expected.items() if key != "type"}
    assert (
        found | {"rope_theta": facts["rope_theta"].value, "rope_type": facts["rope_type"].value} == expected
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mistral-7b-v0.1", {"layer_windows": [4096] * 32}),
        ("qwen2.5-7b", {"layer_windows": [None] * 28, "sliding_window": None, "num_kv_heads": 4}),
        ("qwen3-8b", {"head_dim": 128, "layer_windows": [None] * 36}),
        (
            "qwen3-30b-a3b",
            {"num_experts": 128, "moe_intermediate_size": 768, "layer_moe": [True] * 48, "norm_topk_prob": True},
        ),
        ("qwen2-57b-a14b", {"shared_intermediate_size": 20480, "norm_topk_prob": False, "num_experts": 64}),
        ("mixtral-8x7b", {"num_experts": 8, "moe_intermediate_size": 14336, "layer_windows": [None] * 32}),
        ("gemma-2b", {"num_kv_heads": 1, "head_dim": 256, "activation": "gelu_pytorch_tanh"}),
        ("gemma-2-9b", {"layer_windows": [4096, None] * 21, "tie_word_embeddings": True}),
        ("gemma-3-1b", {"layer_windows": ([512] * 5 + [None]) * 4 + [512] * 2, "rope_type": "per_layer_type"}),
        ("gemma-3-4b", {"num_heads": 8, "vision_num_heads": 16, "vocab_size": 262208, "tie_word_embeddings": True}),
        ("phi-3-mini-4k", {"layer_windows": [2047] * 32, "head_dim": 96}),
        ("phi-3.5-mini", {"rope_type": "longrope"}),
        ("phi-4", {"num_kv_heads": 10, "layer_windows": [None] * 40}),
        ("phi-3.5-moe", {"num_experts": 16, "moe_intermediate_size": 6400, "rope_type": "longrope"}),
        ("stablelm-2-1.6b", {"norm_eps": 1e-5, "head_dim": 64}),
        ("olmo-1b", {"norm_eps": 1e-5, "tie_word_embeddings": True}),
        ("command-r", {"max_position_embeddings": 8192, "rope_theta": 8000000.0}),
        (
            "command-r7b",
            {"layer_windows": [4096, 4096, 4096, None] * 8, "layer_rope": [True, True, True, False] * 8},
        ),
        ("smollm3-3b", {"layer_rope": [True, True, True, False] * 9, "layer_windows": [None] * 36}),
        ("gpt-oss-20b", {"layer_windows": [128, None] * 12, "num_experts": 32, "rope_theta": 150000.0}),
        (
            "deepseek-v2-lite",
            {"layer_moe": [False] + [True] * 26, "num_shared_experts": 2, "router_method": "greedy"},
        ),
        (
            "deepseek-v3",
            {"layer_moe": [False] * 3 + [True] * 58, "q_lora_rank": 1536, "n_group": 8, "router_score": "sigmoid"},
        ),
        ("deepseek-v3.2", {"index_topk": 2048, "index_n_heads": 64}),
        ("falcon-7b", {"num_kv_heads": 1, "num_heads": 71, "intermediate_size": 18176}),
        ("falcon-40b", {"num_kv_heads": 8, "intermediate_size": 32768}),
        ("gpt2", {"intermediate_size": 3072, "hidden_size": 768, "rope_type": "none", "tie_word_embeddings": True}),
        ("starcoder2-3b", {"layer_windows": [4096] * 30, "norm_eps": 1e-5}),
        ("minitron-4b", {"activation": "relu2", "head_dim": 128}),
        (
            "llama-4-scout",
            {
                "intermediate_size": 16384,
                "moe_intermediate_size": 8192,
                "layer_rope": [True, True, True, False] * 12,
                "attention_chunk_size": 8192,
                "num_shared_experts": 1,
                "vision_num_heads": 16,
            },
        ),
        ("qwen3-vl-8b", {"rope_type": "mrope", "vision_num_heads": 16, "tie_word_embeddings": False}),
    ],
)  # fmt: skip
def test_what_is_known_of_the_model(tmp_path, name, expected):
    values = values_of(tmp_path, name)
    assert {field: values.get(field) for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("glm-4-9b", 0.5),
        ("gpt-neox-20b", 0.25),
        ("minitron-4b", 0.5),
        ("phi-4-mini", 0.75),
        ("stablelm-2-1.6b", 0.25),
    ],
)
def test_part_of_a_head_rotates(tmp_path, name, factor):
    assert values_of(tmp_path, name)["rope_parameters"]["partial_rotary_factor"] == factor


def test_a_nested_config_names_the_whole_path_and_never_the_vision_tower(tmp_path):
    facts = facts_of(tmp_path, "gemma-3-4b")
    assert facts.text_path == "text_config."
    assert facts.fields["hidden_size"].source == "config.json: text_config.hidden_size"
    assert facts.fields["num_heads"].value == 8
    assert facts.fields["num_heads"].source.startswith("Gemma3TextConfig default")
    assert facts.fields["vision_num_heads"].source == "config.json: vision_config.num_attention_heads"


@pytest.mark.parametrize(
    "path", ["text_config", "llm_config", "language_config", "thinker_config.text_config"]
)
def test_every_name_of_a_nested_config(tmp_path, path):
    text = {
        key: value
        for key, value in PUBLISHED["qwen2.5-7b"].items()
        if key not in ("architectures", "torch_dtype")
    }
    nested = {"architectures": ["XForConditionalGeneration"], "model_type": "x", "torch_dtype": "bfloat16"}
    nested["tie_word_embeddings"] = True
    del text["tie_word_embeddings"]
    part = nested
    *outer, last = path.split(".")
    for key in outer:
        part = part.setdefault(key, {})
    part[last] = text
    (tmp_path / "config.json").write_text(json.dumps(nested | {"vision_config": {"num_attention_heads": 16}}))
    fields = read_facts(open_source(str(tmp_path))).fields
    assert fields["num_heads"].value == 28
    assert fields["num_heads"].source == f"config.json: {path}.num_attention_heads"
    assert fields["tie_word_embeddings"].source == "config.json: tie_word_embeddings"
    assert fields["dtype"].source == "config.json: torch_dtype"
