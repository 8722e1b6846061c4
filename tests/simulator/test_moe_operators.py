"""The experts of prefill and decode against a loop over tokens and their experts."""

from dataclasses import dataclass

import nki.language as nl
import pytest
import torch
import torch.nn.functional as F
import vllm_neuron.functional as NF
from nkilib.core.moe.moe_cte.moe_cte import MoECTEImplementation
from nkilib.core.utils.common_types import ActFnType, ExpertAffinityScaleMode, RouterActFnType

T, H, I, E, K = 24, 256, 128, 8, 3  # noqa: E741
BLOCK = 128


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


X = normal(T, H)
ROUTER, ROUTER_BIAS = normal(H, E, seed=1, scale=0.1), normal(E, seed=2)
GATE_UP, DOWN = normal(E, H, 2, I, seed=3, scale=0.1), normal(E, I, H, seed=4, scale=0.1)
GATE_UP_BIAS, DOWN_BIAS = normal(E, 2, I, seed=5), normal(E, H, seed=6)


def swiglu(x):
    return x * torch.sigmoid(1.702 * x)


@dataclass
class Experts:
    """One token through one expert, as its definition says."""

    act: object = F.silu
    has_bias: bool = True
    gate_limit: float | None = None
    up_limits: tuple[float, float] | None = None

    def __call__(self, x, e, pre=1.0, delayed=1.0):
        gate, up = x * pre @ GATE_UP[e, :, 0], x * pre @ GATE_UP[e, :, 1]
        if self.has_bias:
            gate, up = gate + GATE_UP_BIAS[e, 0], up + GATE_UP_BIAS[e, 1]
        if self.gate_limit is not None:
            gate = gate.clamp(max=self.gate_limit)
        if self.up_limits is not None:
            up = up.clamp(*self.up_limits)
        y = self.act(gate) * up * delayed @ DOWN[e]
        return y + DOWN_BIAS[e] if self.has_bias else y

    def mixture(self, x, affinities):
        rows = []
        for row, weights in zip(x, affinities, strict=True):
            rows.append(sum(weights[e] * self(row, e) for e in weights.nonzero().flatten().tolist()))
        return torch.stack(rows)


def chosen(logits, values):
    """values [E] at the K largest logits, zero elsewhere."""
    kept = torch.zeros(E)
    best = logits.sort(descending=True).indices[:K]
    kept[best] = values[best]
    return kept


EXPERTS = {
    "silu": (Experts(), ActFnType.SiLU, {}),
    "gelu": (Experts(act=F.gelu, has_bias=False), ActFnType.GELU, {}),
    "swiglu_with_limits": (
        Experts(act=swiglu, gate_limit=0.5, up_limits=(-0.5, 0.7)),
        ActFnType.Swish,
        dict(gate_clamp_upper_limit=0.5, up_clamp_upper_limit=0.7, up_clamp_lower_limit=-0.5),
    ),
}


def prefill(x, affinities, act_fn=ActFnType.SiLU, experts=None, **options):
    """Block mapping and experts, of a part of the experts when `experts` is a slice."""
    held = experts or slice(None)
    affinities = affinities[:, held]
    masked, ids, block_to_expert, conditions = NF.build_blockwise_mapping(
        affinities.contiguous(), affinities.shape[1], K, BLOCK, None
    )
    weights = dict(gate_up_proj_weight=GATE_UP[held].to(x.dtype), down_proj_weight=DOWN[held].to(x.dtype))
    return NF.moe_cte(
        hidden_states=x,
        expert_affinities_masked=masked,
        **weights,
        token_position_to_id=options.pop("ids", ids),
        block_to_expert=options.pop("block_to_expert", block_to_expert),
        block_size=BLOCK,
        implementation=MoECTEImplementation.shard_on_block,
        conditions=conditions,
        activation_function=act_fn,
        **options,
    )


def biases(experts):
    return dict(gate_and_up_proj_bias=GATE_UP_BIAS, down_proj_bias=DOWN_BIAS) if experts.has_bias else {}


@pytest.mark.parametrize(("experts", "act_fn", "limits"), EXPERTS.values(), ids=EXPERTS)
def test_prefill_experts(experts, act_fn, limits):
    affinities = NF.router(X, ROUTER, K)
    output = prefill(X, affinities, act_fn, **biases(experts), **limits)
    torch.testing.assert_close(output, experts.mixture(X, affinities), rtol=1e-4, atol=1e-5)


def test_prefill_down_bias_in_both_shapes_and_a_padding_row():
    affinities = NF.router(X, ROUTER, K)
    plain = prefill(X, affinities, **biases(Experts()))
    both = dict(gate_and_up_proj_bias=GATE_UP_BIAS, down_proj_bias=DOWN_BIAS.unsqueeze(1))
    assert torch.equal(prefill(X, affinities, **both), plain)
    assert torch.equal(prefill(torch.cat([X, X[:1]]), affinities, **biases(Experts())), plain)


def test_prefill_scaling_modes():
    affinities = NF.router(X, ROUTER, K)
    experts = Experts(has_bias=False)
    expected = {
        ExpertAffinityScaleMode.NO_SCALE: lambda x, e, a: experts(x, e),
        ExpertAffinityScaleMode.PRE_SCALE: lambda x, e, a: experts(x, e, pre=a),
        ExpertAffinityScaleMode.POST_SCALE: lambda x, e, a: experts(x, e) * a,
    }
    for mode, one in expected.items():
        rows = [
            sum(one(X[t], e, affinities[t, e]) for e in affinities[t].nonzero().flatten()) for t in range(T)
        ]
        output = prefill(X, affinities, expert_affinities_scaling_mode=mode)
        torch.testing.assert_close(output, torch.stack(rows), rtol=1e-4, atol=1e-5)


def test_prefill_follows_the_mapping():
    """On the device a pair that is not in a block is not computed, whatever its affinity."""
    affinities = NF.router(X, ROUTER, K)
    _, ids, block_to_expert, _ = NF.build_blockwise_mapping(affinities, E, K, BLOCK, None)
    dropped = torch.where(ids == 5, -1, ids)
    without_token_5 = affinities.clone()
    without_token_5[5] = 0
    torch.testing.assert_close(prefill(X, affinities, ids=dropped), prefill(X, without_token_5))
    wrong = prefill(X, affinities, block_to_expert=block_to_expert.roll(1))
    assert not torch.allclose(wrong, prefill(X, affinities))


def test_prefill_over_partitions_sums_to_the_whole():
    affinities = NF.router(X, ROUTER, K)
    parts = [prefill(X, affinities, experts=slice(i, i + 4)) for i in (0, 4)]
    torch.testing.assert_close(parts[0] + parts[1], prefill(X, affinities), rtol=1e-4, atol=1e-5)


def test_prefill_in_bfloat16():
    affinities = NF.router(X, ROUTER, K)
    output = prefill(X.bfloat16(), affinities)
    expected = Experts(has_bias=False).mixture(X, affinities)
    assert output.dtype == torch.bfloat16
    assert (output - expected).norm() / expected.norm() < 0.02


GAMMA = normal(1, H, seed=8, scale=0.3) + 1


def decode(x=X, bias=True, **options):
    experts = dict(expert_gate_up_bias=GATE_UP_BIAS, expert_down_bias=DOWN_BIAS) if bias else {}
    arguments = dict(
        gamma=GAMMA,
        router_weights=ROUTER,
        router_bias=ROUTER_BIAS[None],
        expert_gate_up_weights=GATE_UP,
        expert_down_weights=DOWN,
        top_k=K,
        eps=1e-5,
        expert_affinities_scaling_mode=ExpertAffinityScaleMode.POST_SCALE,
        router_mm_dtype=nl.float32,
        **experts,
    )
    return NF.moe_block_tkg(x, **{**arguments, **options})


NORMED = F.rms_norm(X, (H,), GAMMA[0], 1e-5)
LOGITS = NORMED @ ROUTER + ROUTER_BIAS
ROUTING = {
    (RouterActFnType.SOFTMAX, False, False): lambda row: chosen(
        row, row.exp() / row.topk(K).values.exp().sum()
    ),
    (RouterActFnType.SOFTMAX, True, False): lambda row: chosen(row, row.softmax(0)),
    (RouterActFnType.SOFTMAX, True, True): lambda row: chosen(
        row, row.exp() / row.topk(K).values.exp().sum()
    ),
    (RouterActFnType.SIGMOID, True, False): lambda row: chosen(row, row.sigmoid()),
    (RouterActFnType.SIGMOID, False, True): lambda row: chosen(
        row, row.sigmoid() / row.topk(K).values.sigmoid().sum()
    ),
}


@pytest.mark.parametrize("routing", ROUTING)
def test_decode_block_routing(routing):
    act_fn, pre_norm, renormalize = routing
    output, logits = decode(router_act_fn=act_fn, router_pre_norm=pre_norm, norm_topk_prob=renormalize)
    affinities = torch.stack([ROUTING[routing](row) for row in LOGITS])
    torch.testing.assert_close(logits, LOGITS)
    torch.testing.assert_close(output, Experts().mixture(NORMED, affinities), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("experts", "act_fn", "limits"), EXPERTS.values(), ids=EXPERTS)
def test_decode_block_experts(experts, act_fn, limits):
    output = decode(
        X.view(4, 6, H), experts.has_bias, hidden_act_fn=act_fn, skip_router_logits=True, **limits
    )
    affinities = torch.stack([chosen(row, row.sigmoid()) for row in LOGITS])
    torch.testing.assert_close(output, experts.mixture(NORMED, affinities), rtol=1e-4, atol=1e-5)


def test_decode_block_without_scaling_sums_the_chosen():
    output = decode(expert_affinities_scaling_mode=ExpertAffinityScaleMode.NO_SCALE, skip_router_logits=True)
    chosen_ones = torch.stack([chosen(row, torch.ones(E)) for row in LOGITS])
    torch.testing.assert_close(output, Experts().mixture(NORMED, chosen_ones), rtol=1e-4, atol=1e-5)


def test_decode_block_rounds_the_router_as_the_device_does():
    _, logits = decode(bias=False, router_bias=None, router_mm_dtype=nl.bfloat16)
    rounded = NORMED.bfloat16().float() @ ROUTER.bfloat16().float()
    torch.testing.assert_close(logits, rounded)
    assert (logits - NORMED @ ROUTER).abs().max() > 1e-3


def test_decode_block_ignores_the_padding_of_the_hidden_size():
    padded = X.clone()
    padded[:, 200:] = 5.0  # garbage
    _, logits = decode(padded, hidden_actual=200)
    normed = torch.zeros(T, H)
    normed[:, :200] = F.rms_norm(X[:, :200], (200,), GAMMA[0, :200], 1e-5)
    torch.testing.assert_close(logits, normed @ ROUTER + ROUTER_BIAS)


def test_decode_block_over_partitions_sums_to_the_whole():
    parts = []
    for rank in range(2):
        held = slice(4 * rank, 4 * rank + 4)
        parts.append(
            decode(
                expert_gate_up_weights=GATE_UP[held],
                expert_down_weights=DOWN[held],
                expert_gate_up_bias=GATE_UP_BIAS[held],
                expert_down_bias=DOWN_BIAS[held],
                rank_id=torch.tensor([[rank]], dtype=torch.int32),
                is_all_expert=True,
                skip_router_logits=True,
            )
        )
    torch.testing.assert_close(parts[0] + parts[1], decode(skip_router_logits=True), rtol=1e-4, atol=1e-5)


def test_decode_block_keeps_the_inputs_dtype():
    output, logits = decode(X.bfloat16())
    assert output.dtype == torch.bfloat16
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("mode", [ExpertAffinityScaleMode.NO_SCALE, ExpertAffinityScaleMode.POST_SCALE])
def test_decode_experts(mode):
    affinities = NF.router(X, ROUTER, K)
    index = affinities.topk(K).indices.to(torch.int32)
    both = dict(
        expert_gate_up_bias=GATE_UP_BIAS, expert_down_bias=DOWN_BIAS, expert_affinities_scaling_mode=mode
    )
    output = NF.moe_tkg(X, GATE_UP, DOWN, affinities, index, is_all_expert=False, **both)
    weights = affinities if mode is ExpertAffinityScaleMode.POST_SCALE else (affinities > 0).float()
    torch.testing.assert_close(output, Experts().mixture(X, weights), rtol=1e-4, atol=1e-5)


def test_decode_experts_of_one_partition():
    dense = X.matmul(ROUTER).softmax(-1)  # non-zero everywhere: only the index tells what is chosen
    index = dense.topk(K).indices
    kept = torch.zeros(T, E).scatter(1, index, dense.gather(1, index))
    kept[:, :4] = 0
    output = NF.moe_tkg(
        X,
        GATE_UP[4:],
        DOWN[4:],
        dense,
        index,
        is_all_expert=True,
        mask_unselected_experts=True,
        rank_id=torch.tensor([[1]]),
        expert_affinities_scaling_mode=ExpertAffinityScaleMode.POST_SCALE,
        output_dtype=torch.float64,
    )
    assert output.dtype == torch.float64
    expected = Experts(has_bias=False).mixture(X, kept)
    torch.testing.assert_close(output.float(), expected, rtol=1e-4, atol=1e-5)
