"""Class defaults read as text must be those that the classes really have."""

import dataclasses

import pytest
from autoport.research.config_defaults import causal_lm_classes, config_defaults, transformers_dir

FIELDS = ("rms_norm_eps", "hidden_act", "max_position_embeddings", "sliding_window", "num_key_value_heads")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma", "granite"])
def test_the_text_agrees_with_the_class(model_type):
    from transformers import CONFIG_MAPPING

    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    declared = {name: fields[name] for name in FIELDS if name in fields}
    assert len(declared) >= 4
    read = config_defaults(model_type)
    assert {name: read[name].value for name in declared} == declared


def test_the_source_line_holds_the_default():
    fact = config_defaults("mistral")["max_position_embeddings"]
    assert fact.value == 4096 * 32
    file, _, line = fact.source.rstrip(")").rpartition(", ")[2].partition(":")
    text = (transformers_dir() / "models" / "mistral" / file).read_text().splitlines()
    assert "max_position_embeddings" in text[int(line) - 1]


def test_unknown_types_have_no_defaults():
    assert config_defaults("no_such_type") == {}
    assert config_defaults("../../../etc/passwd") == {}


def test_classes_by_model_type():
    assert causal_lm_classes()["qwen2"] == "Qwen2ForCausalLM"
    assert causal_lm_classes()["llama"] == "LlamaForCausalLM"
