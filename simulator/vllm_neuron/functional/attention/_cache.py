"""Reading and writing the paged KV cache."""

import torch

from vllm_neuron.utils.dtype_utils import FP8_CLAMP_MAX


def unpack_keys(k_cache: torch.Tensor) -> torch.Tensor:
    """Plain view of a packed FP8 K cache: [..., block_len // 2, D, 2] -> [..., block_len, D].

    The last axis holds an even and the odd position after it.
    """
    return k_cache.transpose(-1, -2).flatten(-3, -2)


def per_head_table(table: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Block ids [B, blocks] -> [B, kv_heads, blocks] of block id * kv_heads + head.

    The entries number the [block_len, D] tiles of a cache [num_blocks, kv_heads, block_len, D]; ids below 0
    become block 0.
    """
    head = torch.arange(kv_heads, dtype=table.dtype, device=table.device)
    return table.clamp(min=0)[:, None, :] * kv_heads + head[:, None]


def gather_blocks(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Copy of each sequence's context, in sequence order. Entries below 0 read block 0.

    Args:
        cache: [num_blocks, kv_heads, block_len, D].
        table: [B, blocks] of block ids, or [B, kv_heads, blocks] of block id * kv_heads + head.

    Returns:
        [B, kv_heads, blocks * block_len, D].
    """
    tiles = per_head_table(table, cache.shape[1]) if table.dim() == 2 else table.clamp(min=0)
    B, kv_heads, blocks = tiles.shape
    rows = cache.flatten(0, 1).index_select(0, tiles.flatten())
    return rows.view(B, kv_heads, blocks * cache.shape[2], cache.shape[3])


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 values of `x` times the reciprocal scale (element 0 of `scale`)."""
    scaled = x * scale.flatten()[0].to(x.dtype)
    return scaled.clamp(-FP8_CLAMP_MAX, FP8_CLAMP_MAX).to(torch.float8_e4m3fn)


def put_slots(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, block_len: int) -> None:
    """Write rows [N, kv_heads, D] at flat slots [N] (block * block_len + offset) in place.

    `cache` is [num_blocks, kv_heads, block_len, D], or packed [num_blocks, kv_heads, block_len // 2, D, 2].
    A negative slot counts from the end of the cache, as an index does.
    """
    rows = rows.to(cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:  # there is no indexed write in FP8
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    block, offset = slots // block_len, slots % block_len
    if cache.dim() == 5:
        cache[block, :, offset // 2, :, offset % 2] = rows
    else:
        cache[block, :, offset] = rows


def put_valid_slots(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, block_len: int) -> None:
    """`put_slots`, but slots outside the cache are skipped; -1 and its unsigned form mean "skip"."""
    rows = rows.to(cache.dtype)
    last = cache.shape[0] * block_len - 1
    slots = slots.to(torch.int64)
    valid = (slots >= 0) & (slots <= last)
    # A masked write would have a data-dependent shape. So skipped rows are written to the last slot, with
    # what that slot holds in the end: a row of this batch if one goes there, else what it holds already.
    goes_last = valid & (slots == last)
    held = cache[-1, :, -1, :, 1] if cache.dim() == 5 else cache[-1, :, -1]
    candidate = rows.index_select(0, goes_last.to(torch.int64).argmax().view(1)).squeeze(0)
    held = torch.where(goes_last.any(), candidate, held)
    put_slots(cache, slots.where(valid, last), torch.where(valid[:, None, None], rows, held), block_len)
