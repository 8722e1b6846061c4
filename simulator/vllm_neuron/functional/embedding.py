"""Row lookup."""

import torch
import torch.nn.functional as F

from vllm_neuron.simulator import rules


@rules.operator
def embedding(ids: torch.Tensor, weight: torch.Tensor, /) -> torch.Tensor:
    """Rows of `weight` [V, D] at integer `ids` [T] -> [T, D]. Ids must lie inside the shard."""
    return F.embedding(ids, weight)
