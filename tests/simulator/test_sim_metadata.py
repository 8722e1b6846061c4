"""Inputs of a forward: shapes, dtypes, padding, and block tables."""

from dataclasses import replace

import pytest
import torch
from vllm_neuron.simulator.metadata import (
    KVGroup,
    Row,
    Step,
    build_attn_metadata,
    build_tokens,
    table_width,
    window_blocks,
)

FULL = KVGroup(("layers.0.self_attn", "layers.1.self_attn"))
PREFILL = Step(is_prefill=True, bucket=8, block_size=4, max_model_len=256, kv_segment_size=0)
DECODE = Step(is_prefill=False, bucket=4, block_size=4, max_model_len=256)


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "width"),
    [(256, 32, 8), (257, 32, 12), (100, 32, 4), (128, 128, 1), (129, 128, 2), (300, 256, 2)],
)
def test_table_width_is_a_multiple_of_128_tokens(max_model_len, block_size, width):
    assert table_width(max_model_len, block_size) == width


def test_prefill():
    row = Row([11, 12, 13, 14, 15], start=8, blocks=[[7, 3, 9, 2]])
    ids, positions, sampling = build_tokens([row], PREFILL)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [11, 12, 13, 14, 15, 0, 0, 0]
    assert positions.dtype == torch.int64
    assert positions.tolist() == [8, 9, 10, 11, 12, 12, 12, 12]  # padding repeats the last one
    assert (sampling.dtype, sampling.tolist()) == (torch.int64, [4])

    entry = build_attn_metadata([row], [FULL], PREFILL)["layers.0.self_attn"]
    assert entry["slot_mapping"].dtype == torch.int64
    assert entry["slot_mapping"].tolist() == [36, 37, 38, 39, 8, 0, 0, 0]  # blocks 9 and 2; padding in slot 0
    table = entry["block_table_tensor"]
    assert (table.dtype, table.shape) == (torch.int32, (1, 64))
    assert table[0].tolist() == [7, 3, 9, 2] + [-1] * 60
    assert entry["full_block_table_tensor"] is not table
    assert torch.equal(entry["full_block_table_tensor"], table)
    assert entry["cached_seq_len"].dtype == torch.int32
    assert entry["cached_seq_len"].tolist() == [[8]]
    numbers = (
        "max_query_len",
        "block_size",
        "max_blocks_per_seq",
        "decode_token_threshold",
        "kv_segment_size",
    )
    assert [entry[name] for name in numbers] == [8, 4, 64, 1, 0]
    assert all(type(entry[name]) is int for name in numbers)
    assert "swa_kv_pos_offset" not in entry


def test_decode():
    rows = [Row([5], start=6, blocks=[[9, 4]]), Row([6], start=0, blocks=[[1]])]
    ids, positions, sampling = build_tokens(rows, DECODE)
    assert ids.tolist() == [5, 6, 0, 0]
    assert positions.tolist() == [6, 0, 0, 0]
    assert sampling.tolist() == [0, 1, 1, 1]  # padding repeats the last request

    entry = build_attn_metadata(rows, [FULL], DECODE)["layers.1.self_attn"]
    assert entry["slot_mapping"].tolist() == [4 * 4 + 2, 1 * 4 + 0, 0, 0]
    assert entry["max_query_len"] == 1
    assert entry["block_table_tensor"].shape == (4, 64)
    assert entry["block_table_tensor"][:, :3].tolist() == [[9, 4, -1], [1, -1, -1], [-1] * 3, [-1] * 3]
    assert entry["cached_seq_len"].tolist() == [[6]]


def test_layers_of_a_group_share_one_dict_and_groups_have_their_own_blocks():
    window = KVGroup(("layers.2.self_attn",), sliding_window=8)
    row = Row([1, 2], start=0, blocks=[[5], [6]])
    metadata = build_attn_metadata([row], [FULL, window], PREFILL)
    assert metadata["layers.0.self_attn"] is metadata["layers.1.self_attn"]
    assert metadata["layers.0.self_attn"]["slot_mapping"][0] == 20
    assert metadata["layers.2.self_attn"]["slot_mapping"][0] == 24


def test_decode_tables_of_a_window_are_trimmed_to_its_blocks():
    step = Step(is_prefill=False, bucket=2, block_size=32, max_model_len=1024)
    window = KVGroup(("layers.0.self_attn",), sliding_window=64)
    assert window_blocks(64, 32) == 4
    blocks = list(range(101, 121))
    rows = [Row([1], start=600, blocks=[blocks]), Row([1], start=40, blocks=[blocks[:2]])]
    entry = build_attn_metadata(rows, [window], step)["layers.0.self_attn"]
    # Position 600 is in the 19th block, the last column.
    assert entry["block_table_tensor"].tolist() == [[116, 117, 118, 119], [101, 102, -1, -1]]
    assert entry["block_table_tensor"].dtype == torch.int32
    assert entry["max_blocks_per_seq"] == 4
    assert (entry["swa_kv_pos_offset"].dtype, entry["swa_kv_pos_offset"].tolist()) == (torch.int32, [480, 0])
    assert entry["full_block_table_tensor"].shape == (2, 32)
    assert entry["slot_mapping"][0] == 119 * 32 + 600 % 32


def test_rows_with_fewer_drafts_are_padded_to_the_others():
    step = Step(False, bucket=3, block_size=4, max_model_len=256, num_drafts=2)
    rows = [Row([5, 6, 7], start=6, blocks=[[9, 4, 2]]), Row([8], start=3, blocks=[[1]])]
    ids, positions, sampling = build_tokens(rows, step)
    assert ids.tolist() == [5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert positions.tolist() == [6, 7, 8, 3, 4, 5, 0, 0, 0]
    assert sampling.tolist() == list(range(9))
    entry = build_attn_metadata(rows, [FULL], step)["layers.1.self_attn"]
    assert entry["slot_mapping"].tolist() == [4 * 4 + 2, 4 * 4 + 3, 2 * 4, 1 * 4 + 3, 0, 0, 0, 0, 0]
    assert (entry["max_query_len"], entry["decode_token_threshold"]) == (3, 3)
    plain = build_attn_metadata(rows[1:], [FULL], replace(step, num_drafts=0, max_drafts=2))[
        "layers.1.self_attn"
    ]
    assert (plain["max_query_len"], plain["decode_token_threshold"]) == (1, 3)


def test_the_trimmed_table_has_the_blocks_of_the_drafts():
    step = Step(is_prefill=False, bucket=1, block_size=32, max_model_len=1024, num_drafts=3)
    window = KVGroup(("layers.0.self_attn",), sliding_window=64)
    row = Row([1, 2, 3, 4], start=607, blocks=[list(range(101, 121))])
    entry = build_attn_metadata([row], [window], step)["layers.0.self_attn"]
    assert entry["block_table_tensor"].tolist() == [[117, 118, 119, 120]]  # position 610 is in the 20th block
    assert entry["swa_kv_pos_offset"].tolist() == [512]


@pytest.mark.parametrize(
    ("rows", "step", "message"),
    [
        ([], DECODE, "at least one request"),
        ([Row([], 0, [[1]])], DECODE, "each request a token"),
        ([Row([1], 0, [[1]])] * 2, PREFILL, "takes one request, got 2"),
        ([Row([1, 2], 0, [[1]])], DECODE, "one token per request, got 2 for 1"),
        ([Row([1] * 9, 0, [[1, 2, 3]])], PREFILL, "9 tokens do not fit the bucket of 8"),
        ([Row([1], 256, [[1] * 65])], PREFILL, "257 tokens is longer than max_model_len 256"),
        (
            [Row([1], 254, [[1] * 65])],
            replace(DECODE, num_drafts=2),
            "257 tokens is longer than max_model_len",
        ),
        ([Row([1] * 5, 0, [[1]])], PREFILL, "request 0 has no block"),
    ],
)
def test_rows_that_do_not_fit(rows, step, message):
    with pytest.raises(ValueError, match=message):
        build_attn_metadata(rows, [FULL], step)
