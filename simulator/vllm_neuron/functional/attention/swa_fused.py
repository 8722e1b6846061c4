"""Prefill of a sliding-window layer in one operator: QKV, RoPE, cache write, attention, output projection."""

import torch

from vllm_neuron.functional._numerics import PMAX, not_supported, rotate_halves
from vllm_neuron.functional.attention._cache import gather_blocks, put_slots
from vllm_neuron.simulator import rules

OPERATOR = "swa_fused_attention"


@rules.operator
def swa_fused_attention(
    hidden_states: torch.Tensor,
    qkv_weight: torch.Tensor,
    op_weight: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cos_cache: torch.Tensor,
    sin_cache: torch.Tensor,
    sink: torch.Tensor,
    prior_tokens: torch.Tensor,
    qkv_bias: torch.Tensor,
    op_bias: torch.Tensor,
    scale: float,
    sliding_window: int,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    d_head: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All in float32 but for the cache. No norm, no residual, no all-reduce.

    New tokens are written from the first block after the prior tokens on.

    Args:
        hidden_states: [B, S, H].
        qkv_weight: [H, (nq + 2 nkv) * D].
        op_weight: [nq * D, H].
        k_cache, v_cache: [num_blocks, nkv, block_size, D], written in place.
        block_tables: int32 [B, blocks per sequence].
        cos_cache, sin_cache: [B, S, D], both halves.
        sink: [B, nq], one more logit per head that has no value.
        prior_tokens: [1, 1].
        qkv_bias: [1, (nq + 2 nkv) * D].
        op_bias: [1, H].
        sliding_window: number of most recent keys that a query sees, itself included.

    Returns:
        (output [B, S, H] in the input's dtype, k_cache, v_cache).

    Raises:
        AssertionError: a size outside the documented limits, a bias that is not one row.
        NotImplementedError: an FP8 cache.
    """
    not_supported(OPERATOR, k_scale=k_scale, v_scale=v_scale)
    if k_cache.dim() != 4:
        raise NotImplementedError(f"{OPERATOR}: the simulator does not implement a packed k_cache")
    B, S, H = hidden_states.shape
    _check(S, d_head, sliding_window, block_size)
    rules.require_row(qkv_bias, qkv_weight.shape[1], OPERATOR, "qkv_bias", "Bias shape must be [1, I]")
    rules.require_row(op_bias, H, OPERATOR, "op_bias", "Bias shape must be [1, H]")

    qkv = hidden_states.float() @ qkv_weight.float() + qkv_bias.float()
    heads = qkv.view(B, S, -1, d_head).transpose(1, 2)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)  # [B, heads, S, D]
    cos, sin = cos_cache.float().unsqueeze(1), sin_cache.float().unsqueeze(1)
    q, k = rotate_halves(q, cos, sin) * scale, rotate_halves(k, cos, sin)

    keys = torch.cat([gather_blocks(k_cache, block_tables).float(), k], dim=2)
    values = torch.cat([gather_blocks(v_cache, block_tables).float(), v], dim=2)
    cached = keys.shape[2] - S
    prior = prior_tokens.flatten()[0].to(torch.int64)
    step = torch.arange(S, device=q.device)
    slot = torch.arange(cached, device=q.device)
    # Slots beyond the prior tokens hold nothing yet: put them out of every query's sight.
    position = torch.cat([torch.where(slot < prior, slot, prior + S), prior + step])
    distance = (prior + step)[:, None] - position
    visible = (distance >= 0) & (distance < sliding_window)

    grouped = q.reshape(B, num_kv_heads, -1, d_head)
    scores = (grouped @ keys.transpose(2, 3)).view(B, num_q_heads, S, -1).masked_fill(~visible, float("-inf"))
    column = sink.float().view(B, num_q_heads, 1, 1).expand(-1, -1, S, -1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    attended = (weights.reshape(B, num_kv_heads, -1, cached + S) @ values).view(B, num_q_heads, S, d_head)
    output = attended.transpose(1, 2).flatten(2) @ op_weight.float() + op_bias.float()

    logical = (prior + block_size - 1) // block_size + step // block_size
    block = block_tables.to(torch.int64).index_select(1, logical)  # [B, S]
    slots = (block * block_size + step % block_size).flatten()
    put_slots(k_cache, slots, k.transpose(1, 2).flatten(0, 1), block_size)
    put_slots(v_cache, slots, v.transpose(1, 2).flatten(0, 1), block_size)
    return output.to(hidden_states.dtype), k_cache, v_cache


def _check(S: int, D: int, window: int, block_size: int) -> None:
    rules.require(D <= PMAX, OPERATOR, "head-dim", f"head_dim must be at most {PMAX}", got=D)
    rules.require(S % PMAX == 0, OPERATOR, "tokens", f"S must be a multiple of {PMAX}", got=S)
    rules.require(
        window <= block_size,
        OPERATOR,
        "window-block",
        "sliding_window must be at most block_size",
        got=(window, block_size),
    )
