"""Quantised twins: a twin's checkpoint stored in a weight format, and the same values as plain weights."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autoport.files import write_atomic
from autoport.variants import FORMATS

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0  # float8_e4m3fn
INT8_MAX = 127.0
BLOCK = 16  # side of the blocks of a twin, whose tensors are small; 128 in published checkpoints
GROUP = 32  # values that share a scale in MXFP4 (OCP Microscaling Formats v1.0, 5.1)
FP4_EXPONENT_MAX = 2  # of E2M1, whose largest value is 1.5 * 2**2
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

LINEAR = re.compile(r"layers?\.\d+\..*\.weight$|\.h\.\d+\..*\.weight$")
KEPT = re.compile(r"(router|gate|norm\w*|embed\w*|lm_head)\.weight$")


def quantize(twin: Path, name: str, quantized: Path, plain: Path) -> int:
    """Write the twin's checkpoint twice: in format `name`, and in float32 with the values that this leaves.

    Returns:
        Number of tensors that were quantised.
    """
    import torch
    from safetensors.torch import load_file, save_file

    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    count = 0
    for file in sorted(twin.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            parts = store(name, key, tensor.float())
            stored |= parts or {key: tensor}
            values[key] = restore(name, key, parts) if parts else tensor.float()
            count += bool(parts)
    config = msgspec.json.decode((twin / "config.json").read_bytes())
    declared = next(iter(FORMATS[name].values()))
    if "weight_block_size" in declared:
        declared = declared | {"weight_block_size": [BLOCK, BLOCK]}
    for folder, tensors, extra in (
        (quantized, stored, {"quantization_config": declared}),
        (plain, values, {}),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
        text = msgspec.json.format(msgspec.json.encode({**config, **extra}), indent=2)
        write_atomic(folder / "config.json", text + b"\n")
    return count


def store(name: str, key: str, weight: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """The tensors that a checkpoint of format `name` has for `weight`; empty when it stays as it is."""
    import torch

    if name == "mxfp4":
        return _store_mxfp4(key, weight) if weight.ndim == 3 and weight.shape[1] % GROUP == 0 else {}
    if weight.ndim != 2 or not LINEAR.search(key) or KEPT.search(key):
        return {}
    if name == "fp8_block":
        return _store_blocks(key, weight)
    if name == "fp8":
        scale = weight.abs().amax() / FP8_MAX
        return {key: (weight / scale).to(torch.float8_e4m3fn), f"{key}_scale": scale}
    scale = weight.abs().amax(dim=1, keepdim=True) / INT8_MAX
    return {key: (weight / scale).round().to(torch.int8), f"{key}_scale": scale}


def _store_blocks(key: str, weight: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """[out, in] in float8, and a scale for each block [ceil(out / BLOCK), ceil(in / BLOCK)]."""
    import torch

    padded = _padded(weight.abs(), BLOCK).unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = padded.amax(dim=(1, 3)).clamp(min=2.0**-100) / FP8_MAX
    return {
        key: (weight / _spread(scales, weight)).to(torch.float8_e4m3fn),
        f"{key}_scale_inv": scales,
    }


def _padded(weight: "torch.Tensor", side: int) -> "torch.Tensor":
    import torch

    rows, columns = weight.shape
    return torch.nn.functional.pad(weight, (0, -columns % side, 0, -rows % side))


def _spread(scales: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
    """The scale of every value, [out, in]."""
    rows, columns = weight.shape
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]


def _store_mxfp4(key: str, weight: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """[E, in, out] as blocks [E, out, in / 32, 16] and scales [E, out, in / 32]."""
    import torch

    groups = weight.transpose(1, 2).unflatten(-1, (-1, GROUP))  # [E, out, G, 32]
    largest = groups.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100)
    exponent = torch.floor(torch.log2(largest)) - FP4_EXPONENT_MAX
    scaled = groups / torch.exp2(exponent)
    nearest = (scaled.abs().unsqueeze(-1) - torch.tensor(FP4)).abs().argmin(-1)  # [E, out, G, 32]
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return {f"{key}_blocks": blocks, f"{key}_scales": (exponent.squeeze(-1) + 127).to(torch.uint8)}


def restore(name: str, key: str, parts: "dict[str, torch.Tensor]") -> "torch.Tensor":
    """The values that the stored tensors stand for, float32; of MXFP4 by transformers' own function."""
    import torch

    if name == "mxfp4":
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = parts[f"{key}_blocks"], parts[f"{key}_scales"]
        restored: Any = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        return restored  # [E, in, out]
    if name == "fp8_block":
        return parts[key].float() * _spread(parts[f"{key}_scale_inv"], parts[key])
    return parts[key].float() * parts[f"{key}_scale"]
