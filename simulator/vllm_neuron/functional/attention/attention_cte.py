"""Prefill attention in one step, over the K and V of the prompt at hand."""

import torch

from vllm_neuron.functional._numerics import PMAX, not_supported
from vllm_neuron.simulator import rules

OPERATOR = "flash_attention"

# Limits of the kernel.
MAX_BATCH = 512
MAX_SEQ = 131072


@rules.operator
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal_mask: bool = True,
    sink: torch.Tensor | None = None,
    sliding_window: int | None = None,
    tp_q: bool = True,
    tp_k: bool = False,
    tp_out: bool = False,
    cp_offset: torch.Tensor | None = None,
    global_cp_deg: int | None = None,
    cp_strided_q_slicing: bool = False,
    k_prior: torch.Tensor | None = None,
    v_prior: torch.Tensor | None = None,
    prior_used_len: torch.Tensor | None = None,
    bound_min: torch.Tensor | None = None,
    bound_max: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with the heads folded into the batch axis; query row i uses KV row i // (Bq / Bkv).

    Scores are in the input's dtype, masked with its smallest finite value; the softmax is in float32 and the
    weights go back to the input's dtype before they meet V.

    Args:
        q: [Bq, Sq, D], or [Bq, D, Sq] without `tp_q`.
        k: [Bkv, D, Sk], or [Bkv, Sk, D] with `tp_k`.
        v: [Bkv, Sk, D].
        scale: 1 / sqrt(D) when None.
        sink: [Bq, 1], one more unscaled logit per row that has no value.
        sliding_window: number of most recent keys that a query sees, itself included; None or 0 is all.
        k_prior, v_prior: K and V before k and v, in their layouts; only the first `prior_used_len` positions
            count.
        prior_used_len: [1], one length for the whole batch.
        bound_min, bound_max: [Bq, Sq, 1], a query sees keys in bound_min <= position < bound_max.

    Returns:
        [Bq, Sq, D], or [Bq, D, Sq] with `tp_out`, in the dtype of q.

    Raises:
        AssertionError: a combination or size that the kernel asserts.
        NotImplementedError: context parallelism.
    """
    not_supported(
        OPERATOR,
        cp_offset=cp_offset,
        global_cp_deg=global_cp_deg if global_cp_deg != 1 else None,
        cp_strided_q_slicing=cp_strided_q_slicing,
    )
    if (bound_min is None) != (bound_max is None):
        raise AssertionError("bound_min and bound_max must be given together")
    q = q if tp_q else q.transpose(1, 2)
    k = k.transpose(1, 2) if tp_k else k  # [Bkv, D, Sk]
    Bq, Sq, _ = q.shape
    Bkv, Sk = v.shape[0], v.shape[1]
    window = sliding_window or 0
    has_prior = k_prior is not None or v_prior is not None or prior_used_len is not None
    _check(Bq, Bkv, max(Sq, Sk), v.shape[2], window, causal_mask, has_prior, bound_min is not None)
    rules.require(
        v.shape[2] > PMAX or q.shape[2] <= PMAX,
        OPERATOR,
        "head-dim",
        f"head_dim of q and k must be at most {PMAX}, as that of v is",
        got=q.shape[2],
    )

    key_position = torch.arange(Sk, device=q.device)
    query_position = torch.arange(Sq, device=q.device)
    visible: torch.Tensor | None = None
    if has_prior:
        if k_prior is None or v_prior is None or prior_used_len is None:
            raise AssertionError("k_prior, v_prior and prior_used_len must be given together")
        rules.require(
            rules.shape_is(prior_used_len, (1,)),
            OPERATOR,
            "prior-length",
            "prior_used_len shape must be (1,): one prefix length for the whole batch",
            got=prior_used_len.shape,
        )
        used = prior_used_len.flatten()[0]
        k = torch.cat([k_prior.transpose(1, 2) if tp_k else k_prior, k], dim=2)
        v = torch.cat([v_prior, v], dim=1)
        prior_position = torch.arange(v_prior.shape[1], device=q.device)
        visible = torch.cat([prior_position < used, torch.ones_like(key_position, dtype=torch.bool)])[None]
        key_position = torch.cat([prior_position, key_position + used])
        query_position = query_position + used
    if causal_mask:
        distance = query_position[:, None] - key_position
        band = (distance >= 0) & (distance < window) if window else distance >= 0
        visible = band if visible is None else band & visible
    if bound_min is not None and bound_max is not None:
        bounds = (key_position >= bound_min) & (key_position < bound_max)
        visible = bounds if visible is None else bounds & visible

    if Bkv < Bq:
        k = k.repeat_interleave(Bq // Bkv, dim=0)
        v = v.repeat_interleave(Bq // Bkv, dim=0)
    scores = (q @ k) * (scale if scale is not None else v.shape[2] ** -0.5)
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype).view(Bq, 1, 1).expand(-1, Sq, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype).nan_to_num(nan=0.0)
    output = weights[..., : v.shape[1]] @ v
    return output.transpose(1, 2) if tp_out else output


def _check(
    Bq: int, Bkv: int, S: int, D: int, window: int, causal: bool, has_prior: bool, has_bounds: bool
) -> None:
    rules.fallback(Bq > MAX_BATCH, OPERATOR, f"more than {MAX_BATCH} query heads", got=Bq)
    rules.fallback(S > MAX_SEQ, OPERATOR, f"sequence above {MAX_SEQ}", got=S)
    rules.fallback(D > PMAX, OPERATOR, f"head_dim above {PMAX}", got=D)
    rules.require(
        Bq % Bkv == 0, OPERATOR, "gqa", "The query batch must be a multiple of the KV batch", got=(Bq, Bkv)
    )
    rules.require(
        0 <= window <= MAX_SEQ,
        OPERATOR,
        "window-range",
        f"sliding_window must be between 0 and {MAX_SEQ}",
        got=window,
    )
    rules.require(window == 0 or causal, OPERATOR, "window-causal", "sliding_window needs causal_mask")
    rules.require(
        not (has_bounds and has_prior), OPERATOR, "bounds-prior", "bounds do not go with a prior KV"
    )
