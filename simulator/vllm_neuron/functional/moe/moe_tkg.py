"""Decode experts without a router."""

import torch
from nkilib.core.utils.common_types import ActFnType, ExpertAffinityScaleMode, MoEAllToAllVStrategy

from vllm_neuron.functional._numerics import PMAX, not_supported
from vllm_neuron.functional.moe._experts import Clamps, down, gated, local_slice, require_expert_shapes
from vllm_neuron.simulator import rules

OPERATOR = "moe_tkg"

# Limit of the kernel.
MAX_TOP_K = 16


@rules.operator
def moe_tkg(
    hidden_input: torch.Tensor,
    expert_gate_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
    expert_affinities: torch.Tensor,
    expert_index: torch.Tensor,
    is_all_expert: bool,
    rank_id: torch.Tensor | None = None,
    expert_gate_up_bias: torch.Tensor | None = None,
    expert_down_bias: torch.Tensor | None = None,
    expert_gate_up_weights_scale: torch.Tensor | None = None,
    expert_down_weights_scale: torch.Tensor | None = None,
    hidden_input_scale: torch.Tensor | None = None,
    expert_gate_up_input_scale: torch.Tensor | None = None,
    expert_down_input_scale: torch.Tensor | None = None,
    mask_unselected_experts: bool = False,
    expert_affinities_eager: torch.Tensor | None = None,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.NO_SCALE,
    activation_fn: ActFnType = ActFnType.SiLU,
    output_dtype: torch.dtype | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    output_in_sbuf: bool = False,
    is_all_expert_dynamic: bool = False,
    block_size: int | None = None,
    input_dequant_scale: torch.Tensor | None = None,
    all_to_all_v_strategy: MoEAllToAllVStrategy = MoEAllToAllVStrategy.DISABLED,
) -> torch.Tensor:
    """Sum of the local experts' outputs over each token's chosen experts. No all-reduce.

    The plugin runs this on the device only; here it runs in the input's dtype. With `is_all_expert` and
    without `mask_unselected_experts` every local expert with a non-zero affinity counts.

    Args:
        hidden_input: [T, H].
        expert_gate_up_weights: [E_local, H, 2, I], bf16 (or float32, for comparisons).
        expert_down_weights: [E_local, I, H].
        expert_affinities: [T, E], all experts.
        expert_index: [T, K], the chosen experts.
        rank_id: [1, 1], this rank holds experts [E_local * rank_id, E_local * (rank_id + 1)).
        expert_gate_up_bias: [E_local, 2, I].
        expert_down_bias: [E_local, H].
        expert_affinities_scaling_mode: NO_SCALE or POST_SCALE.

    Returns:
        [T, H] in `output_dtype`, else in the input's dtype.

    Raises:
        AssertionError: a shape or size that the kernel asserts.
        ValueError: rank_id is missing for a share of the experts.
        NotImplementedError: quantized weights, all-to-all, or another feature that the simulator does not
            have; the argument is named.
    """
    not_supported(
        OPERATOR,
        expert_gate_up_weights_scale=expert_gate_up_weights_scale,
        expert_down_weights_scale=expert_down_weights_scale,
        hidden_input_scale=hidden_input_scale,
        expert_gate_up_input_scale=expert_gate_up_input_scale,
        expert_down_input_scale=expert_down_input_scale,
        expert_affinities_eager=expert_affinities_eager,
        output_in_sbuf=output_in_sbuf,
        is_all_expert_dynamic=is_all_expert_dynamic,
        block_size=block_size,
        input_dequant_scale=input_dequant_scale,
        all_to_all_v_strategy=(
            None if all_to_all_v_strategy is MoEAllToAllVStrategy.DISABLED else all_to_all_v_strategy
        ),
    )
    dtype = expert_gate_up_weights.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise NotImplementedError(f"{OPERATOR}: expert weights must be bfloat16, got {dtype}")
    E_local = expert_gate_up_weights.shape[0]
    T, E = expert_affinities.shape
    require_expert_shapes(
        OPERATOR, expert_gate_up_weights, expert_down_weights, expert_gate_up_bias, expert_down_bias
    )
    _check(T, E, expert_index.shape[1], is_all_expert, rank_id, expert_affinities_scaling_mode)

    chosen = torch.zeros_like(expert_affinities).scatter(1, expert_index.to(torch.int64), 1.0)
    if expert_affinities_scaling_mode is ExpertAffinityScaleMode.POST_SCALE:
        weight = expert_affinities
        if not is_all_expert or mask_unselected_experts:
            weight = weight * chosen
    else:
        weight = chosen
    weight = local_slice(weight, E_local, rank_id, OPERATOR)
    clamps = Clamps(
        gate_clamp_upper_limit, gate_clamp_lower_limit, up_clamp_upper_limit, up_clamp_lower_limit
    )
    inner = gated(hidden_input, expert_gate_up_weights, expert_gate_up_bias, clamps, activation_fn)
    output = down(inner, expert_down_weights, expert_down_bias)
    return (output * weight.T.unsqueeze(2)).sum(0).to(output_dtype or hidden_input.dtype)


def _check(
    T: int,
    E: int,
    top_k: int,
    is_all_expert: bool,
    rank_id: torch.Tensor | None,
    mode: ExpertAffinityScaleMode,
) -> None:
    post_scale = ExpertAffinityScaleMode.POST_SCALE
    rules.require(
        mode in (ExpertAffinityScaleMode.NO_SCALE, post_scale),
        OPERATOR,
        "scaling-mode",
        "expert_affinities_scaling_mode must be NO_SCALE or POST_SCALE",
        got=mode,
    )
    rules.require(
        is_all_expert or T <= PMAX, OPERATOR, "tokens", f"at most {PMAX} tokens unless is_all_expert", got=T
    )
    rules.require(
        not (is_all_expert and mode is post_scale) or rank_id is not None,
        OPERATOR,
        "rank-id",
        "is_all_expert with POST_SCALE needs rank_id [1, 1]",
    )
    rules.require(top_k <= MAX_TOP_K, OPERATOR, "top-k", f"at most {MAX_TOP_K} experts per token", got=top_k)
    rules.require(E > 1, OPERATOR, "experts", "more than one expert is needed", got=E)
