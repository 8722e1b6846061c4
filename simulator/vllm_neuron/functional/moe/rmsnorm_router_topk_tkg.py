"""Decode: RMS norm, router and top-k in one."""

import torch
from nkilib.core.utils.common_types import QuantizationType, RouterActFnType

from vllm_neuron.functional._numerics import PMAX, not_supported, rms_norm
from vllm_neuron.simulator import rules

OPERATOR = "rmsnorm_router_topk_tkg"

# Limit of the kernel.
MAX_EXPERTS = 512


@rules.operator
def rmsnorm_router_topk_tkg(
    hidden_states: torch.Tensor,
    gamma: torch.Tensor,
    router_weights: torch.Tensor,
    router_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    top_k: int = 1,
    hidden_actual: int | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    router_mm_dtype: torch.dtype = torch.bfloat16,
    router_act_fn: RouterActFnType = RouterActFnType.SIGMOID,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm in float32; router operands rounded to `router_mm_dtype`, multiplied in float32.

    Args:
        hidden_states: [B, S, H], T = B * S.
        gamma: [1, H] or [H].
        router_weights: [H, E].
        router_bias: [1, E], part of the selection and of the affinities.
        hidden_actual: width of the input before zero padding.
        router_act_fn: over the chosen logits.

    Returns:
        (normed [T, H] in `router_mm_dtype`, expert_index int32 [T, top_k], affinities bfloat16 [T, E], zero
        for experts that are not chosen).

    Raises:
        AssertionError: a shape or size that does not fit.
        NotImplementedError: quantization.
    """
    not_supported(OPERATOR, quantization_type=quantization_type)
    _check(hidden_states, gamma, router_weights, router_bias, top_k, hidden_actual, router_act_fn)
    H, E = router_weights.shape
    x = hidden_states.reshape(-1, H)
    rules.fallback(
        hidden_states.dtype not in (torch.bfloat16, torch.float16, torch.float32),
        OPERATOR,
        "the kernel takes bf16, fp16 and fp32",
        got=hidden_states.dtype,
    )
    rules.fallback(E > MAX_EXPERTS, OPERATOR, f"more than {MAX_EXPERTS} experts", got=E)
    rules.fallback(
        x.shape[0] % (2 * PMAX) != 0,
        OPERATOR,
        f"the kernel takes multiples of {2 * PMAX} tokens",
        got=x.shape[0],
    )

    normed = rms_norm(x.float(), gamma.float().reshape(1, H), eps, hidden_actual).to(router_mm_dtype)
    logits = normed.float() @ router_weights.to(router_mm_dtype).float()
    if router_bias is not None:
        logits = logits + router_bias.to(router_mm_dtype).float()
    values, chosen = torch.topk(logits, top_k, dim=-1)
    if router_act_fn is RouterActFnType.SOFTMAX:
        values = torch.softmax(values, dim=-1)
    else:
        values = torch.sigmoid(values)
    affinities = torch.zeros_like(logits).scatter(1, chosen, values).to(torch.bfloat16)
    return normed, chosen.to(torch.int32), affinities


def _check(
    hidden: torch.Tensor,
    gamma: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    hidden_actual: int | None,
    act_fn: RouterActFnType,
) -> None:
    if hidden.dim() != 3:
        raise AssertionError(f"hidden_states must be [B, S, H], got {tuple(hidden.shape)}")
    H = hidden.shape[2]
    if weights.dim() != 2 or weights.shape[0] != H:
        raise AssertionError(f"router_weights must be [{H}, E], got {tuple(weights.shape)}")
    E = weights.shape[1]
    if not (rules.shape_is(gamma, (1, H)) or rules.shape_is(gamma, (H,))):
        raise AssertionError(f"gamma shape must be [1, {H}] or [{H}], got {tuple(gamma.shape)}")
    if bias is not None and not rules.shape_is(bias, (1, E)):
        raise AssertionError(f"router_bias shape must be [1, {E}], got {tuple(bias.shape)}")
    if not 1 <= top_k <= E:
        raise AssertionError(f"top_k must be between 1 and {E}, got {top_k}")
    if H % (2 * PMAX):
        raise AssertionError(f"H must be a multiple of {2 * PMAX}, got {H}")
    if hidden_actual is not None and not 0 < hidden_actual <= H:
        raise AssertionError(f"hidden_actual must be between 1 and {H}, got {hidden_actual}")
    if act_fn not in (RouterActFnType.SIGMOID, RouterActFnType.SOFTMAX):
        raise AssertionError(f"router_act_fn must be SIGMOID or SOFTMAX, got {act_fn!r}")
