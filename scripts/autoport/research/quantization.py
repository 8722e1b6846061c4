"""Recognising quantised checkpoints, by config and by header, and saying how to get a plain one."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from autoport.errors import Problem
from autoport.research.fields import describe
from autoport.schema.facts import Checkpoint, TensorHeader

CONFIG_KEYS = ("quantization_config", "compression_config")
FLOAT_DTYPES = {"BF16", "F16", "F32", "F64"}
FP8_DTYPES = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
ORIGINAL = "pass the original bfloat16 checkpoint, or dequantise this one first"

PACKED = (
    "pass the original bfloat16 checkpoint: weights packed into integers, with zero points, are not dequantised; one "
    "quantised to fp8 or int8 (compressed-tensors, symmetric, one scale for a tensor or row) is ported as it is"
)


class Format(msgspec.Struct, frozen=True):
    """A quantised format.

    Attributes:
        methods: Values of `quant_method` in the config.
        suffixes: Key endings that only this format has.
        next_step: How to get a plain checkpoint.
    """

    name: str
    methods: tuple[str, ...]
    suffixes: tuple[str, ...]
    next_step: str


FORMATS = (
    Format(
        "FP8 with block scales",
        ("fp8", "fbgemm_fp8"),
        ("weight_scale_inv",),
        "dequantise to bfloat16 first: weight times weight_scale_inv, each scale repeated over its block",
    ),
    Format(
        "MXFP4",
        ("mxfp4",),
        ("_blocks", "_scales"),
        f"{ORIGINAL}: transformers does it (Mxfp4Config(dequantize=True), then save_pretrained)",
    ),
    Format("GPTQ", ("gptq", "gptqmodel"), ("g_idx",), PACKED),
    Format("AWQ", ("awq",), (), PACKED),
    Format(
        "bitsandbytes",
        ("bitsandbytes",),
        ("absmax", "quant_map", "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4", "SCB"),
        f"{ORIGINAL}: transformers does it (model.dequantize(), then save_pretrained)",
    ),
    Format(
        "compressed-tensors",
        ("compressed-tensors", "modelopt"),
        ("weight_packed", "weight_scale", "input_scale", "weight_scale_2", "weight_shape"),
        f"{ORIGINAL}: transformers does it (CompressedTensorsConfig(run_compressed=False), then save_pretrained)",
    ),
    Format("HQQ, AQLM, torchao or another format", (), ("qweight", "qzeros", "scales"), ORIGINAL),
)
WEIGHT = re.compile(r"(weight|_proj|_proj_blocks)$")


def quantization_problems(
    config: Mapping[str, Any], config_file: str, checkpoint: Checkpoint
) -> list[Problem]:
    """One problem (QUANT) for the config's declaration and one for each format that the headers show."""
    problems = [
        _declared(key, config[key], config_file) for key in CONFIG_KEYS if config.get(key) is not None
    ]
    for form, keys in sorted(evidence(checkpoint).items(), key=lambda item: item[0].name):
        key = keys[0]
        tensor = checkpoint.tensors[key]
        found = f"{form.name}: {len(keys)} keys such as {key} ({tensor.dtype} {list(tensor.shape)})"
        problems.append(Problem("QUANT", found + _scales(form, checkpoint), tensor.file, form.next_step))
    return problems


def _declared(key: str, value: Any, config_file: str) -> Problem:
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    form = next((form for form in FORMATS if method in form.methods), None)
    plain = value.get("modules_to_not_convert") if isinstance(value, Mapping) else None
    kept = f"; not quantised: {describe(plain)}" if plain else ""
    name = f" ({form.name})" if form else ""
    found = f"{key} is {describe(value)}{name}{kept}"
    return Problem("QUANT", found, config_file, form.next_step if form else ORIGINAL)


def evidence(checkpoint: Checkpoint) -> dict[Format, list[str]]:
    """The keys that give each format away."""
    keys = checkpoint.tensors
    found: dict[Format, list[str]] = {}
    for key, tensor in keys.items():
        form = _format_of(key, tensor, keys)
        if form is not None:
            found.setdefault(form, []).append(key)
    return found


def _format_of(key: str, tensor: TensorHeader, keys: Mapping[str, TensorHeader]) -> Format | None:
    fp8, mxfp4, gptq, awq, bitsandbytes, compressed, other = FORMATS
    if key.endswith(("_blocks", "_scales")):
        return mxfp4 if tensor.dtype == "U8" else None
    for form in (fp8, gptq, bitsandbytes, compressed):
        if key.endswith(tuple(f".{suffix}" for suffix in form.suffixes)):
            return form
    if key.endswith((".qweight", ".qzeros", ".scales")):
        stem = key.rpartition(".")[0]
        siblings = f"{stem}.qzeros" in keys and f"{stem}.scales" in keys
        if not siblings:
            return other
        return gptq if f"{stem}.g_idx" in keys else awq
    if tensor.dtype in FP8_DTYPES and WEIGHT.search(key):
        return fp8
    if tensor.dtype not in FLOAT_DTYPES and key.endswith("weight"):
        return bitsandbytes if tensor.dtype in ("U8", "I8") else other
    return None


def _scales(form: Format, checkpoint: Checkpoint) -> str:
    """For FP8: how many weights and how many scales there are, when that is not the same number."""
    if form is not FORMATS[0]:
        return ""
    items = checkpoint.tensors.items()
    weights = sum(tensor.dtype in FP8_DTYPES and key.endswith("weight") for key, tensor in items)
    scales = sum(key.endswith(("weight_scale_inv", "weight_scale")) for key, _ in items)
    return "" if weights == scales else f"; {weights} quantised weights but {scales} scales"
