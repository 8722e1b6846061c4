"""QKV projection with optional norm, residuals, QK norm, RoPE and cache write."""

from typing import NamedTuple

import torch
from nkilib.core.utils.common_types import NormType, QKVOutputLayout, QKVWeightLayout, QuantizationType

from vllm_neuron.functional._numerics import (
    PMAX,
    layer_norm,
    not_supported,
    rms_norm,
    rms_norm_fp32,
    rotate_halves,
)
from vllm_neuron.functional.attention._cache import put_slots
from vllm_neuron.simulator import rules

OPERATOR = "qkv_proj"

# Limits of the kernel.
MAX_HIDDEN = 24576
MAX_COLUMNS = 4096
MAX_DECODE_TOKENS = 96


class _HeadNorm(NamedTuple):
    """RMS norm of each query and key head, with the operator's arguments of one place (pre or post RoPE)."""

    q_norm: NormType | None
    k_norm: NormType | None
    eps: float
    q_gamma: torch.Tensor | None
    k_gamma: torch.Tensor | None
    gamma_fused: bool

    @property
    def is_on(self) -> bool:
        return self.q_norm is not None or self.k_norm is not None

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_on:
            return q, k
        if self.q_norm is not NormType.RMS_NORM or self.k_norm is not NormType.RMS_NORM:
            raise AssertionError("QK norm must be RMS_NORM for both q and k")
        if self.gamma_fused:
            raise AssertionError("QK norm gamma fused in the RoPE caches needs the device")
        return self._norm(q, self.q_gamma), self._norm(k, self.k_gamma)

    def _norm(self, x: torch.Tensor, gamma: torch.Tensor | None) -> torch.Tensor:
        return rms_norm_fp32(x, None if gamma is None else gamma.flatten(), self.eps)


class _CacheWrite(NamedTuple):
    """Where and how K and V of `qkv` [B, S, F] go to the paged cache."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    slots: torch.Tensor
    block_size: int
    heads: tuple[int, int, int]
    d_head: int
    limits: tuple[float | None, float | None]
    dtype: torch.dtype | None

    def __call__(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = qkv.split([n * self.d_head for n in self.heads], dim=2)
        self._write(k, self.k_cache, self.k_scale)
        self._write(v, self.v_cache, self.v_scale)
        return q, self.k_cache, self.v_cache

    def _write(self, new: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None) -> None:
        rows = new.unflatten(2, (-1, self.d_head)).flatten(0, 1)  # [B * S, nkv, D]
        if scale is not None:
            rows = rows / scale.flatten()[0].to(rows.dtype)
        if self.limits != (None, None):
            rows = rows.clamp(*self.limits)
        put_slots(cache, self.slots.flatten(), rows.to(self.dtype or cache.dtype), self.block_size)


@rules.operator
def qkv_proj(
    hidden: torch.Tensor,
    qkv_weights: torch.Tensor,
    norm_weights: torch.Tensor | None = None,
    mlp_prev: torch.Tensor | None = None,
    attn_prev: torch.Tensor | None = None,
    d_head: int | None = None,
    output_layout: QKVOutputLayout = QKVOutputLayout.BSD,
    eps: float = 1e-6,
    norm_type: NormType = NormType.NO_NORM,
    use_dma_transpose: bool = True,
    store_output_in_sbuf: bool = False,
    bias: torch.Tensor | None = None,
    norm_b: torch.Tensor | None = None,
    hidden_actual: int | None = None,
    cos_cache: torch.Tensor | None = None,
    sin_cache: torch.Tensor | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    qkv_w_scale: torch.Tensor | None = None,
    qkv_in_scale: torch.Tensor | None = None,
    weight_layout: QKVWeightLayout = QKVWeightLayout.CONTIGUOUS,
    sbm_lower_bound: int | None = None,
    sbm_upper_bound: int | None = None,
    sbm_use_auto_alloc: bool = False,
    sbm_default_stack_alloc: bool = True,
    use_auto_allocation: bool = False,
    qk_norm_pre_rope_q_norm: NormType | None = None,
    qk_norm_pre_rope_k_norm: NormType | None = None,
    qk_norm_pre_rope_eps: float = 1e-6,
    qk_norm_pre_rope_gamma_fused_in_rope_caches: bool = False,
    qk_norm_pre_rope_q_gamma: torch.Tensor | None = None,
    qk_norm_pre_rope_k_gamma: torch.Tensor | None = None,
    qk_norm_pre_rope_q_beta: torch.Tensor | None = None,
    qk_norm_pre_rope_k_beta: torch.Tensor | None = None,
    qk_norm_post_rope_q_norm: NormType | None = None,
    qk_norm_post_rope_k_norm: NormType | None = None,
    qk_norm_post_rope_eps: float = 1e-6,
    qk_norm_post_rope_gamma_fused_in_rope_caches: bool = False,
    qk_norm_post_rope_q_gamma: torch.Tensor | None = None,
    qk_norm_post_rope_k_gamma: torch.Tensor | None = None,
    qk_norm_post_rope_q_beta: torch.Tensor | None = None,
    qk_norm_post_rope_k_beta: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    fp8_max: float | None = None,
    fp8_min: float | None = None,
    kv_dtype: torch.dtype | None = None,
    use_block_kv: bool = False,
    transpose_k_cache: bool = False,
    fp8_packed: bool = False,
    block_size: int | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project hidden states to queries, keys and values. No all-reduce.

    nq and nkv heads of size D, F = (nq + 2 nkv) * D columns in the order Q, K, V.

    Args:
        hidden: [B, S, H].
        qkv_weights: [H, F].
        norm_weights, norm_b: [1, H]; the norm runs in the input's dtype.
        mlp_prev, attn_prev: [B, S, H], both or neither; added to hidden before the norm, not returned.
        d_head: D; needed for the head layouts, RoPE, QK norms and the cache write.
        bias: [1, F].
        hidden_actual: divisor of the RMS norm's mean when hidden is zero-padded.
        cos_cache, sin_cache: [B, S, D], both halves; dimension i is rotated with i + D / 2. RoPE runs when
            both tables and both head counts are given.
        qk_norm_pre_rope_*, qk_norm_post_rope_*: RMS norm per head in float32, gamma with D values.
        use_block_kv: write K and V to k_cache and v_cache [num_blocks, nkv, block_size, D] in place, at
            slot_mapping (B * S slots, block * block_size + offset). A negative slot counts from the end.
        k_scale, v_scale: divisors for an FP8 cache, element 0 counts.
        kv_dtype: dtype to round to; the cache's when None.

    Returns:
        [B, S, F] (BSD), [heads, B, S, D] (NBSd) or [heads, B, D, S] (NBdS). With `use_block_kv`
        (q [B, S, nq * D], k_cache, v_cache).

    Raises:
        AssertionError: a shape that the kernel asserts, or incomplete QK norm arguments.
        ValueError: d_head or head counts missing.
        NotImplementedError: a feature that the simulator does not have; the argument is named.
    """
    not_supported(
        OPERATOR,
        quantization_type=quantization_type,
        qkv_w_scale=qkv_w_scale,
        qkv_in_scale=qkv_in_scale,
        weight_layout=None if weight_layout is QKVWeightLayout.CONTIGUOUS else weight_layout,
        store_output_in_sbuf=store_output_in_sbuf,
        transpose_k_cache=transpose_k_cache,
        fp8_packed=fp8_packed,
        qk_norm_pre_rope_q_beta=qk_norm_pre_rope_q_beta,
        qk_norm_pre_rope_k_beta=qk_norm_pre_rope_k_beta,
        qk_norm_post_rope_q_beta=qk_norm_post_rope_q_beta,
        qk_norm_post_rope_k_beta=qk_norm_post_rope_k_beta,
    )
    if (mlp_prev is None) != (attn_prev is None):
        raise ValueError("mlp_prev and attn_prev must be given together")
    if (k_cache is not None or v_cache is not None) and not use_block_kv:
        raise AssertionError("k_cache and v_cache need use_block_kv")
    pre = _HeadNorm(
        qk_norm_pre_rope_q_norm,
        qk_norm_pre_rope_k_norm,
        qk_norm_pre_rope_eps,
        qk_norm_pre_rope_q_gamma,
        qk_norm_pre_rope_k_gamma,
        qk_norm_pre_rope_gamma_fused_in_rope_caches,
    )
    post = _HeadNorm(
        qk_norm_post_rope_q_norm,
        qk_norm_post_rope_k_norm,
        qk_norm_post_rope_eps,
        qk_norm_post_rope_q_gamma,
        qk_norm_post_rope_k_gamma,
        qk_norm_post_rope_gamma_fused_in_rope_caches,
    )
    if (pre.is_on or post.is_on) and (num_q_heads is None or num_kv_heads is None):
        raise AssertionError("num_q_heads and num_kv_heads must be specified when qk_norm is enabled")
    cache_write: _CacheWrite | None = None
    if use_block_kv:
        if d_head is None or num_q_heads is None or num_kv_heads is None:
            raise ValueError("use_block_kv needs d_head, num_q_heads and num_kv_heads")
        if k_cache is None or v_cache is None or slot_mapping is None or block_size is None:
            raise AssertionError("use_block_kv needs k_cache, v_cache, slot_mapping and block_size")
        heads = (num_q_heads, num_kv_heads, num_kv_heads)
        fp8 = (fp8_min, fp8_max)
        cache_write = _CacheWrite(
            k_cache, v_cache, k_scale, v_scale, slot_mapping, block_size, heads, d_head, fp8, kv_dtype
        )
        not_supported(
            f"{OPERATOR} with use_block_kv",
            norm_type=None if norm_type is NormType.NO_NORM else norm_type,
            mlp_prev=mlp_prev,
        )
    elif output_layout is not QKVOutputLayout.BSD and d_head is None:
        raise ValueError(f"output_layout {output_layout.name} needs d_head")
    _check_vectors(hidden, qkv_weights, norm_weights, mlp_prev, attn_prev, bias, norm_b, norm_type)
    _check_heads(hidden, qkv_weights, cos_cache, sin_cache, num_q_heads, num_kv_heads, d_head)
    _check_sizes(hidden, qkv_weights, output_layout, d_head, use_block_kv, hidden_actual)

    x = hidden
    if mlp_prev is not None and attn_prev is not None:
        x = x + mlp_prev + attn_prev
    if norm_type in (NormType.RMS_NORM, NormType.RMS_NORM_SKIP_GAMMA):
        x = rms_norm(x, norm_weights, eps, hidden_actual)
    elif norm_type is NormType.LAYER_NORM:
        not_supported(f"{OPERATOR} with LAYER_NORM", hidden_actual=hidden_actual)
        x = layer_norm(x, norm_weights, norm_b, eps)
    qkv = x @ qkv_weights
    if bias is not None:
        qkv = qkv + bias

    has_rope = None not in (cos_cache, sin_cache, num_q_heads, num_kv_heads)
    if num_q_heads is not None and num_kv_heads is not None and (has_rope or pre.is_on or post.is_on):
        B, S, F = qkv.shape
        by_head = qkv.view(B, S, num_q_heads + 2 * num_kv_heads, -1)
        q, k, v = by_head.split([num_q_heads, num_kv_heads, num_kv_heads], dim=2)
        q, k = pre(q, k)
        if cos_cache is not None and sin_cache is not None:
            cos, sin = cos_cache.unsqueeze(2), sin_cache.unsqueeze(2)
            q, k = rotate_halves(q, cos, sin).to(v.dtype), rotate_halves(k, cos, sin).to(v.dtype)
        q, k = post(q, k)
        qkv = torch.cat([q, k, v], dim=2).view(B, S, F)

    if cache_write is not None:
        return cache_write(qkv)
    if output_layout is QKVOutputLayout.NBSd:
        return qkv.unflatten(2, (-1, d_head)).permute(2, 0, 1, 3)
    if output_layout is QKVOutputLayout.NBdS:
        return qkv.unflatten(2, (-1, d_head)).permute(2, 0, 3, 1)
    return qkv


def _check_vectors(
    hidden: torch.Tensor,
    qkv_weights: torch.Tensor,
    norm_weights: torch.Tensor | None,
    mlp_prev: torch.Tensor | None,
    attn_prev: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm_b: torch.Tensor | None,
    norm_type: NormType,
) -> None:
    H, F = qkv_weights.shape
    rules.require_row(bias, F, OPERATOR, "bias", "Bias shape must be [1, I]")
    rules.require_row(norm_weights, H, OPERATOR, "norm_weights", "norm_weights shape must be [1, H]")
    rules.require_row(norm_b, H, OPERATOR, "norm_b", "norm_b shape must be [1, H]")
    has_gamma = norm_type in (NormType.RMS_NORM, NormType.LAYER_NORM)
    rules.require(
        has_gamma == (norm_weights is not None),
        OPERATOR,
        "norm-weights",
        "norm_weights must be given for RMS_NORM and LAYER_NORM, and for no other norm_type",
        got=norm_type,
    )
    rules.fallback(
        norm_b is not None and norm_type is not NormType.LAYER_NORM, OPERATOR, "norm_b is only for LAYER_NORM"
    )
    for name, residual in (("mlp_prev", mlp_prev), ("attn_prev", attn_prev)):
        if residual is not None:
            rules.require(
                rules.shape_is(residual, hidden.shape),
                OPERATOR,
                f"{name}-shape",
                f"{name} must have the shape of hidden",
                got=residual.shape,
            )


def _check_heads(
    hidden: torch.Tensor,
    qkv_weights: torch.Tensor,
    cos_cache: torch.Tensor | None,
    sin_cache: torch.Tensor | None,
    num_q_heads: int | None,
    num_kv_heads: int | None,
    d_head: int | None,
) -> None:
    if num_q_heads is None or num_kv_heads is None:
        return
    F = qkv_weights.shape[1]
    D = F // (num_q_heads + 2 * num_kv_heads) if d_head is None else d_head
    rules.require(
        (num_q_heads + 2 * num_kv_heads) * D == F,
        OPERATOR,
        "qkv-width",
        "(num_q_heads + 2 * num_kv_heads) * d_head must equal the columns of qkv_weights",
        got=(num_q_heads, num_kv_heads, D, F),
    )
    for name, table in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
        if table is not None:
            rules.require(
                rules.shape_is(table, (hidden.shape[0], hidden.shape[1], D)),
                OPERATOR,
                f"{name}-shape",
                f"{name} shape must be [B, S, D]",
                got=table.shape,
            )


def _check_sizes(
    hidden: torch.Tensor,
    qkv_weights: torch.Tensor,
    layout: QKVOutputLayout,
    d_head: int | None,
    use_block_kv: bool,
    hidden_actual: int | None,
) -> None:
    H, F = qkv_weights.shape
    tokens = hidden.shape[0] * hidden.shape[1]
    rules.require(
        hidden_actual is None or hidden_actual <= H,
        OPERATOR,
        "hidden-actual",
        "hidden_actual must be at most H",
        got=hidden_actual,
    )
    rules.require(
        not use_block_kv or layout is QKVOutputLayout.BSD,
        OPERATOR,
        "cache-write-layout",
        "The cache write needs output_layout BSD",
        got=layout,
    )
    slow = rules.fallback(H > MAX_HIDDEN, OPERATOR, f"hidden size above {MAX_HIDDEN}", got=H)
    slow |= rules.fallback(H % PMAX != 0, OPERATOR, f"hidden size must be a multiple of {PMAX}", got=H)
    slow |= rules.fallback(F > MAX_COLUMNS, OPERATOR, f"more than {MAX_COLUMNS} QKV columns on a rank", got=F)
    slow |= rules.fallback(F > H, OPERATOR, "more QKV columns than hidden size", got=(F, H))
    slow |= rules.fallback(layout is QKVOutputLayout.NBdS, OPERATOR, "output_layout NBdS")
    slow |= rules.fallback(
        layout is QKVOutputLayout.NBSd and d_head != PMAX,
        OPERATOR,
        f"output_layout NBSd needs d_head {PMAX}",
        got=d_head,
    )
    rules.require(
        slow or tokens > MAX_DECODE_TOKENS or H % (2 * PMAX) == 0,
        OPERATOR,
        "hidden-256",
        f"H / {PMAX} must be divisible by 2 for up to {MAX_DECODE_TOKENS} tokens",
        got=H,
    )
