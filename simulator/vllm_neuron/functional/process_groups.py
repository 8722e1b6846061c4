"""Groups of ranks that span rows and columns of a mesh."""

from typing import Any

import torch
import torch.distributed as dist


def get_group_slice_indices(
    num_items: int, world_size: int, process_group: Any, device: torch.device | str
) -> torch.Tensor:
    """Items that the ranks of a group hold when each rank of the world holds `num_items // world_size`.

    Returns:
        int64 indices, rank by rank in the group's order.
    """
    share = num_items // world_size
    ranks = torch.tensor(dist.get_process_group_ranks(process_group), dtype=torch.int64, device=device)
    return (ranks[:, None] * share + torch.arange(share, device=device)).flatten()


def create_row_col_groups(row_size: int, col_size: int, rank: int) -> tuple[Any, Any]:
    """This rank's (row, column) process groups in a mesh of `col_size` rows of `row_size` ranks.

    All ranks call it together. Rows are consecutive ranks, or Trainium 2's topology for 8 x 8.
    """
    from vllm_neuron.parallel.neuron_parallel_state import expert_mesh

    rows = expert_mesh(row_size * col_size, col_size)
    columns = [list(column) for column in zip(*rows, strict=True)]
    mine = [None, None]
    for kind, mesh in enumerate((rows, columns)):
        for ranks in mesh:
            group = dist.new_group(ranks)
            if rank in ranks:
                mine[kind] = group
    return mine[0], mine[1]
