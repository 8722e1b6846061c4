"""The hardware rules of `attention_decode`, apart from those of the context layout.

Shapes of vectors, tables and masks hold always. Rules about sizes hold where the kernel would run: a call that
the device would give to its slow path is recorded and its other sizes are not looked at.
"""

import torch

from vllm_neuron.functional._numerics import PMAX
from vllm_neuron.simulator import rules
from vllm_neuron.utils.neuron_utils import values_are_readable

OPERATOR = "attention_decode"


def check_sizes(
    X: torch.Tensor, W_qkv: torch.Tensor, D: int, kv_heads: int, per_head_table: bool, update_cache: bool
) -> None:
    H, S = X.shape[2], X.shape[1]
    rules.require(
        0 < D <= PMAX and D % 2 == 0,
        OPERATOR,
        "head-dim",
        f"head_dim must be even and at most {PMAX}",
        got=D,
    )
    rules.require(
        W_qkv.shape[1] % D == 0,
        OPERATOR,
        "qkv-width",
        "W_qkv.shape[1] must be a multiple of head_dim",
        got=W_qkv.shape[1],
    )
    torch_path = rules.fallback(
        H % PMAX != 0, OPERATOR, f"hidden size must be a multiple of {PMAX} for the kernel", got=H
    )
    torch_path |= rules.fallback(
        kv_heads > 1 and not per_head_table,
        OPERATOR,
        "with more than one KV head on a rank the kernel needs a block table per head [B, kv_heads, blocks]",
        got=kv_heads,
    )
    if torch_path:
        return
    rules.require(
        H % (2 * PMAX) == 0,
        OPERATOR,
        "hidden-256",
        f"H / {PMAX} must be divisible by 2 for the QKV decode kernel",
        got=H,
    )
    rules.fallback(
        kv_heads > 1,
        OPERATOR,
        "kernels up to April 2026 assert one KV head in a 4-D cache; newer ones take a block table per head",
        got=kv_heads,
    )
    rules.fallback(
        update_cache and S > 1,
        OPERATOR,
        "kernels up to April 2026 write the cache for one new token per sequence only",
        got=S,
    )


def check_vectors(
    X: torch.Tensor,
    W_qkv: torch.Tensor,
    gamma: torch.Tensor | None,
    bias_qkv: torch.Tensor | None,
    bias_out: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    D: int,
) -> None:
    B, S, H = X.shape
    rules.require_row(gamma, H, OPERATOR, "rmsnorm_X_gamma", "rmsnorm_X_gamma shape must be [1, H]")
    rules.require_row(bias_qkv, W_qkv.shape[1], OPERATOR, "bias_qkv", "Bias shape must be [1, I]")
    rules.require_row(bias_out, H, OPERATOR, "bias_out", "Bias shape must be [1, H]")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            rules.require(
                rules.shape_is(table, (D // 2, B, S)),
                OPERATOR,
                f"{name}-shape",
                f"{name} shape must be [D / 2, B, S]",
                got=table.shape,
            )


def check_cache(
    X: torch.Tensor,
    K_cache: torch.Tensor,
    V_cache: torch.Tensor,
    fp8_packed: bool,
    k_scale: torch.Tensor | None,
) -> None:
    blocks, kv_heads, block_len, D = V_cache.shape
    if fp8_packed:
        packed = (blocks, kv_heads, block_len // 2, D, 2)
        if block_len % 2 or not rules.shape_is(K_cache, packed):
            raise AssertionError(f"fp8_packed K_cache shape must be {packed}, got {tuple(K_cache.shape)}")
    else:
        rules.require(
            rules.shape_is(K_cache, V_cache.shape),
            OPERATOR,
            "cache-shapes",
            "K_cache and V_cache must have the same shape",
            got=K_cache.shape,
        )
    fp8 = torch.float8_e4m3fn
    if k_scale is not None or fp8_packed or K_cache.dtype.itemsize == 1:
        rules.require(
            K_cache.dtype == fp8 and V_cache.dtype == fp8,
            OPERATOR,
            "fp8-dtype",
            "An FP8 cache must be float8_e4m3 for both K and V",
            got=K_cache.dtype,
        )
        rules.require(
            X.dtype != torch.float32, OPERATOR, "fp8-query", "An FP8 cache does not take float32 queries"
        )


def check_table(table: torch.Tensor, B: int, kv_heads: int) -> None:
    rules.require(
        table.dtype == torch.int32,
        OPERATOR,
        "block-table-int32",
        "active_blocks_table must be int32",
        got=table.dtype,
    )
    if table.dim() == 2:
        return
    rules.require(
        tuple(table.shape[:2]) == (B, kv_heads),
        OPERATOR,
        "block-table-shape",
        "active_blocks_table per head must be [B, kv_heads, blocks]",
        got=table.shape,
    )
    if values_are_readable(table):
        head = torch.arange(kv_heads, device=table.device).view(1, -1, 1)
        rules.require(
            bool(((table < 0) | (table % kv_heads == head)).all()),
            OPERATOR,
            "block-table-per-head",
            "A block table per head must hold block id * kv_heads + head",
        )


def check_mask(
    mask: torch.Tensor | None, pos_ids: torch.Tensor | None, S_ctx: int, B: int, q_heads: int, S: int
) -> None:
    if pos_ids is not None:
        rules.require(
            rules.shape_is(pos_ids, (B, S)),
            OPERATOR,
            "pos-ids-shape",
            "pos_ids shape must be [B, S_tkg]",
            got=pos_ids.shape,
        )
        if mask is not None and (mask.shape[0] != S or mask.shape[3] != S):
            raise AssertionError(f"With pos_ids the mask must be [S, B, q_heads, S], got {tuple(mask.shape)}")
    elif mask is not None:
        rules.require(
            rules.shape_is(mask, (S_ctx, B, q_heads, S)),
            OPERATOR,
            "mask-shape",
            "attention_mask shape must be [S_ctx, B, q_heads, S_tkg]",
            got=mask.shape,
        )


def check_update_index(index: torch.Tensor, B: int, S: int) -> None:
    rules.require(
        rules.shape_is(index, (B, S)),
        OPERATOR,
        "update-idx-shape",
        "kv_cache_update_idx shape must be [B, S_tkg]",
        got=index.shape,
    )
