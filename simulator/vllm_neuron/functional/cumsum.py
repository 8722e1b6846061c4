"""Cumulative sum."""

import torch

from vllm_neuron.simulator import rules


@rules.operator
def cumsum(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Inclusive sums over the last axis of a 2-D tensor, as a product with a triangle in its dtype.

    Raises:
        ValueError: not 2-D, or another axis.
    """
    if tensor.dim() != 2 or dim not in (-1, 1):
        raise ValueError(f"cumsum takes the last axis of a 2-D tensor, got {tensor.dim()}-D and dim {dim}")
    size = tensor.shape[1]
    return tensor @ torch.ones(size, size, dtype=tensor.dtype, device=tensor.device).triu()
