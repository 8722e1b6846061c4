"""Arithmetic that several operators share."""

import torch
import torch.nn.functional as F
from nkilib.core.utils.common_types import ActFnType, QuantizationType

PMAX = 128
"""Partitions of the on-chip memory, the tile height of every kernel."""


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor | None, eps: float, size: int | None = None
) -> torch.Tensor:
    """RMS norm over the last axis in the dtype of `x`; `size` divides the sum when `x` is zero-padded."""
    mean_square = x.square().sum(-1, keepdim=True) / (size or x.shape[-1])
    normed = x * torch.rsqrt(mean_square + eps)
    return normed if gamma is None else normed * gamma


def rms_norm_fp32(
    x: torch.Tensor, gamma: torch.Tensor | None, eps: float, size: int | None = None
) -> torch.Tensor:
    """RMS norm over the last axis in float32, gamma included; returned in the dtype of `x`."""
    gamma = None if gamma is None else gamma.float()
    return rms_norm(x.float(), gamma, eps, size).to(x.dtype)


def layer_norm(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Layer norm over the last axis with the biased variance, in the dtype of `x`."""
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if gamma is not None:
        normed = normed * gamma
    return normed if beta is None else normed + beta


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE over the last axis D, dimension i paired with i + D/2; `cos` and `sin` broadcast to `x`."""
    x1, x2 = x.chunk(2, dim=-1)
    cos1, cos2 = cos.chunk(2, dim=-1)
    sin1, sin2 = sin.chunk(2, dim=-1)
    return torch.cat([x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2], dim=-1)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE over the last axis D, dimension 2i paired with 2i + 1; `cos` and `sin` end in D/2."""
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2)


def activation(x: torch.Tensor, act_fn: ActFnType) -> torch.Tensor:
    """Activations of the dense MLP, where Swish is silu.

    Raises:
        ValueError: unknown activation.
    """
    if act_fn in (ActFnType.SiLU, ActFnType.Swish):
        return F.silu(x)
    if act_fn is ActFnType.GELU:
        return F.gelu(x)
    if act_fn is ActFnType.GELU_Tanh_Approx:
        return F.gelu(x, approximate="tanh")
    raise ValueError(f"Unsupported activation function: {act_fn}")


def expert_activation(x: torch.Tensor, act_fn: ActFnType) -> torch.Tensor:
    """Activations of the experts, where Swish is x * sigmoid(1.702 x).

    Raises:
        ValueError: unknown activation.
    """
    if act_fn is ActFnType.SiLU:
        return F.silu(x)
    if act_fn is ActFnType.GELU:
        return F.gelu(x)
    if act_fn is ActFnType.Swish:
        return x * torch.sigmoid(1.702 * x)
    raise ValueError(f"Unsupported activation function: {act_fn}")


def not_supported(operator: str, **arguments: object) -> None:
    """Refuse arguments that the simulator does not implement, unless they are at their neutral value.

    Raises:
        NotImplementedError: names the first argument that is set.
    """
    for name, value in arguments.items():
        if value is not None and value is not False and value is not QuantizationType.NONE:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(f"{operator}: the simulator does not implement {name} (got {shown})")
