"""What the MoE operators share."""

from dataclasses import dataclass

import torch
from nkilib.core.utils.common_types import ActFnType

from vllm_neuron.functional._numerics import expert_activation
from vllm_neuron.simulator import rules


@dataclass(frozen=True)
class Clamps:
    """Limits of the gate and up projections, bias included; None is unlimited."""

    gate_upper: float | None
    gate_lower: float | None
    up_upper: float | None
    up_lower: float | None

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return _clamp(x, self.gate_lower, self.gate_upper)

    def up(self, x: torch.Tensor) -> torch.Tensor:
        return _clamp(x, self.up_lower, self.up_upper)


def _clamp(x: torch.Tensor, lower: float | None, upper: float | None) -> torch.Tensor:
    return x if lower is None and upper is None else x.clamp(lower, upper)


def gated(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    clamps: Clamps,
    act_fn: ActFnType,
) -> torch.Tensor:
    """act(gate) * up of every expert, in the dtype of `x`.

    Args:
        x: [T, H], the same for all experts, or [E, T, H].
        gate_up_weight: [E, H, 2, I], gate before up.
        gate_up_bias: [E, 2, I].

    Returns:
        [E, T, I].
    """
    gate_up = (x @ gate_up_weight.flatten(2).to(x.dtype)).unflatten(2, (2, -1))  # [E, T, 2, I]
    if gate_up_bias is not None:
        gate_up = gate_up + gate_up_bias.to(x.dtype).unsqueeze(1)
    gate, up = gate_up.unbind(2)
    return expert_activation(clamps.gate(gate), act_fn) * clamps.up(up)


def down(inner: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """inner [E, T, I] @ weight [E, I, H] + bias [E, H] or [E, 1, H] -> [E, T, H]."""
    output = inner @ weight.to(inner.dtype)
    if bias is None:
        return output
    return output + bias.to(inner.dtype).reshape(bias.shape[0], 1, -1)


def local_slice(
    affinities: torch.Tensor, num_local: int, rank_id: torch.Tensor | None, operator: str
) -> torch.Tensor:
    """Columns [num_local * rank, num_local * (rank + 1)) of [T, E]; all of them when all experts are local.

    Raises:
        ValueError: experts are elsewhere and rank_id is missing.
    """
    if affinities.shape[1] == num_local:
        return affinities
    if rank_id is None:
        raise ValueError(
            f"{operator}: {num_local} of {affinities.shape[1]} experts are local; rank_id is missing"
        )
    first = rank_id.flatten()[:1].to(torch.int64) * num_local
    return affinities.index_select(1, first + torch.arange(num_local, device=affinities.device))


def require_expert_shapes(
    operator: str,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    """Shapes that the kernels assert: [E, H, 2, I], [E, I, H], [E, 2, I] and [E, H].

    The down bias may also be [E, 1, H], the only form that the prefill experts of the plugin's CPU mode take.
    """
    E, H, two, inner = gate_up_weight.shape
    rules.require(
        two == 2 and rules.shape_is(down_weight, (E, inner, H)),
        operator,
        "expert-shapes",
        "expert weights must be [E, H, 2, I] and [E, I, H]",
        got=(*gate_up_weight.shape, *down_weight.shape),
    )
    if gate_up_bias is not None:
        rules.require(
            rules.shape_is(gate_up_bias, (E, 2, inner)),
            operator,
            "gate-up-bias",
            "gate and up bias shape must be [E, 2, I]",
            got=gate_up_bias.shape,
        )
    if down_bias is not None:
        rules.require(
            rules.shape_is(down_bias, (E, H)) or rules.shape_is(down_bias, (E, 1, H)),
            operator,
            "down-bias",
            "down bias shape must be [E, H]",
            got=down_bias.shape,
        )
