"""Inputs of one forward: padded tokens and the attention metadata, as the model runner builds them.

A step is one prefill request, or a batch of decode requests with one token each, and as many drafts after it;
they are never mixed. Tokens are flat (no batch dimension). Padding follows what the runner does, which is not what
its documentation says: padded tokens have id 0 and write to slot 0, in the null block; -1 stands in block tables,
never in slot mappings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NULL_BLOCK = 0  # reserved block that padding writes to
PAD_BLOCK = -1  # block-table entry without a block
PARTITIONS = 128  # context lengths of the decode kernel are multiples of this


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table, and so one metadata dict.

    Attributes:
        layer_names: Keys of the layers.
        sliding_window: Window in tokens, None for full attention.
    """

    layer_names: tuple[str, ...]
    sliding_window: int | None = None


@dataclass(frozen=True)
class Row:
    """One request's part of a step.

    Attributes:
        token_ids: Tokens to compute. In a decode step with drafts a row may have fewer than the others.
        start: Position of the first of them; the tokens before it are cached.
        blocks: Per KV group the request's block ids in order of position. They cover the tokens to compute.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Step:
    """Shapes of one forward.

    Attributes:
        is_prefill: One request with any number of tokens; otherwise decode with one token per request.
        bucket: Padded number of tokens in prefill, of requests in decode.
        block_size: Tokens per KV-cache block.
        max_model_len: Longest sequence in tokens, which gives the width of block tables.
        kv_segment_size: Segment of segmented prefill in tokens, 0 when it is off.
        context_len: Decode with block tables for this many tokens; None when it is not compiled for shorter
            contexts than `max_model_len`.
        num_drafts: Drafts that each decode request has after its token, to be verified.
        max_drafts: Drafts that a decode step of this engine can have, also when this step has none.
    """

    is_prefill: bool
    bucket: int
    block_size: int
    max_model_len: int
    kv_segment_size: int = 0
    context_len: int | None = None
    num_drafts: int = 0
    max_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Padded number of tokens."""
        return self.bucket if self.is_prefill else self.bucket * (1 + self.num_drafts)

    def padded_length(self, row: Row) -> int:
        """Places that the tokens of a row take: in decode those of the drafts, too."""
        return len(row.token_ids) if self.is_prefill else 1 + self.num_drafts


def table_width(max_model_len: int, block_size: int) -> int:
    """Columns of a block table: blocks of the longest sequence, up to a multiple of 128 / block_size."""
    blocks = -(-max_model_len // block_size)
    return _aligned(blocks, block_size)


def window_blocks(sliding_window: int, block_size: int, num_drafts: int = 0) -> int:
    """Columns of a decode block table that is trimmed to a sliding window, with places for the drafts."""
    return _aligned((sliding_window + num_drafts) // block_size + 1, block_size)


def build_tokens(rows: Sequence[Row], step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input_ids, positions and sampling_positions of a step.

    Returns:
        input_ids: int32 [tokens]; padding is 0, also after the tokens of a row with fewer drafts.
        positions: int64 [tokens]; padding repeats the last position in prefill and is 0 in decode.
        sampling_positions: int64 [1] in prefill, [bucket] in decode: place of each request's last token in
            the flat tokens; padding repeats the last one. With drafts, all tokens.

    Raises:
        ValueError: The rows do not fit the step.
    """
    _check(rows, step)
    ids = torch.zeros(step.num_tokens, dtype=torch.int32)
    tokens = [token for row in rows for token in _padded(row.token_ids, step.padded_length(row))]
    ids[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    real = torch.cat([torch.arange(row.start, row.start + step.padded_length(row)) for row in rows])
    positions = torch.full((step.num_tokens,), int(real[-1]) if step.is_prefill else 0, dtype=torch.int64)
    positions[: len(real)] = real

    if step.num_drafts:
        return ids, positions, torch.arange(step.num_tokens)
    last = torch.tensor([len(row.token_ids) for row in rows]).cumsum(0) - 1
    sampling = torch.full((_num_requests(step),), int(last[-1]), dtype=torch.int64)
    sampling[: len(last)] = last
    return ids, positions, sampling


def build_attn_metadata(
    rows: Sequence[Row], groups: Sequence[KVGroup], step: Step
) -> dict[str, dict[str, Any]]:
    """Return the metadata by layer name. Layers of one group share one dict, whose entries are

    - ``block_table_tensor`` int32 [requests, W]: entries without a block are -1. In decode, W is trimmed to
      the window for a sliding-window group.
    - ``slot_mapping`` int64 [tokens]: block * block_size + offset; 0 for padding.
    - ``max_query_len`` int: the bucket in prefill, 1 + drafts in decode.
    - ``block_size``, ``max_blocks_per_seq`` (W), ``kv_segment_size`` ints, and ``decode_token_threshold``: 1 + drafts
      of a step that has some, in every step of the engine.
    - ``cached_seq_len`` int32 [1, 1]: tokens that are cached already, the most of all requests.
    - ``full_block_table_tensor`` int32 [requests, untrimmed W], a tensor of its own.
    - ``swa_kv_pos_offset`` int32 [requests]: position of the first column of a table that may be trimmed; only
      in decode, for a sliding-window group or with a context length.

    Raises:
        ValueError: The rows do not fit the step, or a request has too few blocks.
    """
    _check(rows, step)
    cached = torch.tensor([[max(row.start for row in rows)]], dtype=torch.int32)
    metadata: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        table = _block_table([row.blocks[index] for row in rows], step)
        full = torch.where(table == NULL_BLOCK, PAD_BLOCK, table)
        entry: dict[str, Any] = {
            "block_table_tensor": full,
            "slot_mapping": _slot_mapping(rows, table, step),
            "max_query_len": step.bucket if step.is_prefill else 1 + step.num_drafts,
            "block_size": step.block_size,
            "max_blocks_per_seq": full.shape[1],
            "decode_token_threshold": 1 + max(step.num_drafts, step.max_drafts),
            "cached_seq_len": cached,
            "kv_segment_size": step.kv_segment_size,
            "full_block_table_tensor": full.clone(),
        }
        if group.sliding_window is not None and not step.is_prefill:
            entry.update(_trimmed(full, rows, group.sliding_window, step))
        elif step.context_len is not None and not step.is_prefill:
            entry.update(_shortened(full, step.context_len, step))
        metadata.update(dict.fromkeys(group.layer_names, entry))
    return metadata


# --- Helpers ----------------------------------------------------------------------------------------------


def _aligned(blocks: int, block_size: int) -> int:
    multiple = max(PARTITIONS // block_size, 1)
    return -(-blocks // multiple) * multiple


def _num_requests(step: Step) -> int:
    return 1 if step.is_prefill else step.bucket


def _padded(token_ids: Sequence[int], length: int) -> list[int]:
    return [*token_ids, *[0] * (length - len(token_ids))]


def _check(rows: Sequence[Row], step: Step) -> None:
    count = sum(len(row.token_ids) for row in rows)
    if not rows or any(not row.token_ids for row in rows):
        raise ValueError("a step needs at least one request, and each request a token")
    if step.is_prefill and len(rows) != 1:
        raise ValueError(f"a prefill step takes one request, got {len(rows)}")
    each = 1 + step.num_drafts
    if not step.is_prefill and any(len(row.token_ids) > each for row in rows):
        takes = "one token" if each == 1 else f"up to {each} tokens"
        raise ValueError(f"a decode step takes {takes} per request, got {count} for {len(rows)} requests")
    if sum(step.padded_length(row) for row in rows) > step.num_tokens:
        raise ValueError(f"{count} tokens do not fit the bucket of {step.num_tokens}")
    # The decode kernel takes the last places of the context for the tokens of the step, also those of padding.
    longest = max(row.start + step.padded_length(row) for row in rows)
    if longest > step.max_model_len:
        raise ValueError(f"a sequence of {longest} tokens is longer than max_model_len {step.max_model_len}")
    if step.context_len is not None and longest > step.context_len:
        raise ValueError(f"a sequence of {longest} tokens is longer than the context of {step.context_len}")


def _block_table(blocks: Sequence[Sequence[int]], step: Step) -> torch.Tensor:
    """int32 [requests, W] with the null block where there is none."""
    width = table_width(step.max_model_len, step.block_size)
    table = torch.full((_num_requests(step), width), NULL_BLOCK, dtype=torch.int32)
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = torch.tensor(list(ids), dtype=torch.int32)
    return table


def _slot_mapping(rows: Sequence[Row], table: torch.Tensor, step: Step) -> torch.Tensor:
    slots = torch.zeros(step.num_tokens, dtype=torch.int64)
    done = 0
    for index, row in enumerate(rows):
        positions = torch.arange(row.start, row.start + len(row.token_ids))
        blocks = table[index, positions // step.block_size].to(torch.int64)
        if bool((blocks == NULL_BLOCK).any()):
            raise ValueError(
                f"request {index} has no block for one of its tokens (positions {positions.tolist()})"
            )
        slots[done : done + len(positions)] = blocks * step.block_size + positions % step.block_size
        done += step.padded_length(row)
    return slots


def _trimmed(full: torch.Tensor, rows: Sequence[Row], sliding_window: int, step: Step) -> dict[str, Any]:
    """The last columns up to the block of each request's last token, and the position that they start at."""
    longest = full.shape[1] if step.context_len is None else table_width(step.context_len, step.block_size)
    width = min(window_blocks(sliding_window, step.block_size, step.num_drafts), longest)
    first = torch.zeros(full.shape[0], dtype=torch.int64)
    last = [(row.start + step.num_drafts) // step.block_size for row in rows]
    first[: len(rows)] = torch.tensor([max(block + 1 - width, 0) for block in last])
    columns = first.unsqueeze(1) + torch.arange(width)  # [requests, W]
    return {
        "block_table_tensor": full.gather(1, columns),
        "max_blocks_per_seq": width,
        "swa_kv_pos_offset": (first * step.block_size).to(torch.int32),
    }


def _shortened(full: torch.Tensor, context_len: int, step: Step) -> dict[str, Any]:
    """The columns of the first `context_len` tokens."""
    width = table_width(context_len, step.block_size)
    return {
        "block_table_tensor": full[:, :width].contiguous(),
        "max_blocks_per_seq": width,
        "swa_kv_pos_offset": torch.zeros(full.shape[0], dtype=torch.int32),
    }
