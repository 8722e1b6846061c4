"""The hardware rules of the MoE operators, and those of the operators beside them."""

import pytest
import torch
import vllm_neuron.functional as NF
from nkilib.core.moe.moe_cte.moe_cte import BlockShardStrategy, MoECTEImplementation
from nkilib.core.utils.common_types import ExpertAffinityScaleMode, QuantizationType
from rule_table import Rule, check_error, check_fallback, check_named
from vllm_neuron.simulator import rules

ZEROS = torch.zeros
INT32 = torch.int32
RANK_0 = ZEROS(1, 1, dtype=INT32)


def router(*, hidden=(4, 64), weights=(64, 8), top_k=2, **changes):
    NF.router(torch.ones(hidden), ZEROS(weights), top_k, **changes)


def mapping(*, T=128, E=4):
    affinities = (torch.arange(E) < 2).expand(T, E).float()
    NF.build_blockwise_mapping(affinities, E, 2, 128, moe_group=None)


def cte(
    *, H=512, inner=128, block_size=128, on="shard_on_block", ids=None, blocks=2, id_dtype=INT32, **changes
):
    NF.moe_cte(
        torch.ones(8, H),
        ZEROS(16, 1),
        ZEROS(2, H, 2, inner),
        changes.pop("down", ZEROS(2, inner, H)),
        torch.full((ids or blocks * block_size,), -1, dtype=id_dtype),
        ZEROS(blocks, dtype=INT32),
        block_size,
        MoECTEImplementation[on],
        **changes,
    )


def block_tkg(*, T=4, H=256, inner=128, E=4, **changes):
    gamma = changes.pop("gamma", ZEROS(1, H))
    router = changes.pop("router_weights", ZEROS(H, E))
    NF.moe_block_tkg(torch.ones(T, H), gamma, router, ZEROS(E, H, 2, inner), ZEROS(E, inner, H), **changes)


def tkg(*, T=4, E=4, K=2, dtype=torch.bfloat16, is_all_expert=False, **changes):
    weights = ZEROS(E, 256, 2, 32, dtype=dtype), ZEROS(E, 32, 256, dtype=dtype)
    index = ZEROS(T, K, dtype=INT32)
    NF.moe_tkg(torch.ones(T, 256, dtype=dtype), *weights, ZEROS(T, E), index, is_all_expert, **changes)


def router_topk(*, shape=(1, 256, 256), E=4, gamma=None, weights=None, dtype=torch.float32, **changes):
    H = shape[-1]
    gamma = ZEROS(1, H) if gamma is None else gamma
    weights = ZEROS(H, E) if weights is None else weights
    NF.rmsnorm_router_topk_tkg(torch.ones(shape, dtype=dtype), gamma, weights, **changes)


def swa(*, S=128, D=32, window=32, block_size=32, qkv_bias=None, op_bias=None, cache=None):
    columns = 4 * D
    cache = ZEROS(S // block_size + 1, 1, block_size, D) if cache is None else cache
    NF.swa_fused_attention(
        torch.ones(1, S, 64),
        ZEROS(64, columns),
        ZEROS(2 * D, 64),
        cache,
        cache.clone(),
        torch.arange(-(-S // block_size), dtype=INT32)[None],
        ZEROS(1, S, D),
        ZEROS(1, S, D),
        ZEROS(1, 2),
        RANK_0,
        ZEROS(1, columns) if qkv_bias is None else qkv_bias,
        ZEROS(1, 64) if op_bias is None else op_bias,
        1.0,
        window,
        block_size,
        2,
        1,
        D,
    )


def quant(*, shape):
    NF.rmsnorm_quant(torch.ones(shape), ZEROS(shape[-1]), quantization_type=QuantizationType.ROW)


NO_SCALE, POST, PRE, DELAYED = (
    ExpertAffinityScaleMode[name] for name in ("NO_SCALE", "POST_SCALE", "PRE_SCALE", "PRE_SCALE_DELAYED")
)
CTE_BIASES = dict(gate_and_up_proj_bias=ZEROS(2, 2, 128), down_proj_bias=ZEROS(2, 512))
HYBRID = dict(on="shard_on_i_hybrid", block_size=256)

ERRORS = {
    "router.hidden": Rule(router, dict(hidden=(2, 2, 64)), "2-D", {}, ValueError),
    "router.fit": Rule(
        router,
        dict(hidden=(4, 32)),
        "do not fit",
        dict(hidden=(64, 4), transposed_hidden_states=True),
        ValueError,
    ),
    "router.bias": Rule(
        router,
        dict(router_bias=ZEROS(1, 8)),
        r"router_bias shape must be \(8,\), got \(1, 8\)",
        dict(router_bias=ZEROS(8)),
        ValueError,
    ),
    "router.gamma": Rule(router, dict(gamma=ZEROS(1, 64)), "gamma shape", dict(gamma=ZEROS(64)), ValueError),
    "router.top_k": Rule(router, dict(top_k=9), "between 1 and 8", dict(top_k=8), ValueError),
    "router.dtype": Rule(
        router,
        dict(computation_dtype=torch.float64),
        "computation_dtype",
        dict(computation_dtype=torch.float16),
        ValueError,
    ),
    "router.order": Rule(
        router, dict(router_computation_order="topk"), "RouterComputationOrder", {}, ValueError
    ),
    "router.activation": Rule(
        router, dict(activation="relu"), "softmax, sigmoid", dict(activation="sigmoid"), ValueError
    ),
    "router.no_activation": Rule(
        router, dict(activation=None), "or a function", dict(activation=torch.tanh), ValueError
    ),
    "cte.block_size": Rule(cte, dict(block_size=64), "multiple of 128 for shard_on_block, got 64", {}),
    "cte.block_size_on_i": Rule(
        cte,
        dict(on="shard_on_i"),
        "multiple of 256 for shard_on_i, got 128",
        dict(on="shard_on_i", block_size=256),
    ),
    "cte.mapping_length": Rule(cte, dict(ids=128), "block_size entries", {}),
    "cte.int32": Rule(cte, dict(id_dtype=torch.int64), "token_position_to_id must be int32", {}),
    "cte.strategy": Rule(
        cte,
        dict(block_sharding_strategy=BlockShardStrategy.HI_LO),
        "PING_PONG only",
        dict(on="shard_on_i", block_size=256, block_sharding_strategy=BlockShardStrategy.HI_LO),
    ),
    "cte.delayed": Rule(
        cte,
        dict(expert_affinities_scaling_mode=DELAYED),
        "PRE_SCALE_DELAYED",
        dict(on="shard_on_i", block_size=256, expert_affinities_scaling_mode=DELAYED),
    ),
    "cte.skip_weight": Rule(
        cte,
        dict(on="shard_on_i", block_size=256, skip_weight=True),
        "cannot skip weights",
        dict(skip_weight=True),
    ),
    "cte.conditions": Rule(cte, HYBRID, "needs conditions", dict(HYBRID, conditions=ZEROS(2))),
    "cte.inner_16": Rule(cte, dict(inner=136), "multiple of 16, got 136", dict(inner=144)),
    "cte.hidden_on_i": Rule(
        cte, dict(on="shard_on_i", block_size=256, H=768), "multiple of 512", dict(H=768)
    ),
    "cte.weights": Rule(cte, dict(down=ZEROS(2, 128, 512, 1)[:, :64, :, 0]), r"\[E, I, H\]", {}),
    "cte.gate_up_bias": Rule(
        cte, dict(CTE_BIASES, gate_and_up_proj_bias=ZEROS(2, 256)), r"\[E, 2, I\], got \(2, 256\)", CTE_BIASES
    ),
    "cte.down_bias": Rule(
        cte,
        dict(CTE_BIASES, down_proj_bias=ZEROS(512)),
        r"\[E, H\], got \(512,\)",
        dict(CTE_BIASES, down_proj_bias=ZEROS(2, 1, 512)),
    ),
    "cte.both_biases": Rule(cte, dict(down_proj_bias=ZEROS(2, 512)), "for both projections", CTE_BIASES),
    "block_tkg.gamma": Rule(block_tkg, dict(gamma=ZEROS(256)), r"gamma shape must be \[1, H\]", {}),
    "block_tkg.router_bias": Rule(
        block_tkg,
        dict(router_bias=ZEROS(4)),
        r"router_bias shape must be \[1, E\], got \(4,\)",
        dict(router_bias=ZEROS(1, 4)),
    ),
    "block_tkg.router_dtype": Rule(
        block_tkg,
        dict(router_mm_dtype=torch.float64),
        "must be bf16, fp16 or fp32",
        dict(router_mm_dtype=torch.float16),
    ),
    "block_tkg.rank_id": Rule(
        block_tkg, dict(is_all_expert=True), "needs rank_id", dict(is_all_expert=True, rank_id=RANK_0)
    ),
    "block_tkg.tokens": Rule(
        block_tkg, dict(T=129), "at most 128 tokens", dict(T=129, is_all_expert=True, rank_id=RANK_0)
    ),
    "block_tkg.share": Rule(
        block_tkg,
        dict(router_weights=ZEROS(256, 8), rank_id=RANK_0),
        r"needs is_all_expert, got \(4, 8\)",
        dict(router_weights=ZEROS(256, 8), rank_id=RANK_0, is_all_expert=True),
    ),
    "tkg.tokens": Rule(tkg, dict(T=129), "at most 128 tokens", dict(T=129, is_all_expert=True)),
    "tkg.mode": Rule(
        tkg,
        dict(expert_affinities_scaling_mode=PRE),
        "NO_SCALE or POST_SCALE",
        dict(expert_affinities_scaling_mode=POST),
    ),
    "tkg.rank_id": Rule(
        tkg,
        dict(is_all_expert=True, expert_affinities_scaling_mode=POST),
        "needs rank_id",
        dict(is_all_expert=True, expert_affinities_scaling_mode=POST, rank_id=RANK_0),
    ),
    "tkg.top_k": Rule(tkg, dict(E=32, K=17), "at most 16 experts", dict(E=32, K=16)),
    "tkg.one_expert": Rule(tkg, dict(E=1, K=1), "more than one expert", dict(E=2, K=1)),
    "tkg.dtype": Rule(
        tkg, dict(dtype=torch.float16), "must be bfloat16", dict(dtype=torch.float32), NotImplementedError
    ),
    "router_topk.rank": Rule(router_topk, dict(shape=(256, 256)), r"\[B, S, H\]", {}),
    "router_topk.gamma": Rule(router_topk, dict(gamma=ZEROS(256, 1)), "gamma shape", dict(gamma=ZEROS(256))),
    "router_topk.weights": Rule(router_topk, dict(weights=ZEROS(4, 256)), "router_weights", {}),
    "router_topk.bias": Rule(
        router_topk, dict(router_bias=ZEROS(4)), r"\[1, 4\], got \(4,\)", dict(router_bias=ZEROS(1, 4))
    ),
    "router_topk.top_k": Rule(router_topk, dict(top_k=5), "between 1 and 4", dict(top_k=4)),
    "router_topk.hidden": Rule(
        router_topk, dict(shape=(1, 256, 384)), "multiple of 256, got 384", dict(shape=(1, 256, 512))
    ),
    "router_topk.hidden_actual": Rule(
        router_topk, dict(hidden_actual=257), "between 1 and 256", dict(hidden_actual=200)
    ),
    "router_topk.act": Rule(router_topk, dict(router_act_fn="sigmoid"), "SIGMOID or SOFTMAX", {}),
    "swa.window": Rule(swa, dict(window=33), "at most block_size", {}),
    "swa.tokens": Rule(swa, dict(S=96), "multiple of 128, got 96", dict(S=256)),
    "swa.head_dim": Rule(swa, dict(D=256), "at most 128", dict(D=128)),
    "swa.qkv_bias": Rule(swa, dict(qkv_bias=ZEROS(128)), r"Bias shape must be \[1, I\]", {}),
    "swa.op_bias": Rule(swa, dict(op_bias=ZEROS(64)), r"Bias shape must be \[1, H\]", {}),
}
FALLBACKS = {
    "mapping.tokens": Rule(mapping, dict(T=120), "multiple of 128 tokens", dict(T=256)),
    "mapping.experts": Rule(mapping, dict(E=3), "even number of experts", {}),
    "cte.inner": Rule(cte, dict(inner=112), "below 128", {}),
    "block_tkg.hidden": Rule(block_tkg, dict(H=384), "multiple of 256", {}),
    "block_tkg.inner": Rule(block_tkg, dict(inner=192), "multiple of 128", {}),
    "block_tkg.top_k": Rule(block_tkg, dict(E=16, top_k=9), "at most 8 experts", dict(E=16, top_k=8)),
    "router_topk.tokens": Rule(router_topk, dict(shape=(1, 128, 256)), "multiples of 256 tokens", {}),
    "router_topk.dtype": Rule(
        router_topk, dict(dtype=torch.float64), "bf16, fp16 and fp32", dict(dtype=torch.float16)
    ),
    "router_topk.experts": Rule(router_topk, dict(E=513), "more than 512 experts", dict(E=512)),
    "quant.batch": Rule(quant, dict(shape=(3, 1, 8)), "2 x 32768 x 16384", dict(shape=(2, 1, 8))),
}


@pytest.mark.parametrize("rule", ERRORS.values(), ids=ERRORS)
def test_error(rule):
    check_error(rule)


@pytest.mark.parametrize("rule", FALLBACKS.values(), ids=FALLBACKS)
def test_fallback(rule):
    check_fallback(rule)


def test_calls_that_keep_all_rules_leave_no_record():
    rules.reset()
    for call in (router, mapping, cte, block_tkg, tkg, router_topk, swa):
        call()
    assert rules.records() == []


def test_unsupported_arguments_are_named():
    one = ZEROS(1)
    check_named(
        cte, dict(gate_up_proj_scale=one, is_tensor_update_accumulating=False, use_packed_scales=True)
    )
    with pytest.raises(NotImplementedError, match="implementation"):
        cte(on="shard_on_block_mx")
    check_named(block_tkg, dict(shared_expert_gate_w=one, residual=one, hidden_act_bias=0.5))
    check_named(tkg, dict(expert_down_weights_scale=one, is_all_expert_dynamic=True, output_in_sbuf=True))
    check_named(router_topk, dict(quantization_type=QuantizationType.MX))
    check_named(
        lambda **scale: NF.swa_fused_attention(*[one] * 12, 1.0, 1, 1, 1, 1, 1, **scale), dict(k_scale=one)
    )


def test_a_token_with_more_experts_than_announced_is_refused():
    with pytest.raises(ValueError, match="num_experts_per_token 2"):
        NF.build_blockwise_mapping(torch.ones(128, 4), 4, 2, 128, moe_group=None)


def test_a_share_of_the_experts_needs_the_rank():
    with pytest.raises(ValueError, match="2 of 4 experts are local"):
        NF.moe_tkg(
            torch.ones(4, 256, dtype=torch.bfloat16),
            ZEROS(2, 256, 2, 32, dtype=torch.bfloat16),
            ZEROS(2, 32, 256, dtype=torch.bfloat16),
            ZEROS(4, 4),
            ZEROS(4, 2, dtype=INT32),
            is_all_expert=True,
        )
