"""The fused decode block, from the norm before attention to the output projection."""

from typing import Any

import torch
from nkilib.core.utils.common_types import QuantizationType

from vllm_neuron.functional._numerics import PMAX, not_supported, rms_norm_fp32, rotate_halves, rotate_pairs
from vllm_neuron.functional.attention._cache import gather_blocks, put_valid_slots, quantize, unpack_keys
from vllm_neuron.functional.attention._decode_rules import (
    OPERATOR,
    check_cache,
    check_mask,
    check_sizes,
    check_table,
    check_update_index,
    check_vectors,
)
from vllm_neuron.functional.attention.attention_decode_mask import (
    require_context_layout,
    resize_block_len,
    unshuffle,
    visible_positions,
)
from vllm_neuron.simulator import rules


@rules.operator
def attention_decode(
    X: torch.Tensor,
    X_hidden_dim_actual: int | None = None,
    rmsnorm_X_enabled: bool = False,
    rmsnorm_X_eps: float | None = None,
    rmsnorm_X_gamma: torch.Tensor | None = None,
    W_qkv: torch.Tensor | None = None,
    bias_qkv: torch.Tensor | None = None,
    quantization_type_qkv: QuantizationType = QuantizationType.NONE,
    weight_dequant_scale_qkv: torch.Tensor | None = None,
    input_dequant_scale_qkv: torch.Tensor | None = None,
    rmsnorm_QK_pre_rope_enabled: bool = False,
    rmsnorm_QK_pre_rope_eps: float = 1e-6,
    rmsnorm_QK_pre_rope_W_Q: torch.Tensor | None = None,
    rmsnorm_QK_pre_rope_W_K: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    rope_contiguous_layout: bool = True,
    rmsnorm_QK_post_rope_enabled: bool = False,
    rmsnorm_QK_post_rope_eps: float = 1e-6,
    rmsnorm_QK_post_rope_W_Q: torch.Tensor | None = None,
    rmsnorm_QK_post_rope_W_K: torch.Tensor | None = None,
    K_cache_transposed: bool = False,
    active_blocks_table: torch.Tensor | None = None,
    K_cache: torch.Tensor | None = None,
    V_cache: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    pos_ids: torch.Tensor | None = None,
    swa_start_pos_ids: torch.Tensor | None = None,
    update_cache: bool = False,
    kv_cache_update_idx: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    fp8_packed: bool = False,
    W_out: torch.Tensor | None = None,
    bias_out: torch.Tensor | None = None,
    quantization_type_out: QuantizationType = QuantizationType.NONE,
    weight_dequant_scale_out: torch.Tensor | None = None,
    input_dequant_scale_out: torch.Tensor | None = None,
    transposed_out: bool = False,
    out_in_sb: bool = False,
    skip_attention: bool = False,
    is_h_transposed_by_4: bool = False,
    sbm_lower_bound: int | None = None,
    sbm_upper_bound: int | None = None,
    sbm_use_auto_alloc: bool = True,
    sbm_default_stack_alloc: bool = True,
    attention_dp: int = 1,
    attention_dp_group: Any = None,
    attention_dp_rank: int = 0,
    kv_needs_a2a: bool = False,
    dcp_size: int = 1,
    dcp_group: Any = None,
    dcp_collective_mode: str = "auto",
    dcp_active_owner: torch.Tensor | None = None,
    fp8_fused_mask_allowed: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of the new tokens over their sequences' cached context and over each other.

    B sequences, S new tokens each, hidden size H, head size D, q and kv heads of this rank, context
    S_ctx = blocks per sequence * block_len. The last S slots of the context stand for the new tokens.
    There is no all-reduce inside; `bias_out` is added on every rank.

    Args:
        X: [B, S, H].
        X_hidden_dim_actual: divisor of the norm's mean when X is zero-padded.
        rmsnorm_X_eps: 1e-3 when None.
        rmsnorm_X_gamma: [1, H]; the norm runs in float32.
        W_qkv: [H, (q + 2 kv) * D], columns in the order Q, K, V.
        bias_qkv: [1, (q + 2 kv) * D].
        rmsnorm_QK_*_rope_W_Q, rmsnorm_QK_*_rope_W_K: D values in any shape; RMS norm per head in float32.
        cos, sin: [D / 2, B, S]; no RoPE when either is None.
        rope_contiguous_layout: dimension i is rotated with i + D / 2; otherwise 2i with 2i + 1.
        active_blocks_table: int32 [B, blocks] of block ids, or int32 [B, kv, blocks] of block id * kv + head.
            -1 marks an unused entry.
        K_cache, V_cache: [num_blocks, block_len, D] for one kv head, or [num_blocks, kv, block_len, D].
        attention_mask: without pos_ids [S_ctx, B, q, S] from `gen_attention_decode_mask`; with pos_ids
            [S, B, q, S] or None, and then it is rebuilt as causal.
        sink: [q, 1], one more logit per query head that takes part in the softmax and has no value.
        softmax_scale: D ** -0.5 when None.
        pos_ids: [B, S], tokens before each new token.
        swa_start_pos_ids: [B, S], first position of each new token's window.
        update_cache: write the new K and V to the slots kv_cache_update_idx [B, S] (block * block_len +
            offset), in place; slots outside the cache are skipped.
        k_scale, v_scale: reciprocal scales of an FP8 cache, element 0 counts.
        fp8_packed: K_cache is [num_blocks, (kv,) block_len // 2, D, 2].
        W_out: [q * D, H].
        bias_out: [1, H].

    Returns:
        output: [B * S, H] with W_out, else [B, q, D, S]. Without `update_cache` (output, K, V) with K
        [D, B * kv, S] ([D, B, kv, S] when the block table is per head) and V [B, kv, S, D].

    Raises:
        AssertionError: a shape, dtype or size that the device's kernel asserts.
        ValueError: arguments that contradict each other.
        NotImplementedError: a feature that the simulator does not have; the argument is named.
    """
    not_supported(
        OPERATOR,
        quantization_type_qkv=quantization_type_qkv,
        weight_dequant_scale_qkv=weight_dequant_scale_qkv,
        input_dequant_scale_qkv=input_dequant_scale_qkv,
        quantization_type_out=quantization_type_out,
        weight_dequant_scale_out=weight_dequant_scale_out,
        input_dequant_scale_out=input_dequant_scale_out,
        K_cache_transposed=K_cache_transposed,
        transposed_out=transposed_out,
        out_in_sb=out_in_sb,
        skip_attention=skip_attention,
        is_h_transposed_by_4=is_h_transposed_by_4,
    )
    if dcp_size > 1 and dcp_group is None:
        raise ValueError("dcp_size > 1 needs dcp_group")
    not_supported(
        OPERATOR,
        attention_dp=attention_dp if attention_dp > 1 else None,
        dcp_size=dcp_size if dcp_size > 1 else None,
    )
    if active_blocks_table is None:
        if pos_ids is not None:
            raise ValueError("pos_ids needs active_blocks_table")
        raise AssertionError("attention_decode needs active_blocks_table")
    if W_qkv is None or K_cache is None:
        raise ValueError("attention_decode needs W_qkv and K_cache")
    if V_cache is None or V_cache.dim() not in (3, 4):
        raise AssertionError("V_cache must have 3 or 4 dimensions")
    if update_cache and kv_cache_update_idx is None:
        raise AssertionError("update_cache needs kv_cache_update_idx")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale must be given together")
    if swa_start_pos_ids is not None and pos_ids is None:
        raise ValueError("swa_start_pos_ids needs pos_ids")

    B, S, _ = X.shape
    D = V_cache.shape[-1]
    kv_heads = 1 if V_cache.dim() == 3 else V_cache.shape[1]
    if V_cache.dim() == 3:
        K_cache, V_cache = K_cache.unsqueeze(1), V_cache.unsqueeze(1)
    block_len = V_cache.shape[2]
    q_heads = W_qkv.shape[1] // D - 2 * kv_heads
    if q_heads <= 0 or q_heads % kv_heads:
        raise ValueError(f"Query heads ({q_heads}) must be a multiple of KV heads ({kv_heads})")
    per_head_table = active_blocks_table.dim() == 3
    S_ctx = active_blocks_table.shape[-1] * block_len

    check_sizes(X, W_qkv, D, kv_heads, per_head_table, update_cache)
    check_vectors(X, W_qkv, rmsnorm_X_gamma if rmsnorm_X_enabled else None, bias_qkv, bias_out, cos, sin, D)
    check_cache(X, K_cache, V_cache, fp8_packed, k_scale)
    check_table(active_blocks_table, B, kv_heads)
    require_context_layout(OPERATOR, block_len, B, q_heads, S, S_ctx)
    check_mask(attention_mask, pos_ids, S_ctx, B, q_heads, S)
    if update_cache and kv_cache_update_idx is not None:
        check_update_index(kv_cache_update_idx, B, S)

    hidden = X
    if rmsnorm_X_enabled:
        eps = 1e-3 if rmsnorm_X_eps is None else rmsnorm_X_eps
        hidden = rms_norm_fp32(hidden, rmsnorm_X_gamma, eps, X_hidden_dim_actual)
    qkv = hidden @ W_qkv
    if bias_qkv is not None:
        qkv = qkv + bias_qkv
    heads = qkv.view(B, S, -1, D).transpose(1, 2)  # [B, q + 2 kv, S, D]
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)

    if rmsnorm_QK_pre_rope_enabled:
        q = _head_norm(q, rmsnorm_QK_pre_rope_W_Q, rmsnorm_QK_pre_rope_eps)
        k = _head_norm(k, rmsnorm_QK_pre_rope_W_K, rmsnorm_QK_pre_rope_eps)
    if cos is not None and sin is not None:
        q, k = _rotate(q, k, cos, sin, rope_contiguous_layout)
    if rmsnorm_QK_post_rope_enabled:
        q = _head_norm(q, rmsnorm_QK_post_rope_W_Q, rmsnorm_QK_post_rope_eps)
        k = _head_norm(k, rmsnorm_QK_post_rope_W_K, rmsnorm_QK_post_rope_eps)

    k_new, v_new = k, v
    if k_scale is not None and v_scale is not None:
        k_new, v_new = quantize(k, k_scale), quantize(v, v_scale)
    keys = gather_blocks(unpack_keys(K_cache) if fp8_packed else K_cache, active_blocks_table).to(X.dtype)
    values = gather_blocks(V_cache, active_blocks_table).to(X.dtype)
    keys[:, :, S_ctx - S :] = k_new.to(X.dtype)
    values[:, :, S_ctx - S :] = v_new.to(X.dtype)

    if pos_ids is not None:
        visible = visible_positions(pos_ids, swa_start_pos_ids, S_ctx).permute(1, 2, 0).unsqueeze(1)
    elif attention_mask is not None:
        resized = resize_block_len(block_len, B, q_heads, S, S_ctx)
        visible = unshuffle(attention_mask, resized).permute(1, 2, 3, 0) != 0
    else:
        raise ValueError("attention_decode needs attention_mask or pos_ids")
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    attended = _attend(q, keys, values, visible, scale, sink)  # [B, q, S, D]

    if update_cache and kv_cache_update_idx is not None:
        slots = kv_cache_update_idx.flatten()
        put_valid_slots(K_cache, slots, k_new.transpose(1, 2).flatten(0, 1), block_len)
        put_valid_slots(V_cache, slots, v_new.transpose(1, 2).flatten(0, 1), block_len)

    if W_out is None:
        output = attended.transpose(2, 3)
    else:
        output = attended.transpose(1, 2).reshape(B * S, q_heads * D) @ W_out
        if bias_out is not None:
            output = output + bias_out
    if update_cache:
        return output
    k_out = k_new.permute(3, 0, 1, 2)  # [D, B, kv, S]
    return output, k_out if per_head_table else k_out.flatten(1, 2), v_new


def _head_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is not None:
        rules.require(
            weight.numel() == x.shape[-1],
            OPERATOR,
            "qk-norm-size",
            "QK norm weight must have head_dim values",
            got=weight.shape,
        )
        weight = weight.flatten()
    rules.fallback(
        x.shape[-1] != PMAX,
        OPERATOR,
        f"kernels up to April 2026 assert head_dim == {PMAX} for the QK norm; newer ones are not verified",
        got=x.shape[-1],
    )
    return rms_norm_fp32(x, weight, eps)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, contiguous: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    cos = cos.to(q.dtype).permute(1, 2, 0).unsqueeze(1)  # [B, 1, S, D / 2]
    sin = sin.to(q.dtype).permute(1, 2, 0).unsqueeze(1)
    if not contiguous:
        return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
    return rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Scores in the model dtype, softmax in float32, weights back in the model dtype.

    q [B, q, S, D], keys and values [B, kv, S_ctx, D], visible bool [B, 1 or q, S, S_ctx] -> [B, q, S, D].
    """
    B, q_heads, S, D = q.shape
    kv_heads, S_ctx = keys.shape[1], keys.shape[2]
    grouped = q.reshape(B, kv_heads, -1, D)  # [B, kv, q / kv * S, D]
    scores = (grouped @ keys.transpose(2, 3) * scale).float().view(B, q_heads, S, S_ctx)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink is not None:
        column = sink.float().view(1, q_heads, 1, 1).expand(B, -1, S, -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(q.dtype)[..., :S_ctx]
    attended = weights.reshape(B, kv_heads, -1, S_ctx) @ values
    return attended.view(B, q_heads, S, D)
