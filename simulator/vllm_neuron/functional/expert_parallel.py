"""Which experts a rank holds."""

import torch

from vllm_neuron.simulator import rules


def calculate_local_expert_indices(
    ep_rank: int | torch.Tensor, ep_degree: int, total_num_experts: int, device: torch.device | str
) -> torch.Tensor:
    """Consecutive global ids of the experts of partition `ep_rank`: int64 [total_num_experts / ep_degree]."""
    count = total_num_experts // ep_degree
    return torch.arange(count, dtype=torch.int64, device=device) + ep_rank * count


def validate_expert_parallelism_config(ep_degree: int, num_experts: int, world_size: int) -> None:
    """Check that experts and ranks divide evenly over the partitions.

    Raises:
        ValueError: they do not, or a number is not a positive integer.
    """
    for name, value in (("ep_degree", ep_degree), ("num_experts", num_experts)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if ep_degree > world_size:
        raise ValueError(f"ep_degree {ep_degree} exceeds the world size {world_size}")
    if world_size % ep_degree:
        raise ValueError(f"the world size {world_size} must be a multiple of ep_degree {ep_degree}")
    if num_experts % ep_degree:
        raise ValueError(f"num_experts {num_experts} must be a multiple of ep_degree {ep_degree}")


@rules.operator
def get_local_expert_affinities(
    expert_affinities: torch.Tensor, local_expert_indices: torch.Tensor
) -> torch.Tensor:
    """Columns of [T, E] at [E_local] -> [T, E_local].

    Raises:
        ValueError: the affinities are not 2-D, or there are no indices.
    """
    if expert_affinities.dim() != 2:
        raise ValueError(f"expert_affinities must be [T, E], got {tuple(expert_affinities.shape)}")
    if local_expert_indices.numel() == 0:
        raise ValueError("local_expert_indices is empty")
    return expert_affinities.index_select(1, local_expert_indices)
