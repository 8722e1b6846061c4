"""Experts in prefill."""

import torch
from nkilib.core.moe.moe_cte.moe_cte import BlockShardStrategy, MoECTEImplementation
from nkilib.core.utils.common_types import ActFnType, ExpertAffinityScaleMode, QuantizationType

from vllm_neuron.functional._numerics import PMAX, not_supported
from vllm_neuron.functional.moe._experts import Clamps, down, gated, require_expert_shapes
from vllm_neuron.simulator import rules

OPERATOR = "moe_cte"

_ON_BLOCK = (MoECTEImplementation.shard_on_block,)
_ON_I = (
    MoECTEImplementation.shard_on_i,
    MoECTEImplementation.shard_on_i_hybrid,
    MoECTEImplementation.shard_on_i_dropping,
)


@rules.operator
def moe_cte(
    hidden_states: torch.Tensor,
    expert_affinities_masked: torch.Tensor,
    gate_up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
    token_position_to_id: torch.Tensor,
    block_to_expert: torch.Tensor,
    block_size: int,
    implementation: MoECTEImplementation,
    n_block_per_iter: int = 1,
    block_sharding_strategy: BlockShardStrategy = BlockShardStrategy.PING_PONG,
    n_static_blocks: int = -1,
    n_dynamic_blocks: int = -1,
    top_k: int = 1,
    ep_degree: int = 1,
    checkpoint_activation: bool = False,
    expert_affinity_multiply_on_I: bool = False,
    num_static_block: int | None = None,
    conditions: torch.Tensor | None = None,
    gate_and_up_proj_bias: torch.Tensor | None = None,
    down_proj_bias: torch.Tensor | None = None,
    gate_up_proj_scale: torch.Tensor | None = None,
    down_proj_scale: torch.Tensor | None = None,
    gate_up_activations_T: torch.Tensor | None = None,
    down_activations: torch.Tensor | None = None,
    activation_function: ActFnType = ActFnType.SiLU,
    skip_token: bool = False,
    skip_weight: bool = False,
    compute_dtype: object = torch.bfloat16,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.POST_SCALE,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    gate_w_scale: torch.Tensor | None = None,
    up_w_scale: torch.Tensor | None = None,
    down_w_scale: torch.Tensor | None = None,
    gate_up_in_scale: torch.Tensor | None = None,
    down_in_scale: torch.Tensor | None = None,
    use_packed_scales: bool = False,
) -> torch.Tensor:
    """Sum of the local experts' outputs over the (token, expert) pairs in the blockwise mapping.

    Projections run in the input's dtype whatever `compute_dtype` says. Arguments that only schedule the
    kernel (block counts, skip flags, conditions' content, ...) change nothing. No all-reduce.

    Args:
        hidden_states: [T, H], or [T + 1, H] with a row for padding.
        expert_affinities_masked: [T * E, 1], entry t * E + e.
        gate_up_proj_weight: [E, H, 2, I], gate before up.
        down_proj_weight: [E, I, H].
        token_position_to_id: int32 [N * block_size], -1 where no token is.
        block_to_expert: int32 [N] or [N, 1].
        implementation: one of the Trainium 2 members.
        gate_and_up_proj_bias: [E, 2, I]; both biases or neither.
        down_proj_bias: [E, H] or [E, 1, H], added before the affinity in POST_SCALE.
        activation_function: SiLU, GELU, or Swish = g * sigmoid(1.702 g).
        expert_affinities_scaling_mode: where the affinity is multiplied in.

    Returns:
        [T, H] in the input's dtype.

    Raises:
        AssertionError: a shape or size that the kernel asserts.
        ValueError: an activation that the experts do not have.
        NotImplementedError: a feature that the simulator does not have; the argument is named.
    """
    not_supported(
        OPERATOR,
        implementation=None if implementation in (*_ON_BLOCK, *_ON_I) else implementation,
        quantization_type=quantization_type,
        gate_up_proj_scale=gate_up_proj_scale,
        down_proj_scale=down_proj_scale,
        gate_w_scale=gate_w_scale,
        up_w_scale=up_w_scale,
        down_w_scale=down_w_scale,
        gate_up_in_scale=gate_up_in_scale,
        down_in_scale=down_in_scale,
        use_packed_scales=use_packed_scales,
        checkpoint_activation=checkpoint_activation,
        gate_up_activations_T=gate_up_activations_T,
        down_activations=down_activations,
        expert_affinity_multiply_on_I=expert_affinity_multiply_on_I,
    )
    if not is_tensor_update_accumulating:
        raise NotImplementedError(f"{OPERATOR}: the simulator needs is_tensor_update_accumulating")
    E, H, _, inner_size = gate_up_proj_weight.shape
    T = expert_affinities_masked.shape[0] // E
    require_expert_shapes(
        OPERATOR, gate_up_proj_weight, down_proj_weight, gate_and_up_proj_bias, down_proj_bias
    )
    rules.require(
        (gate_and_up_proj_bias is None) == (down_proj_bias is None),
        OPERATOR,
        "both-biases",
        "expert biases must be given for both projections or for neither",
    )
    _check_mapping(token_position_to_id, block_to_expert, block_size)
    _check_implementation(
        implementation, block_size, H, inner_size, block_sharding_strategy, skip_weight, conditions
    )
    on_block = implementation in _ON_BLOCK
    mode = expert_affinities_scaling_mode
    rules.require(
        not on_block or mode is not ExpertAffinityScaleMode.PRE_SCALE_DELAYED,
        OPERATOR,
        "pre-scale-delayed",
        "shard_on_block does not take PRE_SCALE_DELAYED",
    )

    x = hidden_states[:T]
    affinity = expert_affinities_masked.reshape(T, E).T.unsqueeze(2)  # [E, T, 1]
    if mode is ExpertAffinityScaleMode.PRE_SCALE:
        x = (x * affinity).to(x.dtype)
    clamps = Clamps(
        gate_clamp_upper_limit, gate_clamp_lower_limit, up_clamp_upper_limit, up_clamp_lower_limit
    )
    inner = gated(x, gate_up_proj_weight, gate_and_up_proj_bias, clamps, activation_function)
    if mode is ExpertAffinityScaleMode.PRE_SCALE_DELAYED:
        inner = (inner * affinity).to(x.dtype)
    output = down(inner, down_proj_weight, down_proj_bias)  # [E, T, H]
    weight = _times_mapped(token_position_to_id, block_to_expert, block_size, T, E).T.unsqueeze(2)
    if mode is ExpertAffinityScaleMode.POST_SCALE:
        weight = weight * affinity
    return (output * weight).sum(0).to(hidden_states.dtype)


def _times_mapped(
    token_position_to_id: torch.Tensor, block_to_expert: torch.Tensor, block_size: int, T: int, E: int
) -> torch.Tensor:
    """How often each (token, expert) pair is in the mapping, float32 [T, E]; 0 or 1 in a sound one."""
    token = token_position_to_id.to(torch.int64)
    expert = block_to_expert.flatten().to(torch.int64).repeat_interleave(block_size)
    pair = torch.where((token >= 0) & (token < T), token * E + expert, T * E)
    counts = torch.zeros(T * E + 1, device=token.device)
    return counts.scatter_add(0, pair, torch.ones_like(pair, dtype=counts.dtype))[:-1].view(T, E)


def _check_mapping(
    token_position_to_id: torch.Tensor, block_to_expert: torch.Tensor, block_size: int
) -> None:
    positions, blocks = token_position_to_id.numel(), block_to_expert.numel()
    rules.require(
        positions % block_size == 0 and positions // block_size == blocks,
        OPERATOR,
        "mapping-length",
        "token_position_to_id must have block_size entries for each entry of block_to_expert",
        got=(positions, block_size, blocks),
    )
    for name, tensor in (
        ("token_position_to_id", token_position_to_id),
        ("block_to_expert", block_to_expert),
    ):
        rules.require(
            tensor.dtype == torch.int32,
            OPERATOR,
            f"{name}-int32",
            f"{name} must be int32",
            got=tensor.dtype,
        )


def _check_implementation(
    implementation: MoECTEImplementation,
    block_size: int,
    H: int,
    inner: int,
    strategy: BlockShardStrategy,
    skip_weight: bool,
    conditions: torch.Tensor | None,
) -> None:
    on_i = implementation in _ON_I
    multiple = 2 * PMAX if on_i else PMAX
    rules.require(
        block_size % multiple == 0,
        OPERATOR,
        "block-size",
        f"block_size must be a multiple of {multiple} for {implementation.name}",
        got=block_size,
    )
    rules.require(
        on_i or strategy is BlockShardStrategy.PING_PONG,
        OPERATOR,
        "shard-strategy",
        "shard_on_block takes PING_PONG only",
        got=strategy,
    )
    rules.require(not (on_i and skip_weight), OPERATOR, "skip-weight", "shard_on_i cannot skip weights")
    rules.require(
        implementation is not MoECTEImplementation.shard_on_i_hybrid or conditions is not None,
        OPERATOR,
        "conditions",
        "shard_on_i_hybrid needs conditions",
    )
    if rules.fallback(inner < PMAX, OPERATOR, f"intermediate size per rank below {PMAX}", got=inner):
        return
    rules.require(inner % 16 == 0, OPERATOR, "inner-16", "I must be a multiple of 16", got=inner)
    rules.require(
        not on_i or (512 <= H <= 8192 and H % 512 == 0),
        OPERATOR,
        "hidden-512",
        "H must be a multiple of 512 between 512 and 8192 for shard_on_i",
        got=H,
    )
