"""Linear layer with its input features split over the ranks."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from vllm_neuron.nn.sharding import resolve_group, take_shard
from vllm_neuron.utils.weight_loader import set_weight_loader, sharding_weight_loader


class RowParallelLinear(nn.Module):
    """``y = x W^T + b``, each rank holding ``in_features / tp_size`` columns of W; the output is all-reduced.

    Args:
        input_is_parallel: The input is this rank's features already; otherwise it is cut (with a warning).

    Parameters are `weight` [out, in/tp] and `bias` [out] or None; the bias is added after the reduction.

    Raises:
        AssertionError: `in_features` does not divide by the group size.
        NotImplementedError: A bias that is not float32 (also with ``dtype=None``) and more than one rank.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.tp_group, self.tp_size, self.tp_rank = resolve_group(tp_group)
        assert in_features % self.tp_size == 0, (
            f"in_features ({in_features}) must be divisible by tp_size ({self.tp_size})"
        )
        if bias and self.tp_size > 1 and dtype != torch.float32:
            raise NotImplementedError(
                f"bias of a RowParallelLinear must be float32 when tp_size > 1, got {dtype}"
            )
        if not input_is_parallel:
            warnings.warn("input_is_parallel=False: every rank cuts its part out of the input", stacklevel=2)
        self.in_features = in_features
        self.out_features = out_features
        self.in_features_per_rank = in_features // self.tp_size
        self.input_is_parallel = input_is_parallel

        self.weight = nn.Parameter(
            torch.empty(out_features, self.in_features_per_rank, device=device, dtype=dtype)
        )
        set_weight_loader(self.weight, sharding_weight_loader(1, self.in_features_per_rank, self.tp_size))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out], the sum over the ranks."""
        if self.tp_size == 1:
            return F.linear(x, self.weight, self.bias)
        if not self.input_is_parallel:
            x = x.chunk(self.tp_size, dim=-1)[self.tp_rank]
        y = F.linear(x, self.weight)
        dist.all_reduce(y, group=self.tp_group)
        return y if self.bias is None else y + self.bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        take_shard(state_dict, prefix + "weight", self.weight, 1, self.tp_rank)
        super()._load_from_state_dict(state_dict, prefix, *args)
