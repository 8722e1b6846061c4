"""Weight loaders, against slices of the full tensors."""

import pytest
import torch
from vllm_neuron.utils.weight_loader import (
    SafetensorsWeightLoader,
    SliceView,
    expert_parallel_grouped_loader,
    expert_parallel_interleaved_loader,
    expert_parallel_tensor_dim_loader,
    fused_qkv_weight_loader,
    get_shard_deinterleaved,
    get_weight_loader,
    last_dim_padding_weight_loader,
    scaled_bias_loader,
    set_weight_loader,
    sharding_weight_loader,
    sharding_weight_loader_with_padding,
    with_rank_override,
)


class Source:
    """A tensor behind the interface of a safetensors slice; counts the elements that were read."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.read = 0

    def get_shape(self):
        return list(self.tensor.shape)

    def __getitem__(self, index):
        part = self.tensor[index]
        self.read += part.numel()
        return part


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def test_a_parameter_without_loader_is_read_whole():
    weight = numbered(3, 4)
    param = torch.nn.Parameter(torch.empty(3, 4))
    assert torch.equal(get_weight_loader(param).load([Source(weight)], 1), weight)
    with pytest.raises(AssertionError, match="exactly 1 slice, got 2"):
        get_weight_loader(param).load([Source(weight), Source(weight)], 0)


def test_a_set_loader_is_used():
    param = torch.nn.Parameter(torch.empty(3, 4))
    loader = SafetensorsWeightLoader(lambda slices, rank: slices[0][:] * rank)
    set_weight_loader(param, loader)
    assert torch.equal(get_weight_loader(param).load([Source(numbered(2))], 3), numbered(2) * 3)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_shard(dim, rank):
    weight = Source(numbered(8, 12))
    size = weight.tensor.shape[dim] // 4
    shard = sharding_weight_loader(dim, size, 4).load([weight], rank)
    assert torch.equal(shard, weight.tensor.narrow(dim, rank * size, size))
    assert shard.is_contiguous()
    assert weight.read == shard.numel()


def test_ranks_beyond_the_shards_start_again():
    weight = numbered(8, 2)
    loader = sharding_weight_loader(0, 4, 2)
    assert torch.equal(loader.load([Source(weight)], 3), weight[4:])


@pytest.mark.parametrize("dim", [0, 1])
def test_shard_of_transposed_storage(dim):
    stored = Source(numbered(6, 8))  # the parameter is [8, 6]
    size = stored.tensor.T.shape[dim] // 2
    shard = sharding_weight_loader(dim, size, 2, is_storage_transposed=True).load([stored], 1)
    assert torch.equal(shard, stored.tensor.T.narrow(dim, size, size))
    assert shard.is_contiguous()
    assert stored.read == shard.numel()


def test_transposed_storage_has_at_most_two_dimensions():
    with pytest.raises(AssertionError, match="at most 2 dimensions"):
        sharding_weight_loader(0, 1, 2, is_storage_transposed=True).load([Source(numbered(2, 2, 2))], 0)


def test_a_short_shard_is_padded_only_when_asked():
    weight = numbered(5, 2)
    short = sharding_weight_loader(0, 3, 2).load([Source(weight)], 1)
    assert torch.equal(short, weight[3:])
    padded = sharding_weight_loader(0, 3, 2, pad_shard=True).load([Source(weight)], 1)
    assert torch.equal(padded, torch.cat([weight[3:], torch.zeros(1, 2)]))


def test_a_shard_behind_the_end_is_all_padding():
    # 3 rows over 4 ranks of ceil(3 / 4) = 1 row
    shard = sharding_weight_loader(0, 1, 4, pad_shard=True).load([Source(numbered(3, 2))], 3)
    assert torch.equal(shard, torch.zeros(1, 2))


def test_padding_beside_the_shard():
    weight = numbered(4, 3)
    loader = sharding_weight_loader_with_padding(0, 2, 2, pad_dim=1, padded_size=5, unpadded_size=3)
    shard = loader.load([Source(weight)], 1)
    assert torch.equal(shard, torch.cat([weight[2:], torch.zeros(2, 2)], dim=1))


def test_last_dimension_padding():
    assert torch.equal(
        last_dim_padding_weight_loader(4).load([Source(numbered(3))], 0), torch.tensor([0.0, 1.0, 2.0, 0.0])
    )
    assert torch.equal(last_dim_padding_weight_loader(3).load([Source(numbered(3))], 0), numbered(3))


def test_a_scaled_bias_sums_to_itself():
    bias = numbered(3)
    loader = scaled_bias_loader(4, padded_size=5)
    total = sum(loader.load([Source(bias)], rank) for rank in range(4))
    assert torch.equal(total, torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0]))


def test_rank_override():
    loader = with_rank_override(sharding_weight_loader(0, 2, 4), 3)
    assert torch.equal(loader.load([Source(numbered(8, 1))], 0), numbered(8, 1)[6:])


@pytest.mark.parametrize(("tp", "kv_per_rank", "replicas"), [(2, 1, 1), (4, 1, 2)])
def test_fused_qkv(tp, kv_per_rank, replicas):
    heads, kv_heads, head_dim, hidden = 8, 2, 4, 6
    q = numbered(heads * head_dim, hidden)
    k = numbered(kv_heads * head_dim, hidden) + 1000
    v = numbered(kv_heads * head_dim, hidden) + 2000
    q_size, kv_size = heads // tp * head_dim, kv_per_rank * head_dim
    loader = fused_qkv_weight_loader(
        q_size, kv_size, 1, tp, is_storage_transposed=True, num_kv_replicas=replicas
    )
    for rank in range(tp):
        sources = [Source(q), Source(k), Source(v)]
        kv = slice(rank // replicas * kv_size, (rank // replicas + 1) * kv_size)
        expected = torch.cat([q[rank * q_size : (rank + 1) * q_size], k[kv], v[kv]]).T
        assert torch.equal(loader.load(sources, rank), expected)
        assert sum(s.read for s in sources) == expected.numel()


def test_fused_qkv_takes_three_matrices():
    loader = fused_qkv_weight_loader(2, 2, 0, 1)
    with pytest.raises(AssertionError, match="got 2"):
        loader.load([Source(numbered(2, 2))] * 2, 0)
    with pytest.raises(AssertionError, match="must be 2-D"):
        loader.load([Source(numbered(2))] * 3, 0)


def test_deinterleaved_gate_up():
    fused = numbered(2, 12)  # gate 0, up 0, gate 1, up 1, ...
    gate, up = get_shard_deinterleaved(Source(fused), 1, 3, 2, rank=1)
    assert torch.equal(gate, fused[:, [6, 8, 10]])
    assert torch.equal(up, fused[:, [7, 9, 11]])


# --- Experts ----------------------------------------------------------------------------------------------


def test_expert_dimension():
    weight = Source(numbered(4, 3, 6))
    loader = expert_parallel_tensor_dim_loader([2, 3], sharding_weight_loader(2, 3, 2))
    assert torch.equal(loader.load([weight], 1), weight.tensor[2:4, :, 3:])
    assert weight.read == 2 * 3 * 3


def test_expert_slices_by_item_and_by_expert():
    gate = [numbered(1) + expert for expert in range(4)]
    up = [numbered(1) + 10 + expert for expert in range(4)]
    stack = SafetensorsWeightLoader(lambda slices, _: torch.cat([s[:] for s in slices]))
    grouped = expert_parallel_grouped_loader([1, 2], stack, 4)
    assert grouped.load([Source(t) for t in gate + up], 0).tolist() == [1, 2, 11, 12]
    interleaved = expert_parallel_interleaved_loader([1, 2], stack, 4)
    pairs = [tensor for pair in zip(gate, up, strict=True) for tensor in pair]
    assert interleaved.load([Source(t) for t in pairs], 0).tolist() == [1, 11, 2, 12]
    with pytest.raises(ValueError, match="7 slices do not divide by 4 experts"):
        grouped.load([Source(numbered(1))] * 7, 0)


def test_expert_indices_must_be_contiguous():
    with pytest.raises(ValueError, match="contiguous"):
        expert_parallel_tensor_dim_loader([0, 2], sharding_weight_loader(0, 1, 1))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((slice(1, 4),), (slice(None), slice(0, 2))),
        ((slice(1, 4), 2), (slice(1, 3),)),
        (([3, 0, 1],), ([2, 0], slice(1, 3))),
        (([3, 0, 1],), ([2, 1],)),
        ((..., slice(2, 5)), (0,)),
    ],
)
def test_a_view_of_a_view_reads_what_indexing_twice_gives(first, second):
    tensor = numbered(5, 6, 7)
    view = SliceView(Source(tensor), first)
    expected = tensor[first]
    assert view.get_shape() == list(expected.shape)
    assert torch.equal(view[second], expected[second])


@pytest.mark.parametrize("index", [None, True, torch.tensor([0])])
def test_a_view_refuses_other_indices(index):
    with pytest.raises(TypeError, match="SliceView takes"):
        SliceView(Source(numbered(2, 2)), (index,))
