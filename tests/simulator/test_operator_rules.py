"""The hardware rules of the prefill, projection, MLP and sampling operators."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import vllm_neuron.functional as NF
from nkilib.core.utils.common_types import NormType, QKVOutputLayout
from rule_table import Rule, check_error, check_fallback, check_named
from thread_ranks import on_ranks
from vllm_neuron.functional.argmax import argmax
from vllm_neuron.functional.topk import topk
from vllm_neuron.simulator import rules


def qkv(*, B=1, S=128, H=512, F=384, **changes):
    NF.qkv_proj(torch.ones(B, S, H), torch.zeros(H, F), **changes)


ZEROS = torch.zeros


def qkv_write(**changes):
    caches = dict(k_cache=ZEROS(5, 1, 32, 64), v_cache=ZEROS(5, 1, 32, 64))
    sizes = dict(d_head=64, num_q_heads=4, num_kv_heads=1, block_size=32)
    qkv(use_block_kv=True, slot_mapping=torch.arange(128), **caches, **sizes, **changes)


def flash(*, heads=2, kv=2, S=8, Sk=None, D=64, Dv=None, **changes):
    Sk = Sk or S
    NF.flash_attention(torch.ones(heads, S, D), torch.ones(kv, D, Sk), torch.ones(kv, Sk, Dv or D), **changes)


def segmented(*, S=512, D=64, block_size=32, segment=512, prior=0, **changes):
    cache = torch.zeros(S // block_size, 1, block_size, D)
    table = torch.arange(S // block_size, dtype=torch.int32)[None]
    NF.segmented_attention(
        torch.ones(2, S, D), cache, cache, table, torch.tensor([[prior]]), block_size, segment, **changes
    )


def o_proj(*, B=1, N=4, D=64, S=2, H=256, **changes):
    NF.o_proj(torch.ones(B, N, D, S), torch.zeros(N * D, H), **changes)


def mlp(*, T=4, H=256, inner=256, dtype=torch.float32, **changes):
    weights = torch.zeros(H, inner, dtype=dtype), torch.zeros(H, inner, dtype=dtype)
    NF.mlp(torch.ones(T, H, dtype=dtype), *weights, torch.zeros(inner, H, dtype=dtype), **changes)


def one_rank_argmax(*, shape=(4, 128), dim=1):
    on_ranks(1, lambda _: argmax(torch.zeros(shape), dim, dim, process_group=dist.group.WORLD))


PRIOR = dict(k_prior=ZEROS(2, 64, 4), v_prior=ZEROS(2, 4, 64), prior_used_len=ZEROS(1))

ERRORS = {
    "qkv.bias": Rule(
        qkv, dict(bias=ZEROS(384)), r"Bias shape must be \[1, I\], got \(384,\)", dict(bias=ZEROS(1, 384))
    ),
    "qkv.norm_weights_2d": Rule(
        qkv,
        dict(norm_weights=ZEROS(512), norm_type=NormType.RMS_NORM),
        r"\[1, H\]",
        dict(norm_weights=ZEROS(1, 512), norm_type=NormType.RMS_NORM),
    ),
    "qkv.norm_weights_missing": Rule(
        qkv,
        dict(norm_type=NormType.LAYER_NORM),
        "norm_weights must be given",
        dict(norm_type=NormType.RMS_NORM_SKIP_GAMMA),
    ),
    "qkv.norm_weights_unused": Rule(qkv, dict(norm_weights=ZEROS(1, 512)), "no other norm_type", {}),
    "qkv.residual": Rule(
        qkv,
        dict(mlp_prev=ZEROS(1, 1, 512), attn_prev=ZEROS(1, 128, 512)),
        "shape of hidden",
        dict(mlp_prev=ZEROS(1, 128, 512), attn_prev=ZEROS(1, 128, 512)),
    ),
    "qkv.one_residual": Rule(qkv, dict(mlp_prev=ZEROS(1, 128, 512)), "together", {}, ValueError),
    "qkv.width": Rule(
        qkv,
        dict(num_q_heads=4, num_kv_heads=2, d_head=64),
        "must equal the columns",
        dict(num_q_heads=4, num_kv_heads=1, d_head=64),
    ),
    "qkv.cos": Rule(
        qkv,
        dict(num_q_heads=4, num_kv_heads=1, cos_cache=ZEROS(1, 128, 32), sin_cache=ZEROS(1, 128, 32)),
        r"\[B, S, D\]",
        dict(num_q_heads=4, num_kv_heads=1, cos_cache=ZEROS(1, 128, 64), sin_cache=ZEROS(1, 128, 64)),
    ),
    "qkv.hidden_actual": Rule(qkv, dict(hidden_actual=513), "at most H", dict(hidden_actual=512)),
    "qkv.hidden_256": Rule(qkv, dict(S=96, H=384), "must be divisible by 2", dict(S=97, H=384)),
    "qkv.qk_norm_heads": Rule(
        qkv, dict(qk_norm_pre_rope_q_norm=NormType.RMS_NORM), "must be specified when qk_norm is enabled", {}
    ),
    "qkv.qk_norm_one_side": Rule(
        qkv,
        dict(num_q_heads=4, num_kv_heads=1, qk_norm_pre_rope_q_norm=NormType.RMS_NORM),
        "for both q and k",
        {},
    ),
    "qkv.cache_alone": Rule(qkv, dict(k_cache=ZEROS(1)), "need use_block_kv", {}),
    "qkv.norm_bias_2d": Rule(
        qkv,
        dict(norm_weights=ZEROS(1, 512), norm_b=ZEROS(512), norm_type=NormType.LAYER_NORM),
        r"norm_b shape must be \[1, H\]",
        dict(norm_weights=ZEROS(1, 512), norm_b=ZEROS(1, 512), norm_type=NormType.LAYER_NORM),
    ),
    "qkv.cache_layout": Rule(
        qkv_write, dict(output_layout=QKVOutputLayout.NBSd), "needs output_layout BSD", {}
    ),
    "flash.gqa": Rule(flash, dict(heads=3), "multiple of the KV batch", dict(heads=4)),
    "flash.head_dim_qk": Rule(
        flash, dict(D=192, Dv=128), "q and k must be at most 128, .* got 192", dict(D=128, Dv=64)
    ),
    "flash.window_causal": Rule(
        flash, dict(sliding_window=4, causal_mask=False), "needs causal_mask", dict(sliding_window=4)
    ),
    "flash.window_range": Rule(flash, dict(sliding_window=-1), "between 0 and", dict(sliding_window=0)),
    "flash.bounds": Rule(
        flash,
        dict(bound_min=ZEROS(2, 8, 1)),
        "together",
        dict(bound_min=ZEROS(2, 8, 1), bound_max=ZEROS(2, 8, 1)),
    ),
    "flash.prior": Rule(
        flash,
        dict(k_prior=ZEROS(2, 64, 4)),
        "together",
        PRIOR,
    ),
    "flash.prior_length": Rule(
        flash,
        dict(k_prior=ZEROS(2, 64, 4), v_prior=ZEROS(2, 4, 64), prior_used_len=ZEROS(2)),
        "one prefix length",
        {},
    ),
    "segmented.head_dim": Rule(
        segmented, dict(D=256), "head_dim must be at most 128, got 256", dict(D=128), ValueError
    ),
    "segmented.size": Rule(
        segmented,
        dict(S=256, segment=256),
        "kv_segment_size must be one of",
        dict(S=1024, segment=1024),
        ValueError,
    ),
    "segmented.length": Rule(
        segmented, dict(S=256), r"must equal kv_segment_size, got \(256, 512\)", {}, ValueError
    ),
    "segmented.blocks": Rule(
        segmented,
        dict(block_size=96),
        "kv_segment_size must be a multiple of block_size",
        dict(block_size=128),
        ValueError,
    ),
    "segmented.window": Rule(
        segmented,
        dict(sliding_window=48),
        "sliding_window must be a multiple of block_size",
        dict(sliding_window=64),
        ValueError,
    ),
    "segmented.prior": Rule(
        segmented, dict(prior=33), "prior_tokens must be a multiple of block_size", dict(prior=32), ValueError
    ),
    "flash.bounds_prior": Rule(
        flash,
        dict(bound_min=ZEROS(2, 8, 1), bound_max=ZEROS(2, 8, 1), **PRIOR),
        "bounds do not go with a prior KV",
        PRIOR,
    ),
    "o_proj.bias": Rule(
        o_proj, dict(bias=ZEROS(256)), r"Bias shape must be \[1, H\]", dict(bias=ZEROS(1, 256))
    ),
    "o_proj.scales": Rule(o_proj, dict(weight_scales=ZEROS(128, 1)), "weight_scales", {}),
    "mlp.gate_bias": Rule(
        mlp, dict(gate_b=ZEROS(256)), r"Bias shape must be \[1, I\], got \(256,\)", dict(gate_b=ZEROS(1, 256))
    ),
    "mlp.up_bias": Rule(mlp, dict(up_b=ZEROS(256)), r"\[1, I\]", dict(up_b=ZEROS(1, 256))),
    "mlp.down_bias": Rule(mlp, dict(down_b=ZEROS(256)), r"\[1, H\]", dict(down_b=ZEROS(1, 256))),
    "mlp.norm_weight": Rule(
        mlp,
        dict(ln_w=ZEROS(256), norm_type=NormType.RMS_NORM),
        r"ln_w shape must be \[1, H\]",
        dict(ln_w=ZEROS(1, 256), norm_type=NormType.RMS_NORM),
    ),
    "mlp.norm_weight_missing": Rule(
        mlp,
        dict(norm_type=NormType.RMS_NORM),
        "needs ln_w",
        dict(norm_type=NormType.RMS_NORM_SKIP_GAMMA),
        ValueError,
    ),
    "mlp.norm_bias": Rule(
        mlp,
        dict(ln_w=ZEROS(1, 256), norm_b=ZEROS(1, 256), norm_type=NormType.RMS_NORM),
        "only for LAYER_NORM",
        dict(ln_w=ZEROS(1, 256), norm_b=ZEROS(1, 256), norm_type=NormType.LAYER_NORM),
    ),
    "mlp.norm_bias_2d": Rule(
        mlp,
        dict(ln_w=ZEROS(1, 256), norm_b=ZEROS(256), norm_type=NormType.LAYER_NORM),
        r"norm_b shape must be \[1, H\]",
        dict(ln_w=ZEROS(1, 256), norm_b=ZEROS(1, 256), norm_type=NormType.LAYER_NORM),
    ),
    "mlp.dtype": Rule(mlp, dict(dtype=torch.float64), "bf16, fp16, fp32 or fp8", dict(dtype=torch.float16)),
}
FALLBACKS = {
    "qkv.hidden": Rule(qkv, dict(H=448), "multiple of 128", {}),
    "qkv.hidden_max": Rule(qkv, dict(S=1, H=24576 + 256), "above 24576", dict(S=1, H=24576)),
    "qkv.columns_hidden": Rule(qkv, dict(H=256), "more QKV columns than hidden size", dict(H=384)),
    "qkv.columns": Rule(qkv, dict(H=4352, F=4224), "more than 4096 QKV columns", dict(H=4352, F=4096)),
    "qkv.NBdS": Rule(
        qkv,
        dict(output_layout=QKVOutputLayout.NBdS, d_head=128),
        "NBdS",
        dict(output_layout=QKVOutputLayout.NBSd, d_head=128),
    ),
    "qkv.NBSd": Rule(qkv, dict(output_layout=QKVOutputLayout.NBSd, d_head=64), "needs d_head 128", {}),
    "qkv.norm_bias": Rule(qkv, dict(norm_b=ZEROS(1, 512)), "only for LAYER_NORM", {}),
    "flash.heads": Rule(flash, dict(heads=514), "more than 512 query heads", dict(heads=512)),
    "flash.head_dim": Rule(flash, dict(D=256), "head_dim above 128", dict(D=128)),
    "flash.length": Rule(
        flash,
        dict(S=1, Sk=131073, D=2, heads=1, kv=1),
        "above 131072",
        dict(S=1, Sk=131072, D=2, heads=1, kv=1),
    ),
    "flash.length_q": Rule(
        flash,
        dict(S=131073, Sk=1, D=2, heads=1, kv=1),
        "above 131072",
        dict(S=131072, Sk=1, D=2, heads=1, kv=1),
    ),
    "o_proj.hidden": Rule(o_proj, dict(H=20706), "above 20705", dict(H=20704)),
    "o_proj.hidden_odd": Rule(o_proj, dict(H=255), "must be even", {}),
    "o_proj.heads": Rule(o_proj, dict(N=18), "more than 17 heads", dict(N=17)),
    "o_proj.head_dim": Rule(o_proj, dict(D=256), "head_dim above 128", dict(D=128)),
    "o_proj.tokens": Rule(
        o_proj, dict(N=1, D=2, S=131073, H=2), "more than 131072 tokens", dict(N=1, D=2, S=131072, H=2)
    ),
    "mlp.hidden": Rule(mlp, dict(H=320), "multiple of 128", {}),
    "mlp.hidden_decode": Rule(mlp, dict(H=384), "multiple of 256", dict(H=384, T=129)),
    "mlp.inner": Rule(mlp, dict(T=129, inner=4097), "above 4096", dict(T=129, inner=4096)),
    "argsort.dtype": Rule(
        lambda dtype: NF.argsort_unstable(torch.ones(4, dtype=dtype)),
        dict(dtype=torch.int64),
        "float32 and int32",
        dict(dtype=torch.int32),
    ),
    "argmax.axis": Rule(one_rank_argmax, dict(shape=(128, 4), dim=0), "last axis of a 2-D tensor", {}),
    "argmax.columns": Rule(one_rank_argmax, dict(shape=(4, 127)), "at least 128 columns", {}),
    "topk.axis": Rule(lambda dim: topk(ZEROS(4, 4), 2, dim, dim), dict(dim=0), "last axis", dict(dim=1)),
    "topk.all": Rule(lambda k: topk(ZEROS(4, 4), k, 1, 1), dict(k=4), "0 < k < size", dict(k=3)),
    "topk.dtype": Rule(
        lambda dtype: topk(ZEROS(4, 4, dtype=dtype), 2, 1, 1),
        dict(dtype=torch.float16),
        "bf16 and fp32",
        dict(dtype=torch.bfloat16),
    ),
}


@pytest.mark.parametrize("rule", ERRORS.values(), ids=ERRORS)
def test_error(rule):
    check_error(rule)


@pytest.mark.parametrize("rule", FALLBACKS.values(), ids=FALLBACKS)
def test_fallback(rule):
    check_fallback(rule)


def test_calls_that_keep_all_rules_leave_no_record():
    rules.reset()
    for call in (qkv, flash, segmented, o_proj, mlp):
        call()
    assert rules.records() == []


def test_not_strict_goes_on_after_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_SIM_STRICT", "0")
    rules.reset()
    segmented(S=256)
    mlp(gate_b=ZEROS(256))
    assert [(r.operator, r.kind, r.rule) for r in rules.records()] == [
        ("segmented_attention", "error", "segment-length"),
        ("mlp", "error", "gate_b-2d"),
    ]


def test_unsupported_arguments_are_named():
    check_named(mlp, dict(gate_clamp_upper_limit=7.0, up_clamp_lower_limit=-7.0, output_dtype=torch.float32))
    check_named(qkv, dict(store_output_in_sbuf=True, transpose_k_cache=True, fp8_packed=True))
    check_named(flash, dict(cp_offset=ZEROS(1, 1), global_cp_deg=2))
    check_named(partial(NF.sample, ZEROS(1, 4)), dict(all2all_group=object(), capture_topk=True))
