"""Config classes followed as text agree with the classes themselves."""

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
from autoport.research.class_runner import Runner
from autoport.research.class_text import ClassText, Instance, Unfollowed
from autoport.research.config_class import class_attributes

LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# Every decoder-only model type whose class computes something, with what makes it compute it.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("apertus", {}),
    ("cohere2", {"sliding_window_pattern": 3, "num_hidden_layers": 7}),
    ("cohere2_moe", {"first_k_dense_replace": 2, "num_hidden_layers": 9}),
    ("dbrx", {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8}, "ffn_config": {"moe_num_experts": 16}}),
    ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40}, "rope_theta": 10000}),
    ("deepseek_v32", {"num_hidden_layers": 5, "first_k_dense_replace": 2}),
    ("ernie4_5_moe", {"num_hidden_layers": 4}),
    ("exaone4", {"num_hidden_layers": 6, "sliding_window_pattern": 3}),
    ("exaone4", {"num_hidden_layers": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("falcon", {"n_embed": 128, "num_attention_heads": 4}),
    ("gemma3_text", {"rope_theta": 5.0, "rope_local_base_freq": 7.0, "rope_scaling": LINEAR}),
    ("glm", {}),
    ("glm", {"partial_rotary_factor": 0.25}),
    ("gpt2", {"hidden_size": 128, "n_head": 4}),
    ("gpt-sw3", {}),
    ("gpt_bigcode", {"multi_query": False, "n_head": 16}),
    ("gpt_neo", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 20000}),
    ("gpt_oss", {"num_hidden_layers": 5}),
    ("granite_swa", {"num_hidden_layers": 5}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama4_text", {"num_hidden_layers": 8, "no_rope_layers": []}),
    ("mimo_v2_flash", {"num_hidden_layers": 7}),
    ("minimax_m2", {"rotary_dim": 64, "head_dim": 128}),
    ("mistral", {"sliding_window": None, "head_dim": None}),
    ("olmo3", {"num_hidden_layers": 6, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2, "num_hidden_layers": 6}),
    ("qwen3", {"sliding_window": 2048, "num_hidden_layers": 6}),
    ("qwen3_moe", {"sliding_window": 2048}),
    ("smollm3", {"num_hidden_layers": 8}),
    ("stablelm", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "config"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_text_gives_what_the_class_gives(model_type, config):
    import copy

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.disable(logging.WARNING)
    reference = CONFIG_MAPPING[model_type](**copy.deepcopy(config))
    logging.disable(logging.NOTSET)
    facts = class_attributes(model_type, config).facts
    assert len(facts) > 10
    for name, fact in facts.items():
        expected = getattr(reference, name)
        if name in ("dtype", "keys_to_ignore_at_inference", "ignore_keys_at_rope_validation"):
            continue
        if hasattr(expected, "to_dict"):
            assert {key: expected.to_dict()[key] for key in config.get(name, {})} == config.get(name, {})
            assert {key: fact.value[key] for key in config.get(name, {})} == config.get(name, {})
        else:
            assert fact.value == (list(expected) if isinstance(expected, (tuple, set)) else expected), name


def test_each_value_says_where_it_comes_from():
    facts = class_attributes("gemma2", {"num_hidden_layers": 2, "head_dim": 64}, "text_config.").facts
    assert facts["head_dim"].source == "config.json: text_config.head_dim"
    assert facts["layer_types"].value == ["sliding_attention", "full_attention"]
    assert facts["layer_types"].source.startswith("derived: Gemma2Config.__post_init__ (transformers ")
    assert "configuration_gemma2.py:" in facts["layer_types"].source
    assert facts["rms_norm_eps"].source.startswith("Gemma2Config default")


def test_a_class_that_transformers_does_not_have_gives_nothing():
    assert class_attributes("no_such_type", {}).facts == {}


@pytest.mark.parametrize("layers", ["many", None, -3, 10**12, [1, 2], 1e300, True])
def test_a_hostile_number_of_layers_is_survived(layers):
    for model_type in ("gemma2", "deepseek_v32", "llama4_text"):
        result = class_attributes(model_type, {"num_hidden_layers": layers})
        assert result.facts or result.unfollowed


@pytest.mark.parametrize(
    "body",
    [
        "open('marker', 'w')",
        "__import__('os').system('touch marker')",
        "self.x = ().__class__.__bases__",
        "self.x = [0] * 10 ** 9",
        "self.x = 10 ** 10 ** 10",
        "self.x = [i for i in range(10 ** 4) for j in range(10 ** 4)]",
        "while True:\n        pass",
        "self.x = 'a%999999999d' % 1",
        "exec('1')",
    ],
)
def test_other_python_is_not_run(tmp_path, monkeypatch, body):
    monkeypatch.chdir(tmp_path)
    function = ast.parse(f"def __post_init__(self, **kwargs):\n    {body}\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    text = ClassText("X", Path("x.py"), (), {"__post_init__": function})
    runner = Runner(lambda *_: None, lambda *_: None, lambda *_: "")
    with pytest.raises(Unfollowed):
        runner.call(Instance([text], {}), "__post_init__", {})
    assert not list(tmp_path.iterdir())
