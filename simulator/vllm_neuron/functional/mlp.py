"""Gated and plain feed-forward block."""

import torch
from nkilib.core.utils.common_types import ActFnType, NormType, QuantizationType

from vllm_neuron.functional._numerics import PMAX, activation, layer_norm, not_supported, rms_norm
from vllm_neuron.simulator import rules

OPERATOR = "mlp"

# The prefill kernel holds the intermediate axis in at most 8 tiles of 512 columns.
TILE_I = 512
MAX_TILES = 8

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@rules.operator
def mlp(
    hidden: torch.Tensor,
    gate_w: torch.Tensor | None,
    up_w: torch.Tensor,
    down_w: torch.Tensor,
    eps: float = 1e-6,
    ln_w: torch.Tensor | None = None,
    skip_gate: bool = False,
    act_fn: ActFnType = ActFnType.SiLU,
    gate_b: torch.Tensor | None = None,
    up_b: torch.Tensor | None = None,
    down_b: torch.Tensor | None = None,
    norm_b: torch.Tensor | None = None,
    norm_type: NormType = NormType.NO_NORM,
    fused_add_tensor: torch.Tensor | None = None,
    store_fused_add_result: bool = False,
    quantization_type: QuantizationType = QuantizationType.NONE,
    gate_w_scale: torch.Tensor | None = None,
    up_w_scale: torch.Tensor | None = None,
    down_w_scale: torch.Tensor | None = None,
    gate_up_in_scale: torch.Tensor | None = None,
    down_in_scale: torch.Tensor | None = None,
    quant_clipping_bound: float = 0.0,
    output_dtype: torch.dtype | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    gate_up_w_layout: object = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """act(x @ gate_w) * (x @ up_w) @ down_w over T tokens, or act(x @ up_w) @ down_w with `skip_gate`.

    Everything runs in the input's dtype, the norm too. No all-reduce; `down_b` is added on every rank.
    Clamps and quantization are refused: the plugin's CPU mode drops them without a word.

    Args:
        hidden: [T, H].
        gate_w, up_w: [H, I]. gate_w is not read with `skip_gate`.
        down_w: [I, H].
        ln_w, norm_b: [1, H].
        gate_b, up_b: [1, I].
        down_b: [1, H].
        fused_add_tensor: [T, H], added before the norm.

    Returns:
        [T, H]; with `store_fused_add_result` and a fused_add_tensor (output, hidden + fused_add_tensor).

    Raises:
        ValueError: `hidden` is not 2-D, RMS_NORM without ln_w, or an unknown activation.
        AssertionError: a bias or norm weight that is not one row, a norm bias without LAYER_NORM, a dtype.
        NotImplementedError: a feature that the simulator does not have; the argument is named.
    """
    not_supported(
        OPERATOR,
        quantization_type=quantization_type,
        gate_w_scale=gate_w_scale,
        up_w_scale=up_w_scale,
        down_w_scale=down_w_scale,
        gate_up_in_scale=gate_up_in_scale,
        down_in_scale=down_in_scale,
        quant_clipping_bound=quant_clipping_bound or None,
        output_dtype=output_dtype,
        gate_clamp_upper_limit=gate_clamp_upper_limit,
        gate_clamp_lower_limit=gate_clamp_lower_limit,
        up_clamp_upper_limit=up_clamp_upper_limit,
        up_clamp_lower_limit=up_clamp_lower_limit,
        gate_up_w_layout=gate_up_w_layout,
    )
    if hidden.dim() != 2:
        raise ValueError(f"hidden must be [T, H], got {tuple(hidden.shape)}")
    H, intermediate = up_w.shape
    has_bias = gate_b is not None or up_b is not None or down_b is not None
    _check_sizes(hidden.shape[0], H, intermediate, has_bias)
    rules.require(
        hidden.dtype in _DTYPES, OPERATOR, "dtype", "hidden must be bf16, fp16, fp32 or fp8", got=hidden.dtype
    )
    rules.require_row(gate_b, intermediate, OPERATOR, "gate_b", "Bias shape must be [1, I]")
    rules.require_row(up_b, intermediate, OPERATOR, "up_b", "Bias shape must be [1, I]")
    rules.require_row(down_b, H, OPERATOR, "down_b", "Bias shape must be [1, H]")
    rules.require_row(ln_w, H, OPERATOR, "ln_w", "ln_w shape must be [1, H]")
    rules.require_row(norm_b, H, OPERATOR, "norm_b", "norm_b shape must be [1, H]")
    rules.require(
        norm_b is None or norm_type is NormType.LAYER_NORM,
        OPERATOR,
        "norm-bias",
        "norm_b is only for LAYER_NORM",
    )

    x = hidden if fused_add_tensor is None else hidden + fused_add_tensor
    summed = x
    if norm_type is NormType.RMS_NORM:
        if ln_w is None:
            raise ValueError("norm_type RMS_NORM needs ln_w")
        x = rms_norm(x, ln_w, eps)
    elif norm_type is NormType.RMS_NORM_SKIP_GAMMA:
        x = rms_norm(x, None, eps)
    elif norm_type is NormType.LAYER_NORM:
        x = layer_norm(x, ln_w, norm_b, eps)

    up = _linear(x, up_w, up_b)
    if skip_gate:
        inner = activation(up, act_fn)
    else:
        if gate_w is None:
            raise ValueError("gate_w is needed unless skip_gate is set")
        inner = activation(_linear(x, gate_w, gate_b), act_fn) * up
    output = _linear(inner, down_w, down_b)
    if fused_add_tensor is not None and store_fused_add_result:
        return output, summed
    return output


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ weight if bias is None else x @ weight + bias


def _check_sizes(T: int, H: int, intermediate: int, has_bias: bool) -> None:
    if rules.fallback(H % PMAX != 0, OPERATOR, f"hidden size must be a multiple of {PMAX}", got=H):
        return
    if T <= PMAX:
        rules.fallback(
            H % (2 * PMAX) != 0,
            OPERATOR,
            f"hidden size must be a multiple of {2 * PMAX} for up to {PMAX} tokens",
            got=H,
        )
        return
    # The kernel halves the intermediate axis over the cores in this case only.
    halved = H >= 7168 and intermediate >= 1024 and T <= 256 and not has_bias
    columns = intermediate // 2 if halved else intermediate
    rules.fallback(
        -(-columns // TILE_I) > MAX_TILES,
        OPERATOR,
        f"intermediate size per rank above {MAX_TILES * TILE_I} in prefill",
        got=intermediate,
    )
