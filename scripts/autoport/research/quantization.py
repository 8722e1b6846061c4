"""Recognising quantised checkpoints, by config and by header."""

import re
from collections.abc import Mapping
from typing import Any

from autoport.errors import Problem
from autoport.research.fields import describe
from autoport.schema import Checkpoint

CONFIG_KEYS = ("quantization_config", "compression_config")
FLOAT_DTYPES = {"BF16", "F16", "F32", "F64"}
SCALE_KEY = re.compile(
    r"\.(weight_scale(_inv)?|weight_packed|qweight|qzeros|scales|absmax|quant_state\..*|input_scale)$"
)
NEXT_STEP = "dequantise the checkpoint to bfloat16 first, or pass the original checkpoint"


def quantization_problems(
    config: Mapping[str, Any], config_file: str, checkpoint: Checkpoint
) -> list[Problem]:
    """One problem (QUANT) for the config's declaration and one for the headers' evidence."""
    problems = [
        Problem("QUANT", f"{key} is {describe(config[key])}", config_file, NEXT_STEP)
        for key in CONFIG_KEYS
        if config.get(key) is not None
    ]
    evidence = {
        key: tensor
        for key, tensor in checkpoint.tensors.items()
        if SCALE_KEY.search(key) or (key.endswith("weight") and tensor.dtype not in FLOAT_DTYPES)
    }
    if evidence:
        key, tensor = next(iter(evidence.items()))
        found = f"quantised weights: {len(evidence)} keys such as {key} ({tensor.dtype} {list(tensor.shape)})"
        problems.append(Problem("QUANT", found, tensor.file, NEXT_STEP))
    return problems
