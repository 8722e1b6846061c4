"""Operators in a graph without breaks, as the device compiles a model's forward."""

import pytest
import torch
import vllm_neuron.functional as NF
from nkilib.core.moe.moe_cte.moe_cte import MoECTEImplementation
from nkilib.core.utils.common_types import NormType

H, D, Q, KV = 256, 64, 4, 2
COLUMNS = (Q + 2 * KV) * D


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) / 8


def decode(size, **mask):
    table = torch.arange(size * 8, dtype=torch.int32).view(size, 8)
    arguments = dict(
        X=normal(size, 1, H),
        W_qkv=normal(H, COLUMNS),
        bias_qkv=normal(1, COLUMNS),
        rmsnorm_X_enabled=True,
        rmsnorm_X_gamma=normal(1, H),
        rmsnorm_QK_pre_rope_enabled=True,
        rmsnorm_QK_pre_rope_W_Q=normal(1, D),
        rmsnorm_QK_pre_rope_W_K=normal(1, D),
        cos=normal(D // 2, size, 1),
        sin=normal(D // 2, size, 1),
        active_blocks_table=table,
        K_cache=normal(size * 8 + 1, KV, 32, D),
        V_cache=normal(size * 8 + 1, KV, 32, D),
        sink=normal(Q, 1),
        W_out=normal(Q * D, H),
        update_cache=True,
        kv_cache_update_idx=torch.full((size, 1), -1).to(torch.uint32),
    )
    return arguments | mask


def decode_by_positions(size):
    pos = torch.full((size, 1), 100.0)
    return NF.attention_decode, decode(size, pos_ids=pos, swa_start_pos_ids=pos - 64)


def decode_by_mask(size):
    def run(pos_ids, bs, **arguments):
        mask = NF.gen_attention_decode_mask(pos_ids, bs, Q, 1, 256, start_pos=pos_ids - 64, block_len=32)
        return NF.attention_decode(**arguments, attention_mask=mask)

    return run, decode(size, pos_ids=torch.full((1, size), 100.0), bs=size)


def decode_per_head(size):
    pos = torch.full((size, 1), 100.0)
    table = torch.arange(size * 8, dtype=torch.int32).view(size, 1, 8) * KV
    table = table + torch.arange(KV, dtype=torch.int32)[:, None]
    arguments = decode(size, pos_ids=pos) | dict(active_blocks_table=table, update_cache=False)
    return NF.attention_decode, arguments


def qkv(size):
    return NF.qkv_proj, dict(
        hidden=normal(1, size, H),
        qkv_weights=normal(H, COLUMNS),
        d_head=D,
        cos_cache=normal(1, size, D),
        sin_cache=normal(1, size, D),
        num_q_heads=Q,
        num_kv_heads=KV,
        qk_norm_pre_rope_q_norm=NormType.RMS_NORM,
        qk_norm_pre_rope_k_norm=NormType.RMS_NORM,
        k_cache=normal(8, KV, 32, D),
        v_cache=normal(8, KV, 32, D),
        use_block_kv=True,
        block_size=32,
        slot_mapping=torch.arange(size, dtype=torch.int32),
    )


def flash(size):
    kv = dict(k=normal(KV, D, size), v=normal(KV, size, D))
    return NF.flash_attention, kv | dict(q=normal(Q, size, D), sink=normal(Q, 1), sliding_window=7)


def flash_with_prefix(size):
    function, arguments = flash(size)
    prior = dict(k_prior=normal(KV, D, 16), v_prior=normal(KV, 16, D), prior_used_len=torch.tensor([5]))
    return function, arguments | prior


def segmented(size):
    return NF.segmented_attention, dict(
        q=normal(Q, 512, D),
        k_cache=normal(20, KV, 32, D),
        v_cache=normal(20, KV, 32, D),
        block_tables=torch.arange(19 + size // 8, dtype=torch.int32)[None] % 20,
        prior_tokens=torch.tensor([[32]]),
        block_size=32,
        kv_segment_size=512,
        sliding_window=64,
    )


def o_proj(size):
    return NF.o_proj, dict(active=normal(1, Q, D, size), weight=normal(Q * D, H), bias=normal(1, H))


def mlp(size):
    weights = dict(gate_w=normal(H, 64), up_w=normal(H, 64), down_w=normal(64, H), up_b=normal(1, 64))
    return NF.mlp, weights | dict(hidden=normal(size, H), ln_w=normal(1, H), norm_type=NormType.RMS_NORM)


def sample(size):
    per_row = dict(
        temperature=torch.full((size,), 0.7), top_k=torch.full((size,), 9), top_p=torch.full((size,), 0.9)
    )
    return NF.sample, per_row | dict(logits=normal(size, 512), deterministic=True)


def cumsum(size):
    return NF.cumsum, dict(tensor=normal(size, 20))


def merge(size):
    return NF.merge_prompt_embeds, dict(
        hidden_states=normal(size, 8),
        inputs_embeds=normal(size, 8),
        is_token_ids=torch.ones(size, dtype=torch.bool),
    )


def router(size):
    return NF.router, dict(hidden_states=normal(size, H), router_weights=normal(H, 8), top_k=2)


def prefill_experts(size):
    def run(affinities, hidden, gate_up, down):
        masked, ids, block_to_expert, conditions = NF.build_blockwise_mapping(affinities, 8, 2, 128, None)
        return NF.moe_cte(
            hidden,
            masked,
            gate_up,
            down,
            ids,
            block_to_expert,
            128,
            MoECTEImplementation.shard_on_block,
            conditions=conditions,
            gate_clamp_upper_limit=0.1,
        )

    affinities = torch.zeros(size, 8).scatter(1, normal(size, 8).topk(2).indices, 0.5)
    return run, dict(
        affinities=affinities, hidden=normal(size, H), gate_up=normal(8, H, 2, 32), down=normal(8, 32, H)
    )


def decode_block_experts(size):
    return NF.moe_block_tkg, dict(
        inp=normal(size, H),
        gamma=normal(1, H),
        router_weights=normal(H, 8),
        expert_gate_up_weights=normal(4, H, 2, 32),
        expert_down_weights=normal(4, 32, H),
        rank_id=torch.ones(1, 1, dtype=torch.int32),
        is_all_expert=True,
        top_k=2,
        hidden_actual=200,
        norm_topk_prob=True,
    )


def decode_experts(size):
    return NF.moe_tkg, dict(
        hidden_input=normal(size, H),
        expert_gate_up_weights=normal(4, H, 2, 32),
        expert_down_weights=normal(4, 32, H),
        expert_affinities=normal(size, 8).softmax(1),
        expert_index=normal(size, 8).topk(2).indices,
        is_all_expert=True,
        rank_id=torch.ones(1, 1, dtype=torch.int32),
    )


def router_topk(size):
    weights = dict(gamma=normal(1, H), router_weights=normal(H, 8), router_bias=normal(1, 8), top_k=2)
    return NF.rmsnorm_router_topk_tkg, weights | dict(hidden_states=normal(1, size, H))


def local_affinities(size):
    return NF.get_local_expert_affinities, dict(
        expert_affinities=normal(size, 8), local_expert_indices=torch.arange(4, 8)
    )


def quantized_norm(size):
    return NF.rmsnorm_quant, dict(
        hidden=normal(size, 64), ln_w=normal(64), input_dequant_scale=torch.full((128, 1), 0.01)
    )


def swa_fused(size):
    columns = (Q + 2 * KV) * D
    return NF.swa_fused_attention, dict(
        hidden_states=normal(1, 128, H),
        qkv_weight=normal(H, columns),
        op_weight=normal(Q * D, H),
        k_cache=normal(9 + size, KV, 32, D),
        v_cache=normal(9 + size, KV, 32, D),
        block_tables=torch.arange(1, 8, dtype=torch.int32)[None],
        cos_cache=normal(1, 128, D),
        sin_cache=normal(1, 128, D),
        sink=normal(1, Q),
        prior_tokens=torch.tensor([[64]]),
        qkv_bias=normal(1, columns),
        op_bias=normal(1, H),
        scale=0.1,
        sliding_window=20,
        block_size=32,
        num_q_heads=Q,
        num_kv_heads=KV,
        d_head=D,
    )


CASES = [
    decode_by_positions,
    decode_by_mask,
    decode_per_head,
    qkv,
    flash,
    flash_with_prefix,
    segmented,
    o_proj,
    mlp,
    sample,
    cumsum,
    merge,
    router,
    prefill_experts,
    decode_block_experts,
    decode_experts,
    router_topk,
    local_affinities,
    quantized_norm,
    swa_fused,
]


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def clone(arguments):
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("case", CASES)
def test_traces_whole_and_gives_the_same(case):
    """Three sizes: the second makes dynamo's shapes symbolic, the third must not need a new graph break."""
    torch._dynamo.reset()
    function, _ = case(8)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for size in (8, 16, 24):
        _, arguments = case(size)
        eager, traced = clone(arguments), clone(arguments)
        expected = tensors(function(**eager))
        for got, want in zip(tensors(compiled(**traced)), expected, strict=True):
            torch.testing.assert_close(got, want)
        for name, value in eager.items():
            if isinstance(value, torch.Tensor):  # caches are written in place
                torch.testing.assert_close(traced[name], value)


def test_a_broken_rule_stops_the_trace_with_the_devices_message():
    torch._dynamo.reset()
    compiled = torch.compile(NF.attention_decode, fullgraph=True, backend="eager")
    _, arguments = decode_by_positions(8)
    arguments["bias_qkv"] = arguments["bias_qkv"][0]
    with pytest.raises(Exception, match=r"Bias shape must be \[1, I\], got \(512,\)"):
        compiled(**arguments)
