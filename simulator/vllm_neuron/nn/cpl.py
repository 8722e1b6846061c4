"""Linear layer with its output features split over the ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor

from vllm_neuron.nn.sharding import resolve_group, take_shard
from vllm_neuron.utils.weight_loader import set_weight_loader, sharding_weight_loader


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b``, each rank holding ``out_features / tp_size`` rows of W and b.

    Args:
        gather_output: All-gather the output on dimension 1, so only for activations [T, in_features].

    Parameters are `weight` [out/tp, in] and `bias` [out/tp] or None.

    Raises:
        AssertionError: `out_features` does not divide by the group size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.tp_group, self.tp_size, self.tp_rank = resolve_group(tp_group)
        assert out_features % self.tp_size == 0, (
            f"out_features ({out_features}) must be divisible by tp_size ({self.tp_size})"
        )
        self.in_features = in_features
        self.out_features = out_features
        self.out_features_per_rank = out_features // self.tp_size
        self.gather_output = gather_output

        loader = sharding_weight_loader(0, self.out_features_per_rank, self.tp_size)
        self.weight = nn.Parameter(
            torch.empty(self.out_features_per_rank, in_features, device=device, dtype=dtype)
        )
        set_weight_loader(self.weight, loader)
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features_per_rank, device=device, dtype=dtype))
            set_weight_loader(self.bias, loader)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out/tp], or [T, out] with `gather_output`."""
        local = F.linear(x, self.weight, self.bias)
        if self.gather_output and self.tp_size > 1:
            return all_gather_tensor(local, 1, self.tp_group)
        return local

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        take_shard(state_dict, prefix + "weight", self.weight, 0, self.tp_rank)
        if self.bias is not None:
            take_shard(state_dict, prefix + "bias", self.bias, 0, self.tp_rank)
        super()._load_from_state_dict(state_dict, prefix, *args)
