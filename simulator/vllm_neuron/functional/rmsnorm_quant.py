"""RMS norm followed by FP8 quantization."""

import torch
from nkilib.core.utils.common_types import QuantizationType

from vllm_neuron.functional._numerics import PMAX, rms_norm
from vllm_neuron.simulator import rules

OPERATOR = "rmsnorm_quant"

# Limits of the kernel.
MAX_BATCH = 2
MAX_SEQ = 32768
MAX_HIDDEN = 16384

STATIC_CLAMP = 240.0
ROW_MAX = 448.0
MIN_ROW_SCALE = 1e-12


@rules.operator
def rmsnorm_quant(
    hidden: torch.Tensor,
    ln_w: torch.Tensor,
    input_dequant_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    quantization_type: QuantizationType = QuantizationType.STATIC,
) -> torch.Tensor:
    """Norm in float32, then float8_e4m3fn.

    Args:
        hidden: [T, H] or [B, S, H].
        ln_w: [H] or [1, H].
        input_dequant_scale: float32 [128, 1], all entries equal; STATIC divides by it.
        quantization_type: STATIC, or ROW for one scale per row.

    Returns:
        STATIC: the shape of `hidden`. ROW: [..., H + 4], each row's float32 scale in its last four bytes.

    Raises:
        NotImplementedError: another quantization type.
        ValueError: the scale is missing for STATIC or is not [128, 1], or ln_w does not fit.
    """
    if quantization_type not in (QuantizationType.STATIC, QuantizationType.ROW):
        raise NotImplementedError(f"{OPERATOR}: quantization_type {quantization_type}")
    H = hidden.shape[-1]
    if not (rules.shape_is(ln_w, (H,)) or rules.shape_is(ln_w, (1, H))):
        raise ValueError(f"ln_w shape must be [{H}] or [1, {H}], got {tuple(ln_w.shape)}")
    if hidden.dim() == 3:
        B, S = hidden.shape[0], hidden.shape[1]
    else:
        B, S = 1, hidden.shape[0]
    rules.fallback(
        B > MAX_BATCH or S > MAX_SEQ or H > MAX_HIDDEN,
        OPERATOR,
        f"the kernel takes up to {MAX_BATCH} x {MAX_SEQ} x {MAX_HIDDEN}",
        got=(B, S, H),
    )
    normed = rms_norm(hidden.float(), ln_w.float().flatten(), eps)
    if quantization_type is QuantizationType.STATIC:
        if input_dequant_scale is None or not rules.shape_is(input_dequant_scale, (PMAX, 1)):
            raise ValueError(f"STATIC needs input_dequant_scale of shape ({PMAX}, 1)")
        scaled = normed / input_dequant_scale[0, 0]
        return scaled.clamp(-STATIC_CLAMP, STATIC_CLAMP).to(torch.float8_e4m3fn)
    scale = (normed.abs().amax(-1, keepdim=True) / ROW_MAX).clamp(min=MIN_ROW_SCALE)
    values = (normed / scale).clamp(-ROW_MAX, ROW_MAX).to(torch.float8_e4m3fn)
    return torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], dim=-1).view(torch.float8_e4m3fn)
