"""What the parallel modules share: their place in the group, and slicing of full weights in a state dict."""

import torch
import torch.distributed as dist

from vllm_neuron.utils.weight_loader import pad_to_shape


def resolve_group(
    tp_group: dist.ProcessGroup | None,
) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return (group, size, rank): the given group, else the world; (None, 1, 0) without torch.distributed."""
    if not dist.is_initialized():
        return None, 1, 0
    group = tp_group if tp_group is not None else dist.group.WORLD
    return group, dist.get_world_size(group), dist.get_rank(group)


def take_shard(
    state_dict: dict[str, torch.Tensor], key: str, param: torch.Tensor, dim: int, rank: int
) -> None:
    """Replace a full tensor in the state dict by this rank's shard, zero-padded to the parameter's shape.

    A tensor of the parameter's own shape is taken to be a shard already.
    """
    full = state_dict.get(key)
    if full is None or full.shape == param.shape:
        return
    size = param.shape[dim]
    start = min(rank * size, full.shape[dim])
    shard = full.narrow(dim, start, min(size, full.shape[dim] - start))
    shape = list(full.shape)
    shape[dim] = size
    state_dict[key] = pad_to_shape(shard, shape)
