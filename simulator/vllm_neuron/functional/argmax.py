"""Argmax over an axis that may be sharded."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

from vllm_neuron.functional._numerics import PMAX
from vllm_neuron.simulator import rules

OPERATOR = "argmax"


@rules.operator
def argmax(
    tensor: torch.Tensor, dim: int, gather_dim: int, keepdim: bool = False, process_group: Any = None
) -> torch.Tensor:
    """Index of the largest value along `dim`, over all ranks of a torch process group.

    Ranks are joined along `gather_dim`; when that is `dim`, indices are global.

    Raises:
        ValueError: no process group.
    """
    if process_group is None:
        raise ValueError("argmax needs process_group")
    dim, gather_dim = dim % tensor.dim(), gather_dim % tensor.dim()
    rules.fallback(
        dim != tensor.dim() - 1 or tensor.dim() > 3 or (tensor.dim() == 3 and tensor.shape[0] != 1),
        OPERATOR,
        "the kernel takes the last axis of a 2-D tensor",
    )
    rules.fallback(
        tensor.shape[dim] < PMAX, OPERATOR, f"the kernel needs at least {PMAX} columns", got=tensor.shape[dim]
    )
    if dist.get_world_size(process_group) == 1:
        return torch.argmax(tensor, dim=dim, keepdim=keepdim)
    values, indices = tensor.float().max(dim=dim, keepdim=True)
    if gather_dim != dim:
        indices = all_gather_tensor(indices, gather_dim, process_group)
        return indices if keepdim else indices.squeeze(dim)
    values = all_gather_tensor(values, dim, process_group)
    indices = all_gather_tensor(indices, dim, process_group)
    offsets = torch.arange(values.shape[dim], device=tensor.device) * tensor.shape[dim]
    indices = indices + offsets.view([-1 if axis == dim else 1 for axis in range(tensor.dim())])
    best = indices.gather(dim, values.argmax(dim=dim, keepdim=True))
    return best if keepdim else best.squeeze(dim)
