"""Quantised checkpoints in a format that a variant loads are read as the plain ones that they stand for."""

from typing import Any

import pytest
from autoport.errors import Refusal
from autoport.research.checkpoint import read_checkpoint
from autoport.research.dequantized import dequantized
from autoport.research.source import open_source
from autoport.variants import FORMATS, checkpoint_format, loaded_by
from checkpoints import write_safetensors

EXPERTS = "model.layers.0.mlp.experts.down_proj"
LINEAR = "model.layers.0.mlp.up_proj.weight"
PLAIN = {"model.norm.weight": ("BF16", (64,))}
MXFP4 = {f"{EXPERTS}_blocks": ("U8", (2, 48, 3, 16)), f"{EXPERTS}_scales": ("U8", (2, 48, 3))}


def logical(tmp_path, keys: dict[str, Any], variant: str) -> Any:
    write_safetensors(tmp_path / "model.safetensors", PLAIN | keys)
    declared = next(iter(FORMATS[variant].values()))
    return dequantized(read_checkpoint(open_source(str(tmp_path))), variant, declared)


@pytest.mark.parametrize(
    ("variant", "keys", "name", "shape"),
    [
        ("mxfp4", MXFP4, EXPERTS, (2, 96, 48)),
        ("fp8", {LINEAR: ("F8_E4M3", (96, 64)), f"{LINEAR}_scale": ("F32", ())}, LINEAR, (96, 64)),
        ("fp8", {LINEAR: ("F8_E4M3", (96, 64)), f"{LINEAR}_scale": ("BF16", (96, 1))}, LINEAR, (96, 64)),
        ("int8", {LINEAR: ("I8", (96, 64)), f"{LINEAR}_scale": ("F32", (96, 1))}, LINEAR, (96, 64)),
        (
            "fp8_block",
            {LINEAR: ("F8_E4M3", (320, 256)), f"{LINEAR}_scale_inv": ("F32", (3, 2))},
            LINEAR,
            (320, 256),
        ),
    ],
)
def test_tensors_are_those_of_the_plain_checkpoint(tmp_path, variant, keys, name, shape) -> None:
    checkpoint = logical(tmp_path, keys, variant)
    assert {key: (item.dtype, item.shape) for key, item in checkpoint.tensors.items()} == PLAIN | {
        name: ("BF16", shape)
    }
    size = 2
    for length in shape:
        size *= length
    assert checkpoint.tensors[name].num_bytes == size
    assert checkpoint.total_bytes == size + 128
    assert f"1 tensors are stored as {variant}" in checkpoint.notes[-1]


@pytest.mark.parametrize("variant", ["mxfp4", "fp8", "fp8_block", "int8"])
def test_a_declared_format_that_no_tensor_has_is_refused(tmp_path, variant) -> None:
    with pytest.raises(Refusal, match=f"QUANT: quantization_config says {variant}, and no tensor"):
        logical(tmp_path, {LINEAR: ("BF16", (96, 64))}, variant)


def test_scales_of_activations_are_left_out_and_named(tmp_path) -> None:
    scale = LINEAR.replace("weight", "input_scale")
    keys = {LINEAR: ("F8_E4M3", (96, 64)), f"{LINEAR}_scale": ("F32", (1,)), scale: ("F32", (1,))}
    checkpoint = logical(tmp_path, keys, "fp8")
    assert set(checkpoint.tensors) == {LINEAR, *PLAIN}
    assert scale in checkpoint.notes[-1]


@pytest.mark.parametrize(
    ("variant", "keys", "found"),
    [
        ("fp8", {LINEAR: ("F8_E4M3", (96, 64))}, "_scale is nothing, not"),
        ("fp8", {LINEAR: ("F8_E4M3", (96, 64)), f"{LINEAR}_scale": ("F32", (3, 2))}, "_scale is [3, 2], not"),
        (
            "fp8_block",
            {LINEAR: ("F8_E4M3", (320, 256)), f"{LINEAR}_scale_inv": ("F32", (2, 2))},
            "_scale_inv is [2, 2], not [3, 2]",
        ),
        ("fp8_block", {LINEAR: ("F8_E4M3", (96, 64))}, "_scale_inv is nothing, not [1, 1]"),
        (
            "int8",
            {
                LINEAR: ("I8", (96, 64)),
                f"{LINEAR}_scale": ("F32", (96, 1)),
                f"{LINEAR}_zero_point": ("I8", (96, 1)),
            },
            "1 zero points such as",
        ),
        ("mxfp4", {f"{EXPERTS}_blocks": ("U8", (2, 48, 3, 16))}, "_scales is nothing"),
        ("mxfp4", MXFP4 | {f"{EXPERTS}_scales": ("U8", (2, 48, 4))}, "is [2, 48, 4], not [2, 48, 3]"),
    ],
)
def test_scales_that_the_loader_does_not_read(tmp_path, variant, keys, found) -> None:
    with pytest.raises(Refusal, match="QUANT") as caught:
        logical(tmp_path, keys, variant)
    assert found in caught.value.problems[0].found


@pytest.mark.parametrize("variant", FORMATS)
def test_a_config_is_read_by_its_variant(variant: str) -> None:
    for name, declared in FORMATS[variant].items():
        assert checkpoint_format(declared) == name
        assert loaded_by(declared) == variant


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "fp8", "weight_block_size": [96, 128]},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "weight_block_size": ["128", 128]},
        {"quant_method": "gptq"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
        },
        {"config_groups": 3},
        None,
    ],
)
def test_other_formats_have_no_variant(declared: Any) -> None:
    assert loaded_by(declared) is None
