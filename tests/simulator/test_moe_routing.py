"""Router, block mapping and expert placement against their definitions, token by token."""

import pytest
import torch
import torch.nn.functional as F
import vllm_neuron.functional as NF
from nkilib.core.utils.common_types import RouterActFnType
from thread_ranks import Coordinator, on_ranks
from vllm_neuron.functional.moe.moe_blockwise import num_blocks
from vllm_neuron.functional.moe.router import RouterComputationOrder as Order

T, H, E, K = 24, 256, 8, 3


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


X = normal(T, H)
ROUTER, ROUTER_BIAS = normal(H, E, seed=1, scale=0.1), normal(E, seed=2)


def chosen(logits, values):
    """values [E] at the K largest logits, zero elsewhere."""
    kept = torch.zeros(E)
    best = logits.sort(descending=True).indices[:K]
    kept[best] = values[best]
    return kept


def affinities_by_definition(logits, activation, order):
    rows = []
    for row in logits:
        if order is Order.PRENORM_LINEAR_ACT_TOPK_RENORM_SCATTER:
            kept = chosen(row, activation(row))
            rows.append(kept / kept.sum())
        else:
            best = row.sort(descending=True).indices[:K]
            kept = torch.zeros(E)
            kept[best] = activation(row[best])
            rows.append(kept)
    return torch.stack(rows)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_router(order, activation):
    function = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}[activation]
    affinities, logits = NF.router(
        X, ROUTER, K, ROUTER_BIAS, activation, return_logits=True, router_computation_order=order
    )
    torch.testing.assert_close(logits, X @ ROUTER + ROUTER_BIAS)
    torch.testing.assert_close(affinities, affinities_by_definition(logits, function, order))
    assert ((affinities != 0).sum(1) == K).all()
    by_function = NF.router(
        X.T, ROUTER, K, ROUTER_BIAS, function, router_computation_order=order, transposed_hidden_states=True
    )
    torch.testing.assert_close(by_function, affinities)


def test_router_norms_and_computes_in_its_own_dtype():
    gamma = normal(H, seed=9) + 1
    affinities = NF.router(X.bfloat16(), ROUTER.bfloat16(), K, gamma=gamma, eps=1e-5)
    assert affinities.dtype == torch.float32
    logits = F.rms_norm(X.bfloat16().float(), (H,), gamma, 1e-5) @ ROUTER.bfloat16().float()
    expected = affinities_by_definition(
        logits, lambda x: x.softmax(-1), Order.PRENORM_LINEAR_TOPK_ACT_SCATTER
    )
    torch.testing.assert_close(affinities, expected)
    assert NF.router(X, ROUTER, K, computation_dtype=torch.bfloat16).dtype == torch.bfloat16


def mapping_by_definition(affinities, block_size, blocks):
    ids, experts = [], []
    for e in range(affinities.shape[1]):
        tokens = affinities[:, e].nonzero().flatten().tolist()
        used = -(-len(tokens) // block_size)
        ids += tokens + [-1] * (used * block_size - len(tokens))
        experts += [e] * used
    experts += [affinities.shape[1] - 1] * (blocks - len(experts))
    return ids + [-1] * (blocks * block_size - len(ids)), experts


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_block_mapping(block_size, seed):
    scores = normal(T, E, seed=seed)
    scores[:, 2] = -9.0  # an expert without tokens
    affinities = torch.zeros(T, E).scatter(1, scores.topk(K).indices, 0.5)
    masked, ids, experts, conditions = NF.build_blockwise_mapping(
        affinities, E, K, block_size, moe_group=None
    )
    blocks = num_blocks(T, E, K, block_size)
    expected_ids, expected_experts = mapping_by_definition(affinities, block_size, blocks)
    assert ids.tolist() == expected_ids
    assert experts.tolist() == expected_experts
    in_use = torch.tensor(expected_ids).view(blocks, block_size).amax(1) >= 0
    assert conditions.tolist() == in_use.int().tolist()
    assert ids.dtype == experts.dtype == conditions.dtype == torch.int32
    assert torch.equal(masked, affinities.view(-1, 1))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block_size", "expected"),
    # ceil((tokens * min(k, experts) - (experts - 1)) / block_size) + experts - 1, at most one block per pair.
    [(1024, 8, 2, 128, 23), (1024, 1, 4, 256, 4), (1, 8, 2, 128, 2), (16, 4, 8, 16, 7)],
)
def test_number_of_blocks(tokens, experts, top_k, block_size, expected):
    assert num_blocks(tokens, experts, top_k, block_size) == expected


def test_block_mapping_zeroes_padding_but_keeps_its_places():
    affinities = torch.zeros(T, E).scatter(1, normal(T, E).topk(K).indices, 0.5)
    is_real = torch.arange(T) < 20
    masked, ids, *_ = NF.build_blockwise_mapping(affinities, E, K, 4, None, padding_mask=is_real)
    assert torch.equal(masked.view(T, E), affinities * is_real[:, None])
    assert torch.equal(ids, NF.build_blockwise_mapping(affinities, E, K, 4, None)[1])


def test_block_mapping_shared_by_ranks_is_the_same():
    affinities = torch.zeros(T, E).scatter(1, normal(T, E).topk(K).indices, 0.5)
    alone = NF.build_blockwise_mapping(affinities, E, K, 4, None)

    def run(rank):
        return NF.build_blockwise_mapping(affinities, E, K, 4, Coordinator(rank, 4), tp_degree=4)

    for together in on_ranks(4, run):
        for got, want in zip(together, alone, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("act_fn", RouterActFnType)
def test_rmsnorm_router_topk(act_fn):
    gamma = normal(1, H, seed=8, scale=0.3) + 1
    normed_by_torch = F.rms_norm(X, (H,), gamma[0], 1e-5)
    logits = normed_by_torch @ ROUTER + ROUTER_BIAS
    normed, index, affinities = NF.rmsnorm_router_topk_tkg(
        X.view(4, 6, H),
        gamma,
        ROUTER,
        ROUTER_BIAS[None],
        1e-5,
        K,
        router_mm_dtype=torch.float32,
        router_act_fn=act_fn,
    )
    torch.testing.assert_close(normed, normed_by_torch)
    assert torch.equal(index.long(), logits.topk(K).indices)
    assert index.dtype == torch.int32
    if act_fn is RouterActFnType.SOFTMAX:
        expected = affinities_by_definition(
            logits, lambda x: x.softmax(-1), Order.PRENORM_LINEAR_TOPK_ACT_SCATTER
        )
    else:
        expected = torch.stack([chosen(row, row.sigmoid()) for row in logits])
    assert affinities.dtype == torch.bfloat16
    torch.testing.assert_close(affinities.float(), expected, rtol=0.01, atol=1e-3)
    assert NF.rmsnorm_router_topk_tkg(X[None], gamma, ROUTER)[0].dtype == torch.bfloat16


def test_expert_parallelism_helpers():
    assert NF.calculate_local_expert_indices(1, 4, 8, "cpu").tolist() == [2, 3]
    assert NF.calculate_local_expert_indices(torch.tensor(3), 4, 8, "cpu").tolist() == [6, 7]
    local = NF.get_local_expert_affinities(X[:, :8], torch.tensor([2, 3]))
    assert torch.equal(local, X[:, 2:4])
    with pytest.raises(ValueError, match="T, E"):
        NF.get_local_expert_affinities(X[0], torch.tensor([0]))
    with pytest.raises(ValueError, match="empty"):
        NF.get_local_expert_affinities(X, torch.tensor([], dtype=torch.int64))
    NF.validate_expert_parallelism_config(4, 8, 8)
    for wrong in ((0, 8, 8), (2, 0, 8), (16, 16, 8), (3, 9, 8), (4, 6, 8), (2.0, 8, 8)):
        with pytest.raises(ValueError, match=r"ep_degree|num_experts"):
            NF.validate_expert_parallelism_config(*wrong)
