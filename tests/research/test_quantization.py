"""Quantised checkpoints are recognised by either of two signs."""

import pytest
from autoport.research.checkpoint import read_checkpoint
from autoport.research.quantization import quantization_problems
from autoport.research.source import open_source
from checkpoints import write_safetensors

PLAIN = {"model.layers.0.self_attn.q_proj.weight": ("BF16", (4, 4))}
FP8 = {
    "model.layers.0.self_attn.q_proj.weight": ("F8_E4M3", (256, 256)),
    "model.layers.0.self_attn.q_proj.weight_scale_inv": ("F32", (2, 2)),
}
FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
Q = "model.layers.0.self_attn.q_proj."
PACKED = {f"{Q}qweight": ("I32", (4, 4)), f"{Q}qzeros": ("I32", (1, 4)), f"{Q}scales": ("F16", (1, 4))}
GPTQ = PACKED | {f"{Q}g_idx": ("I32", (4,))}
BITSANDBYTES = {f"{Q}weight": ("U8", (8, 1)), f"{Q}weight.absmax": ("F32", (1,))}
MXFP4 = {
    "model.layers.0.mlp.experts.gate_up_proj_blocks": ("U8", (2, 8, 1, 16)),
    "model.layers.0.mlp.experts.gate_up_proj_scales": ("U8", (2, 8, 1)),
}
COMPRESSED = {f"{Q}weight": ("F8_E4M3", (4, 4)), f"{Q}weight_scale": ("BF16", (4, 1))}


def problems_of(tmp_path, config, keys):
    write_safetensors(tmp_path / "model.safetensors", keys)
    return quantization_problems(config, "config.json", read_checkpoint(open_source(str(tmp_path))))


@pytest.mark.parametrize(
    ("config", "keys", "names"),
    [
        ({}, PLAIN, []),
        ({"quantization_config": None}, PLAIN, []),
        (FP8_CONFIG, PLAIN, ["quantization_config is"]),
        ({}, FP8, ["FP8 with block scales: 2 keys"]),
        (FP8_CONFIG, FP8, ["quantization_config is", "FP8 with block scales"]),
        ({}, GPTQ, ["GPTQ: 4 keys"]),
        ({}, PACKED, ["AWQ: 3 keys"]),
        ({}, BITSANDBYTES, ["bitsandbytes: 2 keys"]),
        ({}, MXFP4, ["MXFP4: 2 keys"]),
        ({}, COMPRESSED, ["FP8 with block scales: 1 keys", "compressed-tensors: 1 keys"]),
        ({}, {f"{Q}weight": ("I32", (4, 4))}, ["HQQ, AQLM, torchao"]),
    ],
)
def test_config_and_headers_each_give_it_away(tmp_path, config, keys, names):
    problems = problems_of(tmp_path, config, keys)
    assert [problem.rule for problem in problems] == ["QUANT"] * len(names)
    for problem, name in zip(problems, names, strict=True):
        assert name in problem.found
        assert "bfloat16" in problem.next_step


@pytest.mark.parametrize(
    ("method", "name", "next_step"),
    [
        ("fp8", "FP8", "each scale repeated over its block"),
        ("mxfp4", "MXFP4", "Mxfp4Config(dequantize=True)"),
        ("bitsandbytes", "bitsandbytes", "model.dequantize()"),
        ("gptq", "GPTQ", "original bfloat16 checkpoint"),
        ("awq", "AWQ", "one quantised to fp8 or int8 (compressed-tensors"),
        ("compressed-tensors", "compressed-tensors", "run_compressed=False"),
        ("new_method", "new_method", "original bfloat16 checkpoint"),
    ],
)
def test_each_format_has_its_way_forward(tmp_path, method, name, next_step):
    (problem,) = problems_of(tmp_path, {"quantization_config": {"quant_method": method}}, PLAIN)
    assert name in problem.found
    assert next_step in problem.next_step


def test_what_is_left_in_plain_is_said_and_missing_scales_are_counted(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}}
    keys = FP8 | {"model.layers.1.self_attn.q_proj.weight": ("F8_E4M3", (256, 256))}
    declared, shown = problems_of(tmp_path, config, keys)
    assert "not quantised: ['lm_head']" in declared.found
    assert "2 quantised weights but 1 scales" in shown.found
