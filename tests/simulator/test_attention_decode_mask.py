import pytest
import torch
import vllm_neuron.functional as NF
from vllm_neuron.functional.attention.attention_decode_mask import resize_block_len, shuffle, unshuffle

# (block_len, bs, q_head, s_active, s_prior) -> effective block length, worked out by hand from the rule.
RESIZED = [
    ((32, 2, 4, 1, 256), 2),  # batch on the cores: 256 / 128 = 2 tiles
    ((32, 1, 4, 1, 512), 2),  # context on the cores: 512 / 256 = 2 tiles each
    ((32, 1, 4, 1, 8192), 32),
    ((128, 3, 8, 1, 1024), 4),
    ((128, 16, 8, 1, 1024), 8),  # 16 * 8 >= 128: batch on the cores
    ((16, 1, 4, 1, 128), 1),
    ((32, 1, 4, 1, 384), 32),  # 384 does not fill two cores: unchanged
    ((0, 1, 4, 1, 256), 0),
]


@pytest.mark.parametrize(("sizes", "expected"), RESIZED)
def test_resize(sizes, expected):
    assert resize_block_len(*sizes) == expected


@pytest.mark.parametrize("block_len", [1, 2, 8, 32])
def test_shuffle_follows_the_row_formula_and_comes_back(block_len):
    size = 8192
    rows = torch.arange(size)
    fold, off, part = rows // (128 * block_len), rows // 128 % block_len, rows % 128
    shuffled = shuffle(torch.arange(size), block_len)
    assert torch.equal(shuffled, fold * 128 * block_len + part * block_len + off)
    assert torch.equal(unshuffle(shuffled, block_len), torch.arange(size))


def sequence_order(mask, block_len):
    s_prior, bs, q_head, s_active = mask.shape
    return unshuffle(mask, resize_block_len(block_len, bs, q_head, s_active, s_prior))


@pytest.mark.parametrize(("s_active", "window"), [(1, None), (1, 1), (1, 40), (3, None), (3, 40)])
def test_mask_position_by_position(s_active, window):
    bs, q_head, s_prior, block_len = 2, 4, 256, 32
    first = [100, 7]
    pos = torch.tensor(first)[:, None] + torch.arange(s_active)
    start = (pos - window + 1).clamp(min=0) if window else None
    mask = NF.gen_attention_decode_mask(
        pos.float().view(1, -1),
        bs,
        q_head,
        s_active,
        s_prior,
        start_pos=None if start is None else start.float().view(1, -1),
        block_len=block_len,
    )
    assert mask.shape == (s_prior, bs, q_head, s_active)
    assert mask.dtype == torch.float32
    mask = sequence_order(mask, block_len)
    expected = torch.zeros(s_prior, bs, s_active)
    for b in range(bs):
        for j in range(s_active):
            lowest = int(start[b, j]) if window else 0
            expected[lowest : first[b], b, j] = 1
            for k in range(j + 1):
                expected[s_prior - s_active + k, b, j] = 1
    assert torch.equal(mask, expected[:, :, None, :].expand_as(mask))


def test_window_that_wraps_round_the_context():
    pos, start = torch.tensor([[50.0]]), torch.tensor([[200.0]])
    mask = NF.gen_attention_decode_mask(pos, 1, 2, 1, 256, start_pos=start, block_len=32)
    seen = sequence_order(mask, 32)[:, 0, 0, 0].nonzero().flatten().tolist()
    assert seen == [*range(50), *range(200, 256)]


def test_context_must_be_a_multiple_of_128():
    with pytest.raises(ValueError, match="s_prior must be a multiple of 128, got 200"):
        NF.gen_attention_decode_mask(torch.zeros(1, 1), 1, 2, 1, 200, block_len=8)


def test_block_len_is_needed():
    with pytest.raises(NotImplementedError, match="block_len"):
        NF.gen_attention_decode_mask(torch.zeros(1, 1), 1, 2, 1, 256)
