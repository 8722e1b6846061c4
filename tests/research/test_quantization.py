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
GPTQ = {"model.layers.0.self_attn.q_proj.qweight": ("I32", (4, 4))}
BITSANDBYTES = {"model.layers.0.self_attn.q_proj.weight": ("U8", (8, 1))}


@pytest.mark.parametrize(
    ("config", "keys", "count"),
    [
        ({}, PLAIN, 0),
        ({"quantization_config": None}, PLAIN, 0),
        (FP8_CONFIG, PLAIN, 1),
        ({}, FP8, 1),
        (FP8_CONFIG, FP8, 2),
        ({}, GPTQ, 1),
        ({}, BITSANDBYTES, 1),
    ],
)
def test_config_and_headers_each_give_it_away(tmp_path, config, keys, count):
    write_safetensors(tmp_path / "model.safetensors", keys)
    checkpoint = read_checkpoint(open_source(str(tmp_path)))
    problems = quantization_problems(config, "config.json", checkpoint)
    assert [problem.rule for problem in problems] == ["QUANT"] * count
    assert all("dequantise" in problem.next_step for problem in problems)
