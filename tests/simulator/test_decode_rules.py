"""The hardware rules of `attention_decode` and its mask."""

import pytest
import torch
import vllm_neuron.functional as NF
from rule_table import Rule, check_error, check_fallback, check_named
from vllm_neuron.simulator import rules


def decode(
    *,
    B=2,
    S=1,
    H=256,
    D=64,
    q=4,
    kv=1,
    context=256,
    block_len=32,
    table_dtype=torch.int32,
    fp8=False,
    dtype=torch.bfloat16,
    **changes,
):
    """A decode call in which every rule holds; `changes` replace arguments, or drop them when None."""
    columns = (q + 2 * kv) * D
    cache_dtype = torch.float8_e4m3fn if fp8 else dtype
    blocks = torch.arange(context // block_len, dtype=torch.int32)
    table = (blocks[:, None] * kv + torch.arange(kv)).T if kv > 1 else blocks
    arguments = dict(
        W_qkv=torch.zeros(H, columns, dtype=dtype),
        active_blocks_table=table.expand(B, *table.shape).to(table_dtype),
        K_cache=torch.zeros(context // block_len, kv, block_len, D).to(cache_dtype),
        V_cache=torch.zeros(context // block_len, kv, block_len, D).to(cache_dtype),
        pos_ids=torch.zeros(B, S),
        W_out=torch.zeros(q * D, H, dtype=dtype),
        kv_cache_update_idx=torch.zeros(B, S, dtype=torch.int64),
        update_cache=True,
    )
    NF.attention_decode(torch.ones(B, S, H, dtype=dtype), **{**arguments, **changes})


def mask(*, s_prior=256, block_len=32, bs=1):
    NF.gen_attention_decode_mask(torch.zeros(1, bs), bs, 4, 1, s_prior, block_len=block_len)


ZEROS = torch.zeros
FP8 = dict(fp8=True, k_scale=ZEROS(1, 1), v_scale=ZEROS(1, 1))

ERRORS = {
    "mask.tiles": Rule(
        mask, dict(bs=2, block_len=48), "times the resized block length, got", dict(bs=2, block_len=32)
    ),
    "decode.bias_qkv": Rule(
        decode,
        dict(bias_qkv=ZEROS(384)),
        r"Bias shape must be \[1, I\], got \(384,\)",
        dict(bias_qkv=ZEROS(1, 384, dtype=torch.bfloat16)),
    ),
    "decode.bias_out": Rule(
        decode,
        dict(bias_out=ZEROS(256)),
        r"Bias shape must be \[1, H\], got \(256,\)",
        dict(bias_out=ZEROS(1, 256, dtype=torch.bfloat16)),
    ),
    "decode.gamma": Rule(
        decode,
        dict(rmsnorm_X_enabled=True, rmsnorm_X_gamma=ZEROS(256)),
        r"\[1, H\], got \(256,\)",
        dict(rmsnorm_X_enabled=True, rmsnorm_X_gamma=ZEROS(1, 256)),
    ),
    "decode.qk_norm": Rule(
        decode,
        dict(rmsnorm_QK_pre_rope_enabled=True, rmsnorm_QK_pre_rope_W_Q=ZEROS(1, 4 * 64)),
        "head_dim values",
        dict(rmsnorm_QK_pre_rope_enabled=True, rmsnorm_QK_pre_rope_W_Q=ZEROS(64, 1)),
    ),
    "decode.cos": Rule(
        decode,
        dict(cos=ZEROS(2, 1, 64), sin=ZEROS(2, 1, 64)),
        r"cos shape must be \[D / 2, B, S\]",
        dict(cos=ZEROS(32, 2, 1), sin=ZEROS(32, 2, 1)),
    ),
    "decode.int64_table": Rule(
        decode, dict(table_dtype=torch.int64), "active_blocks_table must be int32, got torch.int64", {}
    ),
    "decode.head_dim_above_128": Rule(
        decode, dict(D=256, q=1), "head_dim must be even and at most 128, got 256", dict(D=128, q=2)
    ),
    "decode.head_dim_odd": Rule(decode, dict(D=63), "head_dim must be even", dict(D=62)),
    "decode.qkv_width": Rule(
        decode, dict(W_qkv=ZEROS(256, 400, dtype=torch.bfloat16)), "multiple of head_dim, got 400", {}
    ),
    "decode.hidden_256": Rule(decode, dict(H=384), "H / 128 must be divisible by 2", dict(H=512)),
    "decode.context_per_core": Rule(
        decode, dict(B=1, context=384), "Context per core must be a multiple of 128", dict(B=1, context=512)
    ),
    "decode.context_128": Rule(decode, dict(context=192), "Context per core", dict(context=128)),
    "decode.update_idx": Rule(
        decode, dict(kv_cache_update_idx=ZEROS(2, dtype=torch.int64)), "kv_cache_update_idx", {}
    ),
    "decode.pos_ids": Rule(decode, dict(pos_ids=ZEROS(1, 2)), r"pos_ids shape must be \[B, S_tkg\]", {}),
    "decode.mask_shape": Rule(
        decode,
        dict(pos_ids=None, attention_mask=ZEROS(256, 2, 1, 1)),
        "attention_mask shape",
        dict(pos_ids=None, attention_mask=torch.ones(256, 2, 4, 1)),
    ),
    "decode.active_mask": Rule(
        decode,
        dict(attention_mask=ZEROS(256, 2, 4, 1)),
        "With pos_ids the mask must be",
        dict(attention_mask=ZEROS(1, 2, 4, 1)),
    ),
    "decode.cache_shapes": Rule(
        decode, dict(K_cache=ZEROS(9, 1, 32, 64, dtype=torch.bfloat16)), "same shape", {}
    ),
    "decode.fp8_scale_on_bf16": Rule(
        decode, dict(k_scale=ZEROS(1, 1), v_scale=ZEROS(1, 1)), "must be float8_e4m3", FP8
    ),
    "decode.fp8_fp32_query": Rule(decode, dict(FP8, dtype=torch.float32), "float32 queries", FP8),
    "decode.table_heads": Rule(
        decode,
        dict(kv=2, active_blocks_table=ZEROS(2, 3, 8, dtype=torch.int32)),
        "per head must be",
        dict(kv=2),
    ),
    "decode.table_entries": Rule(
        decode,
        dict(kv=2, active_blocks_table=ZEROS(2, 2, 8, dtype=torch.int32)),
        r"block id \* kv_heads \+ head",
        dict(kv=2),
    ),
    "decode.head_groups": Rule(decode, dict(q=3, kv=2), "multiple of KV heads", dict(q=4, kv=2), ValueError),
    "decode.window_without_pos": Rule(
        decode,
        dict(pos_ids=None, swa_start_pos_ids=ZEROS(2, 1)),
        "needs pos_ids",
        dict(swa_start_pos_ids=ZEROS(2, 1)),
        ValueError,
    ),
    "decode.no_table": Rule(decode, dict(active_blocks_table=None), "pos_ids needs", {}, ValueError),
    "decode.one_scale": Rule(decode, dict(fp8=True, k_scale=ZEROS(1, 1)), "together", FP8, ValueError),
    "decode.no_slots": Rule(
        decode,
        dict(kv_cache_update_idx=None),
        "needs kv_cache_update_idx",
        dict(kv_cache_update_idx=None, update_cache=False),
    ),
    "mask.context_128": Rule(
        mask, dict(s_prior=320), "s_prior must be a multiple of 128", dict(s_prior=256), ValueError
    ),
    "mask.context_tiles": Rule(
        mask,
        dict(s_prior=384),
        "Context per core",
        dict(s_prior=512),
    ),
}
FALLBACKS = {
    "decode.hidden": Rule(decode, dict(H=192), "multiple of 128", {}),
    "decode.gqa_table": Rule(
        decode, dict(kv=2, active_blocks_table=ZEROS(2, 8, dtype=torch.int32)), "block table per head", {}
    ),
    "decode.gqa_cache": Rule(decode, dict(kv=2), "one KV head in a 4-D cache", {}),
    "decode.qk_norm": Rule(
        decode,
        dict(rmsnorm_QK_post_rope_enabled=True),
        "head_dim == 128",
        dict(rmsnorm_QK_post_rope_enabled=True, D=128, q=2),
    ),
    "decode.new_tokens": Rule(decode, dict(S=2), "one new token per sequence", dict(S=2, update_cache=False)),
}


@pytest.mark.parametrize("rule", ERRORS.values(), ids=ERRORS)
def test_error(rule):
    check_error(rule)


@pytest.mark.parametrize("rule", FALLBACKS.values(), ids=FALLBACKS)
def test_fallback(rule):
    check_fallback(rule)


def test_calls_that_keep_all_rules_leave_no_record():
    rules.reset()
    decode()
    decode(dtype=torch.float32)
    mask()
    assert rules.records() == []


def test_not_strict_goes_on_after_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_SIM_STRICT", "0")
    rules.reset()
    decode(bias_qkv=ZEROS(384, dtype=torch.bfloat16), D=64, table_dtype=torch.int64)
    mask(s_prior=384)
    assert [(r.operator, r.kind, r.rule) for r in rules.records()] == [
        ("attention_decode", "error", "bias_qkv-2d"),
        ("attention_decode", "error", "block-table-int32"),
        ("gen_attention_decode_mask", "error", "context-per-core"),
        ("gen_attention_decode_mask", "error", "context-tiles"),
    ]


def test_unsupported_arguments_are_named():
    names = ("out_in_sb", "skip_attention", "K_cache_transposed", "transposed_out", "is_h_transposed_by_4")
    check_named(decode, dict.fromkeys(names, True) | dict(attention_dp=2))
    check_named(lambda **dcp: decode(dcp_group=object(), **dcp), dict(dcp_size=2))
