"""All-to-all, which Trainium 2 and gloo both do by gathering everything."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

from vllm_neuron.simulator import rules


@rules.operator
def all_to_all(tensor: torch.Tensor, split_dim: int, concat_dim: int, group: Any = None) -> torch.Tensor:
    """Cut `tensor` into one part per rank along `split_dim` and join the parts received along `concat_dim`.

    Args:
        group: torch process group, the world when None.

    Raises:
        ValueError: `split_dim` does not divide by the group's size.
    """
    group = dist.group.WORLD if group is None else group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    split_dim, concat_dim = split_dim % tensor.dim(), concat_dim % tensor.dim()
    if tensor.shape[split_dim] % size:
        raise ValueError(f"axis {split_dim} of {tuple(tensor.shape)} must divide by the group size {size}")
    if size == 1:
        return tensor
    gathered = all_gather_tensor(tensor.contiguous().unsqueeze(0), 0, group)  # [size, ...]
    mine = gathered.chunk(size, dim=split_dim + 1)[rank]
    return torch.cat(mine.unbind(0), dim=concat_dim)
