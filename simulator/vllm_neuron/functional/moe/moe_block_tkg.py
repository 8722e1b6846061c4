"""Decode: RMS norm, router and experts in one."""

import torch
from nkilib.core.utils.common_types import ActFnType, ExpertAffinityScaleMode, RouterActFnType

from vllm_neuron.functional._numerics import PMAX, not_supported, rms_norm_fp32
from vllm_neuron.functional.moe._experts import Clamps, down, gated, local_slice, require_expert_shapes
from vllm_neuron.simulator import rules

OPERATOR = "moe_block_tkg"

# Limit of the router kernel.
MAX_TOP_K = 8
# Keeps the renormalisation finite.
TOPK_SUM_EPS = 1e-20


@rules.operator
def moe_block_tkg(
    inp: torch.Tensor,
    gamma: torch.Tensor,
    router_weights: torch.Tensor,
    expert_gate_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
    rank_id: torch.Tensor | None = None,
    top_k: int = 1,
    shared_expert_gate_w: torch.Tensor | None = None,
    shared_expert_up_w: torch.Tensor | None = None,
    shared_expert_down_w: torch.Tensor | None = None,
    expert_gate_up_weights_scale: torch.Tensor | None = None,
    expert_down_weights_scale: torch.Tensor | None = None,
    router_bias: torch.Tensor | None = None,
    expert_gate_up_bias: torch.Tensor | None = None,
    expert_down_bias: torch.Tensor | None = None,
    shared_expert_gate_bias: torch.Tensor | None = None,
    shared_expert_up_bias: torch.Tensor | None = None,
    shared_expert_down_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    router_act_fn: RouterActFnType = RouterActFnType.SIGMOID,
    router_pre_norm: bool = True,
    norm_topk_prob: bool = False,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.NO_SCALE,
    hidden_act_fn: ActFnType = ActFnType.SiLU,
    hidden_act_scale_factor: float | None = None,
    hidden_act_bias: float | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    router_mm_dtype: torch.dtype = torch.bfloat16,
    hidden_actual: int | None = None,
    skip_router_logits: bool = False,
    is_all_expert: bool = False,
    residual: torch.Tensor | None = None,
    expert_gate_up_input_scale: torch.Tensor | None = None,
    expert_down_input_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Experts of the normed input, with the router inside; the experts are in float32. No all-reduce.

    The router's operands are rounded to `router_mm_dtype` and multiplied in float32, as on the device; the
    plugin's CPU mode does not round. Without NO_SCALE, an expert's output (down bias included) is multiplied
    by its affinity.

    Args:
        inp: [B, S, H] or [T, H].
        gamma: [1, H].
        router_weights: [H, E], all experts.
        expert_gate_up_weights: [E_local, H, 2, I], gate before up.
        expert_down_weights: [E_local, I, H].
        rank_id: [1, 1], this rank holds experts [E_local * rank_id, E_local * (rank_id + 1)); needs is_all_expert.
        router_bias: [1, E], part of the selection and of the affinities.
        router_mm_dtype: ``nki.language.bfloat16`` or ``float32``.
        expert_gate_up_bias: [E_local, 2, I].
        expert_down_bias: [E_local, H].
        router_pre_norm: the activation runs over all experts before top-k, else over the chosen ones.
        norm_topk_prob: divide the affinities by their sum.
        hidden_act_fn: SiLU, GELU, or Swish = g * sigmoid(1.702 g).
        hidden_actual: width of the input before zero padding.

    Returns:
        output [T, H] in the input's dtype, or (output, router_logits float32 [T, E]) unless
        `skip_router_logits`.

    Raises:
        AssertionError: a shape or size that the kernel asserts.
        ValueError: rank_id is missing for a share of the experts, or the activation is unknown.
        NotImplementedError: a feature that the simulator does not have; the argument is named.
    """
    not_supported(
        OPERATOR,
        shared_expert_gate_w=shared_expert_gate_w,
        shared_expert_up_w=shared_expert_up_w,
        shared_expert_down_w=shared_expert_down_w,
        shared_expert_gate_bias=shared_expert_gate_bias,
        shared_expert_up_bias=shared_expert_up_bias,
        shared_expert_down_bias=shared_expert_down_bias,
        expert_gate_up_weights_scale=expert_gate_up_weights_scale,
        expert_down_weights_scale=expert_down_weights_scale,
        hidden_act_scale_factor=hidden_act_scale_factor,
        hidden_act_bias=hidden_act_bias,
        residual=residual,
        expert_gate_up_input_scale=expert_gate_up_input_scale,
        expert_down_input_scale=expert_down_input_scale,
    )
    H, E = router_weights.shape
    E_local, inner_size = expert_gate_up_weights.shape[0], expert_gate_up_weights.shape[3]
    x = inp.reshape(-1, H)
    rules.require_row(gamma, H, OPERATOR, "gamma", "gamma shape must be [1, H]")
    rules.require_row(router_bias, E, OPERATOR, "router_bias", "router_bias shape must be [1, E]")
    require_expert_shapes(
        OPERATOR, expert_gate_up_weights, expert_down_weights, expert_gate_up_bias, expert_down_bias
    )
    rules.require(
        router_mm_dtype in (torch.bfloat16, torch.float16, torch.float32),
        OPERATOR,
        "router-dtype",
        "router_mm_dtype must be bf16, fp16 or fp32",
        got=router_mm_dtype,
    )
    _check_sizes(x.shape[0], H, inner_size, top_k, is_all_expert, rank_id)
    rules.require(
        is_all_expert or E_local == E,
        OPERATOR,
        "local-experts",
        "the chosen-expert path does not look at rank_id: a share of the experts needs is_all_expert",
        got=(E_local, E),
    )

    if hidden_actual is not None and hidden_actual < H:
        is_real = torch.arange(H, device=x.device) < hidden_actual
        x = torch.where(is_real, x, torch.zeros_like(x))
        normed = rms_norm_fp32(x, gamma, eps, hidden_actual).float()
    else:
        normed = rms_norm_fp32(x, gamma, eps).float()
    logits = normed.to(router_mm_dtype).float() @ router_weights.to(router_mm_dtype).float()
    if router_bias is not None:
        logits = logits + router_bias.float()
    affinities = _affinities(logits, top_k, router_act_fn, router_pre_norm, norm_topk_prob)
    local = local_slice(affinities, E_local, rank_id, OPERATOR)
    if expert_affinities_scaling_mode is ExpertAffinityScaleMode.NO_SCALE:
        local = (local > 0).to(local.dtype)

    clamps = Clamps(
        gate_clamp_upper_limit, gate_clamp_lower_limit, up_clamp_upper_limit, up_clamp_lower_limit
    )
    inner = gated(normed, expert_gate_up_weights, expert_gate_up_bias, clamps, hidden_act_fn)
    output = down(inner, expert_down_weights, expert_down_bias)  # [E_local, T, H]
    output = (output * local.T.unsqueeze(2)).sum(0).to(inp.dtype)
    return output if skip_router_logits else (output, logits)


def _affinities(
    logits: torch.Tensor, top_k: int, act_fn: RouterActFnType, activate_first: bool, renormalize: bool
) -> torch.Tensor:
    """Affinities [T, E], zero for experts that are not chosen."""
    scores = _activate(logits, act_fn) if activate_first else logits
    values, chosen = torch.topk(scores, top_k, dim=-1)
    if not activate_first:
        values = _activate(values, act_fn)
    if renormalize:
        values = values / (values.sum(-1, keepdim=True) + TOPK_SUM_EPS)
    return torch.zeros_like(logits).scatter(1, chosen, values)


def _activate(x: torch.Tensor, act_fn: RouterActFnType) -> torch.Tensor:
    if act_fn is RouterActFnType.SOFTMAX:
        return torch.softmax(x, dim=-1)
    if act_fn is RouterActFnType.SIGMOID:
        return torch.sigmoid(x)
    raise NotImplementedError(f"{OPERATOR}: router_act_fn {act_fn!r}")


def _check_sizes(
    T: int, H: int, inner: int, top_k: int, is_all_expert: bool, rank_id: torch.Tensor | None
) -> None:
    rules.require(
        not is_all_expert or rank_id is not None, OPERATOR, "rank-id", "is_all_expert needs rank_id [1, 1]"
    )
    if rules.fallback(H % (2 * PMAX) != 0, OPERATOR, f"hidden size must be a multiple of {2 * PMAX}", got=H):
        return
    rules.require(
        is_all_expert or T <= PMAX,
        OPERATOR,
        "tokens",
        f"at most {PMAX} tokens unless is_all_expert",
        got=T,
    )
    rules.fallback(
        top_k > MAX_TOP_K,
        OPERATOR,
        f"the router kernel is reported to take at most {MAX_TOP_K} experts per token; not verified",
        got=top_k,
    )
    rules.fallback(
        inner % PMAX != 0,
        OPERATOR,
        f"the documentation asks for an intermediate size per rank that is a multiple of {PMAX}",
        got=inner,
    )
