"""Top-k over an axis that may be sharded."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

from vllm_neuron.simulator import rules

OPERATOR = "topk"


@rules.operator
def topk(
    tensor: torch.Tensor,
    k: int,
    dim: int,
    gather_dim: int,
    process_group: Any = None,
    rank: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) of the k largest along `dim`, sorted, over all ranks of a torch process group.

    Without a group, or with a group of one, this is `torch.topk`. Otherwise values are float32, ranks are
    joined along `gather_dim`, and when that is `dim` indices are global, from this rank's number `rank`.

    Raises:
        ValueError: `rank` is missing.
    """
    dim, gather_dim = dim % tensor.dim(), gather_dim % tensor.dim()
    shard = tensor.shape[dim]
    rules.fallback(dim != tensor.dim() - 1 or tensor.dim() < 2, OPERATOR, "the kernel takes the last axis")
    rules.fallback(not 0 < k < shard, OPERATOR, "the kernel needs 0 < k < size", got=(k, shard))
    rules.fallback(
        tensor.dtype not in (torch.bfloat16, torch.float32),
        OPERATOR,
        "the kernel takes bf16 and fp32",
        got=tensor.dtype,
    )
    if process_group is None or dist.get_world_size(process_group) == 1:
        return torch.topk(tensor, k, dim=dim)
    values, indices = torch.topk(tensor.float(), min(k, shard), dim=dim)
    if gather_dim == dim:
        if rank is None:
            raise ValueError("topk needs rank to make indices global")
        indices = indices + rank.flatten()[0].to(indices.dtype) * shard
    values = all_gather_tensor(values.contiguous(), gather_dim, process_group)
    indices = all_gather_tensor(indices.contiguous(), gather_dim, process_group)
    values, best = torch.topk(values, k, dim=dim)
    return values, indices.gather(dim, best)
