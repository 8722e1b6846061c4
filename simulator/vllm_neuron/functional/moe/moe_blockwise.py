"""Sorting routed tokens into blocks of one expert each."""

from typing import Any

import torch
import torch.distributed as dist

from vllm_neuron.functional._numerics import PMAX
from vllm_neuron.simulator import rules
from vllm_neuron.utils.neuron_utils import values_are_readable

OPERATOR = "build_blockwise_mapping"


def num_blocks(num_tokens: int, num_local_experts: int, num_experts_per_token: int, block_size: int) -> int:
    """Blocks that always suffice: every expert but one may leave its last block almost empty."""
    routed = num_tokens * min(num_experts_per_token, num_local_experts)
    full = -(-(routed - (num_local_experts - 1)) // block_size)
    return min(full + num_local_experts - 1, routed)


@rules.operator
def build_blockwise_mapping(
    expert_affinities: torch.Tensor,
    num_local_experts: int,
    num_experts_per_token: int,
    block_size: int,
    moe_group: Any,
    tp_degree: int = 1,
    padding_mask: torch.Tensor | None = None,
    rank: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give every routed (token, expert) pair a place in blocks that belong to one expert.

    N blocks; an expert's tokens keep their order; blocks at the end that nobody needs are the last expert's.
    With `tp_degree` > 1 that divides the experts, each rank of `moe_group` (a vLLM GroupCoordinator) places
    its share of the experts and the results are joined, so all ranks must pass the same affinities.

    Args:
        expert_affinities: [T, E], non-zero where a token is routed to a local expert.
        num_experts_per_token: top-k of the router.
        padding_mask: bool [T], true for real tokens. The others keep their places in blocks; their
            affinities become zero.
        rank: this rank as a tensor; the simulator takes the group's.

    Returns:
        expert_affinities_masked [T * E, 1] in the input's dtype; token_position_to_id int32 [N * block_size],
        -1 where no token is; block_to_expert int32 [N]; conditions int32 [N], 1 for blocks in use.

    Raises:
        ValueError: a token has more experts than `num_experts_per_token`.
    """
    T, E = expert_affinities.shape
    _check_sizes(T, E, tp_degree)
    N = num_blocks(T, num_local_experts, num_experts_per_token, block_size)
    is_routed = expert_affinities != 0
    if values_are_readable(is_routed) and int(is_routed.sum(1).max()) > num_experts_per_token:
        raise ValueError(
            f"a token is routed to more than num_experts_per_token {num_experts_per_token} experts"
        )
    is_sharded = tp_degree > 1 and E % tp_degree == 0
    if is_sharded:
        width = E // tp_degree
        first = moe_group.rank_in_group % tp_degree * width
        counts = moe_group.all_gather(is_routed[:, first : first + width].sum(0), dim=0)
        expert = torch.arange(E, device=is_routed.device)
        is_routed = is_routed & (expert >= first) & (expert < first + width)
    else:
        counts = is_routed.sum(0)
    last_block = (-(-counts // block_size)).cumsum(0)  # [E], exclusive end of each expert's blocks
    first_block = last_block - -(-counts // block_size)

    place = first_block * block_size + is_routed.cumsum(0) - 1  # [T, E]
    # One more slot takes the pairs that are not routed.
    place = torch.where(is_routed, place, N * block_size)
    token = torch.arange(T, dtype=torch.int32, device=place.device)[:, None].expand(T, E)
    token_position_to_id = torch.full((N * block_size + 1,), -1, dtype=torch.int32, device=place.device)
    token_position_to_id = token_position_to_id.scatter(0, place.flatten(), token.flatten())[:-1]
    if is_sharded:
        token_position_to_id = token_position_to_id.contiguous()
        dist.all_reduce(token_position_to_id, dist.ReduceOp.MAX, group=moe_group.device_group)

    block = torch.arange(N, device=place.device)
    block_to_expert = (last_block[:-1] <= block[:, None]).sum(1).to(torch.int32)
    conditions = (token_position_to_id.view(N, block_size) >= 0).any(1).to(torch.int32)
    if padding_mask is not None:
        expert_affinities = expert_affinities * padding_mask[:, None].to(expert_affinities.dtype)
    return expert_affinities.reshape(T * E, 1), token_position_to_id, block_to_expert, conditions


def _check_sizes(T: int, E: int, tp_degree: int) -> None:
    experts = E // tp_degree if tp_degree > 1 and E % tp_degree == 0 else E
    rules.fallback(experts % 2 != 0, OPERATOR, "the kernel needs an even number of experts", got=experts)
    chunk = min(T, 16384)
    length = min(PMAX, T // 16)
    fits = length >= 1 and T % chunk == 0 and chunk % PMAX == 0 and T % length == 0 and T // length % 16 == 0
    rules.fallback(not fits, OPERATOR, "the kernel needs a multiple of 128 tokens in equal chunks", got=T)
