"""A checkpoint's headers, summed up for a reader."""

from collections import Counter

import msgspec

from autoport.research.keys import fold, ranges
from autoport.schema.facts import Checkpoint


class KeyRow(msgspec.Struct, frozen=True):
    """Keys that differ only in their first index, with one shape and dtype. `indices` is e.g. ``"0-31"``."""

    key: str
    indices: str
    shape: tuple[int, ...]
    dtype: str


def fold_keys(checkpoint: Checkpoint) -> list[KeyRow]:
    """The key table with layer indices folded, in the checkpoint's order."""
    rows: dict[tuple[str, tuple[int, ...], str], set[int]] = {}
    for key, tensor in checkpoint.tensors.items():
        name, index = fold(key)
        rows.setdefault((name, tensor.shape, tensor.dtype), set()).update(() if index is None else (index,))
    return [KeyRow(key, ranges(indices), shape, dtype) for (key, shape, dtype), indices in rows.items()]


def count_dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    """Number of tensors by dtype, most frequent first."""
    return dict(Counter(tensor.dtype for tensor in checkpoint.tensors.values()).most_common())


def bytes_by_file(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of tensor data by file."""
    sizes = dict.fromkeys(checkpoint.files, 0)
    for tensor in checkpoint.tensors.values():
        sizes[tensor.file] += tensor.num_bytes
    return sizes
