"""MPT: what MptForCausalLM reads of attn_config, and the width of its MLP."""

import pytest
from autoport.analysis.step import make_plan
from autoport.errors import Refusal
from autoport.research.step import research
from autoport.step import Options
from checkpoints import write_checkpoint

CONFIG = {
    "architectures": ["MptForCausalLM"],
    "model_type": "mpt",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 128,
    "vocab_size": 256,
    "dtype": "bfloat16",
}


def plan_of(tmp_path, ratio=4, **changes):
    layer = {"norm_1": (64,), "norm_2": (64,), "attn.Wqkv": (192, 64), "attn.out_proj": (64, 64)}
    layer |= {"ffn.up_proj": (ratio * 64, 64), "ffn.down_proj": (64, ratio * 64)}
    shapes = {"wte": (256, 64), "norm_f": (64,)}
    shapes |= {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    keys = {f"transformer.{name}.weight": ("BF16", shape) for name, shape in shapes.items()}
    facts, checkpoint = research(str(write_checkpoint(tmp_path, CONFIG | changes, keys)))
    return make_plan("mpt", facts, checkpoint, Options())


@pytest.mark.parametrize("given", [{}, {"attn_config": None}, {"attn_config": {"clip_qkv": 0}}])
def test_by_default_nothing_is_clipped_and_the_scale_is_the_usual_one(tmp_path, given):
    attention = plan_of(tmp_path, **given).architecture.attention
    assert (attention.alibi, attention.qkv_clip, attention.scale) == (True, None, None)


def test_the_clip_and_the_scale_of_attn_config_are_read(tmp_path):
    architecture = plan_of(tmp_path, attn_config={"clip_qkv": 6, "softmax_scale": 0.2}).architecture
    assert (architecture.attention.qkv_clip, architecture.attention.scale) == (6.0, 0.2)
    assert architecture.readings["qkv_clip"] == "attn_config.clip_qkv or None"
    assert architecture.readings["attention_scale"] == "attn_config.softmax_scale"


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("attn_type", "multiquery_attention", "SCOPE-HEADS"),
        ("prefix_lm", True, "SCOPE-MASK"),
        ("qk_ln", True, "SCOPE-QK-NORM"),
        ("alibi", False, "SCOPE-ALIBI"),
        ("alibi_bias_max", 16, "SCOPE-ALIBI"),
    ],
)
def test_what_the_class_ignores_is_refused_with_key_and_value(tmp_path, key, value, rule):
    with pytest.raises(Refusal) as caught:
        plan_of(tmp_path, attn_config={key: value})
    (problem,) = caught.value.problems
    assert problem.rule == rule
    assert f"attn_config.{key} is {value!r}, which MptForCausalLM ignores" in problem.found


def test_the_mlp_is_four_times_as_wide_whatever_expansion_ratio_says(tmp_path):
    assert plan_of(tmp_path, expansion_ratio=3).architecture.mlp.intermediate_size == 256
    with pytest.raises(Refusal) as caught:
        plan_of(tmp_path / "narrow", ratio=3, expansion_ratio=3)
    found = "\n".join(problem.found for problem in caught.value.problems)
    assert {problem.rule for problem in caught.value.problems} == {"MAP-SHAPE"}
    assert "is [192, 64], the config gives [256, 64] (intermediate_size 256: derived: 4 * d_model" in found
    assert "MptForCausalLM does not read expansion_ratio 3" in found
