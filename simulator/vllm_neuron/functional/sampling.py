"""On-device sampling."""

from typing import Any

import torch

from vllm_neuron.functional._numerics import not_supported
from vllm_neuron.functional.argmax import argmax
from vllm_neuron.functional.cumsum import cumsum
from vllm_neuron.functional.topk import topk
from vllm_neuron.simulator import rules

OPERATOR = "sample"

# Below this temperature a row is greedy.
MIN_TEMPERATURE = 1e-5
# What the kernel writes over logits outside the top k.
MASKED_LOGIT = -3000.0


@rules.operator
def sample(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = -1,
    top_p: float | torch.Tensor = 1.0,
    deterministic: bool = False,
    all_greedy: bool = False,
    tp_group: Any = None,
    max_top_k: int = 256,
    all2all_group: Any = None,
    gather_group: Any = None,
    tp_rank: torch.Tensor | None = None,
    capture_topk: bool = False,
) -> torch.Tensor:
    """Draw one token per row.

    Only the `max_top_k` best tokens are ever drawn. Tokens that tie with the k-th best survive `top_k`; the
    token that crosses `top_p` is dropped, the best one never. Greedy rows take the largest logit, the lowest
    id on a tie.

    Args:
        logits: [B, V], or this rank's shard [B, V / TP] when the torch process group `tp_group` is given.
        temperature, top_p: number or [B]; a temperature below 1e-5 is greedy.
        top_k: integer or [B]; 0 and below is off.
        deterministic: draw with 0.5 instead of a random number.
        all_greedy: argmax for every row, the other parameters are not read.
        tp_rank: this rank's number in `tp_group`.

    Returns:
        int32 [B], ids in the whole vocabulary.

    Raises:
        NotImplementedError: sampling data parallelism, captured top k.
    """
    not_supported(OPERATOR, all2all_group=all2all_group, gather_group=gather_group, capture_topk=capture_topk)
    if tp_group is None:
        greedy = torch.argmax(logits, dim=1)
    else:
        greedy = argmax(logits, dim=1, gather_dim=1, process_group=tp_group)
    greedy = greedy.to(torch.int32)
    if all_greedy:
        return greedy

    values, indices = topk(
        logits, min(max_top_k, logits.shape[1]), dim=1, gather_dim=1, process_group=tp_group, rank=tp_rank
    )
    rows = logits.shape[0]
    kept = _column(top_k, rows, values).to(torch.int64)
    heat = _column(temperature, rows, values)
    probs = _top_p(_probabilities(values, kept, heat), _column(top_p, rows, values))

    cdf = cumsum(probs)
    cdf = cdf / cdf[:, -1:]
    cdf[:, -1] = 1.0
    draw = torch.full_like(cdf[:, :1], 0.5) if deterministic else torch.rand(rows, 1, device=cdf.device)
    drawn = indices.gather(1, (draw > cdf).sum(dim=1, keepdim=True)).squeeze(1).to(torch.int32)
    return torch.where(heat.squeeze(1) < MIN_TEMPERATURE, greedy, drawn)


def _column(parameter: float | torch.Tensor, rows: int, like: torch.Tensor) -> torch.Tensor:
    """Sampling parameter as float32 [rows, 1]."""
    column = torch.as_tensor(parameter, dtype=torch.float32, device=like.device)
    return column.reshape(-1, 1).expand(rows, 1)


def _probabilities(values: torch.Tensor, top_k: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Softmax over the top k of `values` [B, n], which are sorted; in their dtype."""
    last_kept = values.gather(1, top_k.clamp(1, values.shape[1]) - 1)
    values = values.masked_fill((values < last_kept) & (top_k > 0), MASKED_LOGIT)
    divisor = torch.where(temperature < MIN_TEMPERATURE, torch.ones_like(temperature), temperature)
    values = values / divisor.to(values.dtype)
    weights = torch.exp(values - values.amax(dim=1, keepdim=True))
    return weights / weights.sum(dim=1, keepdim=True)


def _top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Drop sorted tokens from the one on whose cumulative probability exceeds top_p, but never the first."""
    # At 1 the sum may exceed top_p by rounding alone.
    beyond = (cumsum(probs) > top_p.to(probs.dtype)) & (top_p < 1.0)
    first = torch.arange(probs.shape[1], device=probs.device) == 0
    probs = probs.masked_fill(beyond & ~first, 0.0)
    return probs / probs.sum(dim=1, keepdim=True)
