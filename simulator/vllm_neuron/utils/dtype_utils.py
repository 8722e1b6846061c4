"""Dtypes of the KV cache and the FP8 range of the platform."""

from typing import Any

import torch


def _fp8_clamp_max() -> float:
    from libtorch_neuronx_lite.compile.platform import get_platform_target

    # Trainium 2's e4m3 has an infinity and ends at 240; Trainium 3's is the OCP e4m3fn.
    return 448.0 if get_platform_target().startswith("trn3") else 240.0


FP8_CLAMP_MAX = _fp8_clamp_max()

QUANTIZED_KV_CACHE_DTYPES = ["fp8", "fp8_e4m3"]

_KV_CACHE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def kv_cache_dtype_str_to_dtype(kv_cache_dtype: str, model_config: Any) -> torch.dtype:
    """Dtype for vLLM's `cache_dtype` string; "auto" is the model's dtype.

    Raises:
        ValueError: unknown string.
    """
    if kv_cache_dtype == "auto":
        return model_config.dtype
    if kv_cache_dtype not in _KV_CACHE_DTYPES:
        raise ValueError(
            f"Unsupported KV cache dtype {kv_cache_dtype!r}; one of auto, {', '.join(_KV_CACHE_DTYPES)}"
        )
    return _KV_CACHE_DTYPES[kv_cache_dtype]


def validate_fp8_segmented_supported(kv_is_fp8: bool, fp8_packed: bool) -> None:
    """Segmented prefill reads an FP8 K cache only in the packed layout.

    Raises:
        NotImplementedError: FP8 cache that is not packed.
    """
    if kv_is_fp8 and not fp8_packed:
        raise NotImplementedError("Segmented prefill with an FP8 KV cache needs fp8_packed_kv")
