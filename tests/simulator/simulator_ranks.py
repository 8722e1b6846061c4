"""Functions that tests run in rank processes (they are imported by name there)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, HIDDEN, TOKENS = 7, 6, 8


def full(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load(module, **tensors):
    """Load full tensors; the module takes its own part."""
    module.load_state_dict(tensors)
    return module


def modules(rank):
    """Every parallel module over two ranks against the plain one; returns what differs."""
    from vllm_neuron.simulator.activate import activate, deactivate

    activate(rank.size, rank.index, rank.init_file, ep_degree=2)
    results = {
        "linear": linear(rank),
        "embedding": embedding(rank),
        "sampler": sampler(rank),
        "state": parallel_state(rank),
    }
    deactivate()
    return results


def linear(rank):
    from vllm.distributed.parallel_state import get_tp_group
    from vllm_neuron.nn import ColumnParallelLinear, RowParallelLinear

    group = get_tp_group().device_group
    x, weight, bias = full(TOKENS, HIDDEN), full(4, HIDDEN, seed=1), full(4, seed=2)
    expected = F.linear(x, weight, bias)
    column = load(ColumnParallelLinear(HIDDEN, 4, tp_group=group), weight=weight, bias=bias)
    gathered = load(
        ColumnParallelLinear(HIDDEN, 4, gather_output=True, tp_group=group), weight=weight, bias=bias
    )
    row = load(RowParallelLinear(HIDDEN, 4, dtype=torch.float32, tp_group=group), weight=weight, bias=bias)
    half = HIDDEN // 2
    local = x[:, rank.index * half : (rank.index + 1) * half]
    checks = {
        "shapes": (tuple(column.weight.shape), tuple(column.bias.shape), tuple(row.weight.shape))
        == ((2, HIDDEN), (2,), (4, half)),
        "column": close(column(x), expected[:, rank.index * 2 : rank.index * 2 + 2]),
        "gathered": close(gathered(x), expected),
        "row": close(row(local), expected),  # the bias counts once
    }
    errors = {}
    for name, make in {
        "features": lambda: ColumnParallelLinear(HIDDEN, 5, tp_group=group),
        "bias dtype": lambda: RowParallelLinear(HIDDEN, 4, dtype=torch.bfloat16, tp_group=group),
        "no bias dtype": lambda: RowParallelLinear(HIDDEN, 4, tp_group=group),
    }.items():
        try:
            make()
        except (AssertionError, NotImplementedError) as error:
            errors[name] = type(error).__name__
    return checks, errors


def embedding(rank):
    from vllm.distributed.parallel_state import get_tp_group
    from vllm_neuron.nn import EmbedDimShardedEmbedding, VocabDimShardedEmbedding

    group = get_tp_group().device_group
    weight = full(VOCAB, HIDDEN)  # 7 rows over 2 ranks: the last one is padded
    ids = torch.tensor([0, 6, 3, 4, 2, 5, 1, 3])
    expected = F.embedding(ids, weight)
    vocab = load(VocabDimShardedEmbedding(VOCAB, HIDDEN, tp_group=group), weight=weight)
    dim = load(EmbedDimShardedEmbedding(VOCAB, HIDDEN - 1, tp_group=group), weight=weight[:, :-1])
    mine = slice(rank.index * TOKENS // 2, (rank.index + 1) * TOKENS // 2)
    checks = {
        "scattered by default": close(vocab(ids), expected[mine]),
        "whole": close(vocab(ids, scatter_tokens=False), expected),
        "unknown ids": not vocab(torch.tensor([-1, 100]), scatter_tokens=False).any(),
        "embedding dimension": close(dim(ids), expected[:, :-1]),
    }
    for shape in ((), (1,)):
        index = torch.full(shape, rank.index, dtype=torch.int32)
        checks[f"rank {shape}"] = close(vocab(ids, scatter_tokens=False, rank=index), expected)
    errors = {}
    for name, tokens in {"2-D": ids.view(2, 4), "odd": ids[:7]}.items():
        try:
            vocab(tokens)
        except (ValueError, AssertionError) as error:
            errors[name] = type(error).__name__
    return checks, errors


def sampler(rank):
    from vllm.distributed.parallel_state import get_tp_group
    from vllm_neuron.model.neuron_config import OnDeviceSamplingConfig
    from vllm_neuron.nn import Sampler

    sample = Sampler(OnDeviceSamplingConfig(), get_tp_group().device_group)
    logits = full(3, 8)
    local = logits[:, rank.index * 4 : rank.index * 4 + 4]
    greedy = torch.tensor([[-1.0, 1.0, 0.0]] * 3)
    index = torch.tensor(rank.index, dtype=torch.int32)
    allowed = torch.zeros(3, 8, dtype=torch.bool)
    allowed[:, [2, 7]] = True
    masked = logits.masked_fill(~allowed, -torch.inf)
    checks = {
        "greedy": sample(local, greedy, tp_rank=index).tolist() == logits.argmax(1).tolist(),
        "masked": sample(local, greedy, allowed, index).tolist() == masked.argmax(1).tolist(),
    }
    errors = {}
    for name, mask, tp_rank in (("no rank", allowed, None), ("width", allowed[:, :6], index)):
        try:
            sample(local, greedy, mask, tp_rank)
        except ValueError as error:
            errors[name] = type(error).__name__
    return checks, errors


def parallel_state(rank):
    from vllm.distributed.parallel_state import get_neuron_ep_group, get_tp_group
    from vllm_neuron.parallel import neuron_parallel_state as state

    checks = {
        "expert partitions": (state.get_neuron_ep_degree(), state.get_neuron_ep_rank()) == (2, rank.index),
        "expert groups": (get_neuron_ep_group().ranks, state.get_neuron_ep_tp_group().ranks)
        == ([0, 1], [rank.index]),
        "components": state.get_neuron_mlp_tp_group() is get_tp_group()
        and state.get_neuron_attention_dp_group().ranks == [rank.index],
    }
    reduced = torch.ones(1) * (rank.index + 1)
    get_tp_group().all_reduce(reduced)
    checks["all_reduce is in place"] = reduced.item() == 3
    return checks, {}


def toy_model(rank, folder, prompts):
    """The toy model over the ranks: logits of prefill and decode, and the collectives it used."""
    from toy_model import Toy, toy_config
    from vllm_neuron.simulator.activate import activate, deactivate
    from vllm_neuron.simulator.harness import Harness

    activate(rank.size, rank.index, rank.init_file)
    harness = Harness(
        Toy,
        toy_config(),
        folder,
        neuron_config={"on_device_sampling_config": None},
        dtype=torch.float32,
        num_blocks=32,
        max_model_len=128,
        num_batched_tokens_buckets=[32, 128],
        num_seqs_buckets=[2],
    )
    sequences = [harness.add(prompt) for prompt in prompts]
    prefill = [harness.prefill(sequence) for sequence in sequences]
    decode = harness.decode(sequences, [1, 2])
    reports = {key: dict(report.collectives) for key, report in harness.reports.items()}
    deactivate()
    return torch.cat(prefill), decode, reports


def close(a, b):
    return bool(torch.allclose(a, b, atol=1e-6))


__all__ = ["dist", "modules", "nn", "toy_model"]
