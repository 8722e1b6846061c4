"""Routing of tokens to experts."""

from collections.abc import Callable
from enum import Enum

import torch

from vllm_neuron.functional._numerics import rms_norm_fp32
from vllm_neuron.simulator import rules


class RouterComputationOrder(Enum):
    """When the activation runs, and over what."""

    PRENORM_LINEAR_TOPK_ACT_SCATTER = "prenorm_linear_topk_act_scatter"
    PRENORM_LINEAR_ACT_TOPK_RENORM_SCATTER = "prenorm_linear_act_topk_renorm_scatter"
    PRENORM_LINEAR_TOPK_SCATTER_ACT = "prenorm_linear_topk_scatter_act"


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "sigmoid": torch.sigmoid,
}


@rules.operator
def router(
    hidden_states: torch.Tensor,
    router_weights: torch.Tensor,
    top_k: int,
    router_bias: torch.Tensor | None = None,
    activation: str | Callable[[torch.Tensor], torch.Tensor] = "softmax",
    return_logits: bool = False,
    gamma: torch.Tensor | None = None,
    eps: float = 1e-6,
    computation_dtype: torch.dtype = torch.float32,
    router_computation_order: RouterComputationOrder = RouterComputationOrder.PRENORM_LINEAR_TOPK_ACT_SCATTER,
    shard_on_tokens: bool | None = None,
    transposed_hidden_states: bool = False,
    x_sb_layout: object = None,
    use_column_tiling: bool | None = None,
    use_indirect_dma_scatter: bool | None = None,
    use_PE_broadcast_w_bias: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Affinity of each token to its top_k experts, zero elsewhere.

    The bias takes part in the selection and in the affinities; there is no bias for the selection alone.
    The arguments after `transposed_hidden_states` tune the kernel and change nothing.

    Args:
        hidden_states: [T, H], or [H, T] with `transposed_hidden_states`.
        router_weights: [H, E].
        router_bias: [E].
        activation: "softmax", "sigmoid", or a function over the last axis.
        gamma: [H], weight of an RMS norm (in float32) before the projection.
        computation_dtype: dtype of everything after.

    Returns:
        affinities [T, E] in `computation_dtype`, or (affinities, logits [T, E]) with `return_logits`.

    Raises:
        ValueError: a shape, top_k, dtype, order or activation that does not fit.
    """
    _check(
        hidden_states, router_weights, top_k, router_bias, gamma, computation_dtype, transposed_hidden_states
    )
    if not isinstance(router_computation_order, RouterComputationOrder):
        raise ValueError(
            f"router_computation_order must be a RouterComputationOrder, got {router_computation_order!r}"
        )
    act = _ACTIVATIONS.get(activation) if isinstance(activation, str) else activation
    if not callable(act):
        raise ValueError(
            f"activation must be one of {', '.join(_ACTIVATIONS)} or a function, got {activation!r}"
        )

    x = (hidden_states.T if transposed_hidden_states else hidden_states).to(computation_dtype)
    if gamma is not None:
        x = rms_norm_fp32(x, gamma, eps)
    logits = x @ router_weights.to(computation_dtype)
    if router_bias is not None:
        logits = logits + router_bias.to(computation_dtype)

    if router_computation_order is RouterComputationOrder.PRENORM_LINEAR_ACT_TOPK_RENORM_SCATTER:
        values, chosen = torch.topk(act(logits), top_k, dim=-1)
        affinities = _scatter(values / values.sum(-1, keepdim=True), chosen, logits, 0.0)
    elif router_computation_order is RouterComputationOrder.PRENORM_LINEAR_TOPK_SCATTER_ACT:
        values, chosen = torch.topk(logits, top_k, dim=-1)
        affinities = act(_scatter(values, chosen, logits, float("-inf")))
    else:
        values, chosen = torch.topk(logits, top_k, dim=-1)
        affinities = _scatter(act(values), chosen, logits, 0.0)
    return (affinities, logits) if return_logits else affinities


def _scatter(values: torch.Tensor, index: torch.Tensor, like: torch.Tensor, fill: float) -> torch.Tensor:
    return torch.full_like(like, fill).scatter(1, index, values)


def _check(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    dtype: torch.dtype,
    transposed: bool,
) -> None:
    if hidden.dim() != 2 or weights.dim() != 2:
        raise ValueError(
            f"hidden_states and router_weights must be 2-D, got {hidden.dim()}-D and {weights.dim()}-D"
        )
    H, E = weights.shape
    if hidden.shape[0 if transposed else 1] != H:
        raise ValueError(
            f"hidden_states {tuple(hidden.shape)} do not fit router_weights {tuple(weights.shape)}"
        )
    if bias is not None and not rules.shape_is(bias, (E,)):
        raise ValueError(f"router_bias shape must be ({E},), got {tuple(bias.shape)}")
    if gamma is not None and not rules.shape_is(gamma, (H,)):
        raise ValueError(f"gamma shape must be ({H},), got {tuple(gamma.shape)}")
    if not 1 <= top_k <= E:
        raise ValueError(f"top_k must be between 1 and {E}, got {top_k}")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"computation_dtype must be float32, float16 or bfloat16, got {dtype}")
