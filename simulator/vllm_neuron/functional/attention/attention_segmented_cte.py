"""Prefill attention of one segment over the paged cache ("chunked prefill")."""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from vllm_neuron.functional._numerics import PMAX
from vllm_neuron.functional.attention._cache import gather_blocks, unpack_keys
from vllm_neuron.simulator import rules
from vllm_neuron.utils.bucket_utils import SUPPORTED_KV_SEGMENT_SIZES
from vllm_neuron.utils.neuron_utils import values_are_readable

OPERATOR = "segmented_attention"

_SEGMENT_SIZES = f"kv_segment_size must be one of {sorted(SUPPORTED_KV_SEGMENT_SIZES)}"


@rules.operator
def segmented_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    prior_tokens: torch.Tensor,
    block_size: int,
    kv_segment_size: int,
    scale: float | None = None,
    tp_q: bool = True,
    tp_out: bool = False,
    sliding_window: int | None = None,
    sink: torch.Tensor | None = None,
    fp8_packed: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence's segment; K and V, the segment's too, are read from the cache.

    All of it is in float32. `k_scale` and `v_scale` are not applied: the caller folds them into `scale` and
    into the output projection.

    Args:
        q: [heads, Sq, D], or [heads, D, Sq] without `tp_q`.
        k_cache, v_cache: [num_blocks, kv_heads, block_size, D].
        block_tables: [B, blocks per sequence], only row 0 is read; entries below 0 are not in use.
        prior_tokens: [B, 1], tokens in the cache before this segment, a multiple of block_size.
        kv_segment_size: tokens per segment.
        scale: 1 / sqrt(D) when None.
        sliding_window: number of most recent keys that a query sees, itself included; None or 0 is all.
        sink: [heads, 1], one more unscaled logit per head that has no value.
        fp8_packed: k_cache is [num_blocks, kv_heads, block_size // 2, D, 2].

    Returns:
        [heads, Sq, D], or [heads, D, Sq] with `tp_out`, in the dtype of q.

    Raises:
        ValueError: a size that the device refuses.
    """
    q = q if tp_q else q.transpose(1, 2)
    heads, Sq, D = q.shape
    window = sliding_window or 0
    _check(Sq, D, block_size, kv_segment_size, window)
    if values_are_readable(prior_tokens):
        rules.require(
            int(prior_tokens.flatten()[0]) % block_size == 0,
            OPERATOR,
            "prior-blocks",
            "prior_tokens must be a multiple of block_size",
            ValueError,
            got=(int(prior_tokens.flatten()[0]), block_size),
        )

    keys = gather_blocks(unpack_keys(k_cache) if fp8_packed else k_cache, block_tables[:1])[0].float()
    values = gather_blocks(v_cache, block_tables[:1])[0].float()  # [kv_heads, S_ctx, D]
    kv_heads, S_ctx = keys.shape[0], keys.shape[1]
    prior = prior_tokens.flatten()[0]
    key_position = torch.arange(S_ctx, device=q.device)
    query_position = torch.arange(Sq, device=q.device)[:, None] + prior
    visible = key_position <= query_position
    if window:
        visible = visible & (key_position > query_position - window)

    mask = visible
    if sink is not None:
        # One more key, with the sink as its logit and no value.
        bias = torch.zeros(Sq, S_ctx, device=q.device).masked_fill(~visible, float("-inf"))
        column = sink.float().view(heads, 1, 1).expand(-1, Sq, -1)
        mask = torch.cat([bias.expand(heads, -1, -1), column], dim=-1)
        keys, values = (pad(rows, (0, 0, 0, 1)) for rows in (keys, values))
    group = heads // kv_heads
    output = scaled_dot_product_attention(
        q.float()[None],
        keys.repeat_interleave(group, dim=0)[None],
        values.repeat_interleave(group, dim=0)[None],
        attn_mask=mask,
        scale=scale,
    )[0].to(q.dtype)
    return output.transpose(1, 2) if tp_out else output


def _check(Sq: int, D: int, block_size: int, segment: int, window: int) -> None:
    rules.require(D <= PMAX, OPERATOR, "head-dim", f"head_dim must be at most {PMAX}", ValueError, got=D)
    rules.require(
        segment in SUPPORTED_KV_SEGMENT_SIZES,
        OPERATOR,
        "segment-size",
        _SEGMENT_SIZES,
        ValueError,
        got=segment,
    )
    rules.require(
        segment % block_size == 0,
        OPERATOR,
        "segment-blocks",
        "kv_segment_size must be a multiple of block_size",
        ValueError,
        got=(segment, block_size),
    )
    rules.require(
        window % block_size == 0,
        OPERATOR,
        "window-blocks",
        "sliding_window must be a multiple of block_size",
        ValueError,
        got=(window, block_size),
    )
    rules.require(
        segment == Sq,
        OPERATOR,
        "segment-length",
        "The query length must equal kv_segment_size",
        ValueError,
        got=(Sq, segment),
    )
