"""Sort order without a promise for ties."""

import torch

from vllm_neuron.simulator import rules


@rules.operator
def argsort_unstable(data: torch.Tensor, descending: bool = False) -> torch.Tensor:
    """int32 indices that sort `data` ([N] or [1, N], compared as float32).

    Raises:
        AssertionError: more than two axes.
    """
    if data.dim() not in (1, 2):
        raise AssertionError(f"argsort_unstable takes [N] or [1, N], got {tuple(data.shape)}")
    rules.fallback(
        data.dtype not in (torch.float32, torch.int32),
        "argsort_unstable",
        "the kernel sorts float32 and int32",
        got=data.dtype,
    )
    return torch.argsort(data.float(), dim=-1, descending=descending, stable=True).to(torch.int32)
