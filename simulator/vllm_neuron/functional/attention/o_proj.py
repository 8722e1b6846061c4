"""Output projection of attention."""

import torch
from nkilib.core.utils.common_types import QuantizationType

from vllm_neuron.functional._numerics import PMAX
from vllm_neuron.simulator import rules

OPERATOR = "o_proj"

# Limits of the kernel.
MAX_HIDDEN = 16384 + 4321
MAX_TOKENS = 131072
MAX_HEADS = 17


@rules.operator
def o_proj(
    active: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    input_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Project N heads of size D to the hidden size H, in the input's dtype. No all-reduce.

    Args:
        active: [B, N, D, S] or [B, S, N * D].
        weight: [N * D, H].
        bias: [1, H], added on every rank.

    Returns:
        [B, S, H].

    Raises:
        AssertionError: quantization arguments, or a bias that is not [1, H].
        ValueError: `active` has neither 3 nor 4 dimensions.
    """
    if (
        quantization_type is not QuantizationType.NONE
        or input_scales is not None
        or weight_scales is not None
    ):
        raise AssertionError("o_proj: quantization_type, input_scales and weight_scales need the device")
    if active.dim() not in (3, 4):
        raise ValueError(f"active must have 3 or 4 dimensions, got {active.dim()}")
    rules.require_row(bias, weight.shape[1], OPERATOR, "bias", "Bias shape must be [1, H]")
    if active.dim() == 4:
        _, heads, head_dim, _ = active.shape
        active = active.permute(0, 3, 1, 2).flatten(2)
    else:
        head_dim = _largest_divisor(active.shape[2], PMAX)
        heads = active.shape[2] // head_dim
    H = weight.shape[1]
    rules.fallback(H > MAX_HIDDEN, OPERATOR, f"hidden size above {MAX_HIDDEN}", got=H)
    rules.fallback(H % 2 != 0, OPERATOR, "hidden size must be even", got=H)
    rules.fallback(heads > MAX_HEADS, OPERATOR, f"more than {MAX_HEADS} heads on a rank", got=heads)
    rules.fallback(head_dim > PMAX, OPERATOR, f"head_dim above {PMAX}", got=head_dim)
    tokens = active.shape[0] * active.shape[1]
    rules.fallback(tokens > MAX_TOKENS, OPERATOR, f"more than {MAX_TOKENS} tokens", got=tokens)
    output = active @ weight
    return output if bias is None else output + bias


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)
