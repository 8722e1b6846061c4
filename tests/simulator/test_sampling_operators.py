"""sample, topk, argmax and the small operators; sharded forms on a group of threads."""

import pytest
import torch
import torch.distributed as dist
import vllm_neuron.functional as NF
from thread_ranks import on_ranks
from vllm_neuron.functional.argmax import argmax
from vllm_neuron.functional.topk import topk

RANKS = 4


def logits(rows=6, vocab=1024, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


# torch 2.13 renamed the collective; the new name is not in older versions.
pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_tensor:FutureWarning")


def test_greedy_takes_the_lowest_id_of_a_tie():
    x = logits()
    x[0, 700] = x[0, 30] = 50.0
    expected = x.argmax(1).to(torch.int32)
    assert int(expected[0]) == 30
    assert torch.equal(NF.sample(x, all_greedy=True), expected)
    assert torch.equal(NF.sample(x, temperature=0.0), expected)


def test_only_the_best_256_are_drawn():
    x = torch.zeros(2000, 1024)
    x[:, :256] = 1e-3
    assert NF.sample(x).max() < 256
    assert NF.sample(x, max_top_k=1024).max() >= 256


def frequencies(row, **parameters):
    draws = NF.sample(row.expand(20000, -1), **parameters)
    return torch.bincount(draws, minlength=row.shape[-1]) / 20000


def test_draws_follow_softmax_with_temperature():
    torch.manual_seed(0)
    row = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    torch.testing.assert_close(
        frequencies(row, temperature=0.7), (row[0] / 0.7).softmax(0), rtol=0.0, atol=0.02
    )


def test_a_draw_is_finer_than_bfloat16():
    torch.manual_seed(0)
    row = torch.tensor([[255 / 256, 1 / 256]]).log().bfloat16()
    assert 0 < frequencies(row)[1] < 0.01


def test_top_k_keeps_ties_with_the_last():
    row = torch.tensor([[3.0, 2.0, 1.0, 2.0, 0.0]])
    drawn = frequencies(row, top_k=2).nonzero().flatten().tolist()
    assert drawn == [0, 1, 3]


def test_top_p_drops_the_token_that_crosses_it():
    row = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert frequencies(row, top_p=0.9).nonzero().flatten().tolist() == [0, 1]
    assert frequencies(row, top_p=0.1).nonzero().flatten().tolist() == [0]


def test_parameters_per_row():
    x = torch.tensor([[1.0, 3.0, 2.0]]).repeat(3, 1)
    drawn = NF.sample(
        x.repeat(500, 1),
        temperature=torch.tensor([0.0, 1.0, 1.0]).repeat(500),
        top_k=torch.tensor([-1, 1, 2], dtype=torch.int32).repeat(500),
        top_p=torch.ones(1500),
    ).view(500, 3)
    assert drawn[:, 0].unique().tolist() == [1]
    assert drawn[:, 1].unique().tolist() == [1]
    assert drawn[:, 2].unique().tolist() == [1, 2]


def test_deterministic_draws_at_one_half():
    row = torch.tensor([[0.3, 0.45, 0.25]]).log()
    # Sorted: 0.45, 0.3, 0.25; the sums are 0.45, 0.75, 1: a half falls on the second.
    assert NF.sample(row, deterministic=True).tolist() == [0]
    assert NF.sample(torch.zeros(1, 2), deterministic=True).tolist() == [0]


def test_sharded_logits_give_the_ids_of_the_whole():
    x = logits(vocab=4096)
    tied = x.clone()
    tied[2, 900] = tied[2, 3100] = 50.0

    def run(rank):
        shard, tied_shard = (y.chunk(RANKS, dim=1)[rank].contiguous() for y in (x, tied))
        common = dict(tp_group=dist.group.WORLD, tp_rank=torch.tensor(rank, dtype=torch.int32))
        return (
            NF.sample(tied_shard, all_greedy=True, **common),
            NF.sample(shard, temperature=0.8, top_k=50, top_p=0.9, deterministic=True, **common),
        )

    greedy = tied.argmax(1).to(torch.int32)
    drawn = NF.sample(x, temperature=0.8, top_k=50, top_p=0.9, deterministic=True)
    for got in on_ranks(RANKS, run):
        assert torch.equal(got[0], greedy)
        assert torch.equal(got[1], drawn)


def test_sharded_topk_and_argmax_over_another_axis():
    x = logits(rows=8)

    def run(rank):
        rows = x.chunk(RANKS)[rank].contiguous()
        group = dist.group.WORLD
        return argmax(rows, 1, 0, process_group=group), topk(rows, 3, 1, 0, process_group=group)

    for best, (values, indices) in on_ranks(RANKS, run):
        assert torch.equal(best, x.argmax(1))
        assert torch.equal(values, x.topk(3).values)
        assert torch.equal(indices, x.topk(3).indices)


def test_argmax_needs_a_group_and_topk_a_rank():
    with pytest.raises(ValueError, match="process_group"):
        argmax(logits(), 1, 1)

    def run(rank):
        with pytest.raises(ValueError, match="rank"):
            topk(logits(), 3, 1, 1, process_group=dist.group.WORLD)

    on_ranks(RANKS, run)


def test_topk_without_a_group_is_torchs():
    x = logits()
    values, indices = topk(x, 5, -1, -1)
    assert torch.equal(values, x.topk(5).values)
    assert torch.equal(indices, x.topk(5).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_cumsum(dtype):
    x = logits(3, 20).to(dtype)
    torch.testing.assert_close(NF.cumsum(x), x.cumsum(1).to(dtype))
    with pytest.raises(ValueError, match="last axis"):
        NF.cumsum(x, dim=0)
    with pytest.raises(ValueError, match="2-D"):
        NF.cumsum(x[0])


def test_embedding_and_prompt_embeds():
    table, ids = logits(10, 8), torch.tensor([3, 0, 9], dtype=torch.int32)
    hidden = NF.embedding(ids, table)
    assert torch.equal(hidden, table[[3, 0, 9]])
    given = logits(3, 8, seed=1).double()
    merged = NF.merge_prompt_embeds(hidden, given, torch.tensor([True, False, True]))
    assert torch.equal(merged, torch.stack([hidden[0], given[1].float(), hidden[2]]))
    assert NF.merge_prompt_embeds(hidden, None, None) is hidden


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("shape", [(50,), (1, 50)])
def test_argsort(shape, descending):
    x = torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    order = NF.argsort_unstable(x, descending=descending)
    assert order.dtype == torch.int32
    assert torch.equal(x.gather(-1, order.long()), x.sort(-1, descending=descending).values)
    with pytest.raises(AssertionError):
        NF.argsort_unstable(x.view(1, 1, -1))
