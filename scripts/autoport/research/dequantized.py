"""What a quantised checkpoint is without its quantisation: the tensors that the loader of a variant makes of it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autoport.errors import Problem, Refusal, refuse
from autoport.schema.facts import Checkpoint, TensorHeader

DTYPE = "BF16"  # of the weights once they are dequantised
DTYPE_BYTES = 2
BYTES_OF = {"fp8": "F8_E4M3", "fp8_block": "F8_E4M3", "int8": "I8"}
UNUSED = (".input_scale", ".k_scale", ".v_scale")  # of activations and the KV cache, which stay as they are
GROUP = 32  # values that share a scale in MXFP4 (OCP Microscaling Formats v1.0, 5.1)
PACKED = 2  # of them in a byte


def dequantized(checkpoint: Checkpoint, variant: str, declared: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint's headers as they would be if nothing were quantised.

    Args:
        variant: Format of the checkpoint, a key of `autoport.variants.FORMATS`.
        declared: The config's ``quantization_config``.

    Raises:
        Refusal: QUANT for every stored tensor that the variant's loader does not read.
    """
    tensors: dict[str, TensorHeader] = {}
    problems = _zero_points(checkpoint)
    block = declared.get("weight_block_size") or ()
    unused = [key for key in checkpoint.tensors if key.endswith(UNUSED)]
    taken = set(unused)
    for key, tensor in checkpoint.tensors.items():
        parts = _stored(key, tensor, variant, block)
        if parts is None:
            continue
        name, shape, scale, shapes = parts
        found = checkpoint.tensors.get(scale)
        taken |= {key, scale}
        if found is None or found.shape not in shapes:
            has = "nothing" if found is None else str(list(found.shape))
            possible = " or ".join(str(list(item)) for item in shapes)
            problems.append(
                Problem(
                    "QUANT",
                    f"{key} {list(tensor.shape)} as {variant}: {scale} is {has}, not {possible}",
                    tensor.file,
                    "dequantise this checkpoint first, or pass one with scales that are read",
                )
            )
            continue
        tensors[name] = TensorHeader(DTYPE, shape, tensor.file, math.prod(shape) * DTYPE_BYTES)
    if problems:
        raise Refusal(*problems)
    count = len(tensors)
    if not count:
        raise refuse(
            "QUANT",
            f"quantization_config says {variant}, and no tensor of the checkpoint is stored so",
            checkpoint.source,
            "remove quantization_config from config.json if nothing is quantised, or pass the checkpoint that "
            "belongs to it",
        )
    tensors = {key: item for key, item in checkpoint.tensors.items() if key not in taken} | tensors
    notes = [f"{count} tensors are stored as {variant}; the plan counts them dequantised to bfloat16"]
    if unused:
        notes.append(
            f"{len(unused)} scales of activations or of the KV cache are not used, e.g. {unused[0]}: these stay "
            "in the model's dtype"
        )
    return msgspec.structs.replace(
        checkpoint,
        tensors=tensors,
        total_bytes=sum(item.num_bytes for item in tensors.values()),
        notes=[*checkpoint.notes, *notes],
    )


def _zero_points(checkpoint: Checkpoint) -> list[Problem]:
    keys = [key for key in checkpoint.tensors if key.endswith("_zero_point")]
    if not keys:
        return []
    return [
        Problem(
            "QUANT",
            f"{len(keys)} zero points such as {keys[0]}: the weights are quantised asymmetrically",
            checkpoint.tensors[keys[0]].file,
            "pass the original bfloat16 checkpoint or one that is quantised symmetrically, or dequantise this one "
            "first: (weight - zero_point) * scale",
        )
    ]


def _stored(
    key: str, tensor: TensorHeader, variant: str, block: Sequence[int]
) -> tuple[str, tuple[int, ...], str, tuple[tuple[int, ...], ...]] | None:
    """Of a quantised tensor: name and shape without quantisation, key of its scales, and shapes they may have."""
    shape = tensor.shape
    if variant == "mxfp4":
        if not key.endswith("_blocks") or tensor.dtype != "U8":
            return None
        name = key.removesuffix("_blocks")
        if len(shape) != 4 or shape[3] * PACKED != GROUP:
            return name, shape, f"{name}_scales", ()
        experts, columns, groups, _ = shape
        return name, (experts, groups * GROUP, columns), f"{name}_scales", ((experts, columns, groups),)
    if tensor.dtype != BYTES_OF[variant] or not shape:
        return None
    if variant == "fp8_block":
        sides = zip(shape, block, strict=False)
        counts = tuple(-(-size // side) for size, side in sides) if len(shape) == len(block) else None
        return key, shape, f"{key}_scale_inv", (counts,) if counts else ()
    return key, shape, f"{key}_scale", ((), (1,), (1, 1), shape[:1], (*shape[:1], 1))


def without_declaration(config: Mapping[str, object]) -> dict[str, object]:
    """The config of the dequantised model."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
