"""Quantised twins: a twin's checkpoint stored as fp8, int8 or mxfp4, and the same values as plain weights."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autoport.variants import FORMATS
from autoport.workspace import write_atomic

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0  # float8_e4m3fn
INT8_MAX = 127.0
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
    if name == "fp8":
        scale = weight.abs().amax() / FP8_MAX
        return {key: (weight / scale).to(torch.float8_e4m3fn), f"{key}_scale": scale}
    scale = weight.abs().amax(dim=1, keepdim=True) / INT8_MAX
    return {key: (weight / scale).round().to(torch.int8), f"{key}_scale": scale}


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
    return parts[key].float() * parts[f"{key}_scale"]
