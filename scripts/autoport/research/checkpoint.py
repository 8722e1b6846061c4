"""Step 1: keys, shapes and dtypes of a checkpoint, from its safetensors headers only.

A safetensors file is 8 bytes (length of the header, little-endian), the header (a JSON object: key -> dtype,
shape, data_offsets), then the data. https://huggingface.co/docs/safetensors has the format.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoport.errors import Problem, Refusal, refuse
from autoport.research.json_text import parse_json
from autoport.research.keys import fold_all, label
from autoport.research.source import Source
from autoport.schema.facts import Checkpoint, TensorHeader

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
LARGEST_HEADER_BYTES = 100_000_000  # as the safetensors library
LARGEST_INDEX_BYTES = 100_000_000

# Bits per element.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_checkpoint(source: Source) -> Checkpoint:
    """Read the headers of a single or sharded safetensors checkpoint.

    Raises:
        Refusal: CKPT-NONE (no safetensors), CKPT-BIN (pickle only), CKPT-INDEX (index and files disagree),
            CKPT-HEADER (a damaged or truncated file), SRC-LFS (a git-lfs pointer), CKPT-DUPLICATE (a key in two
            files); all at once.
    """
    before = source.bytes_read
    weight_map = _read_index(source)
    files, left_out = _files(source, weight_map)
    problems: list[Problem] = []
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        try:
            header = read_header(source, file)
        except Refusal as refusal:
            problems += refusal.problems
            continue
        twice = [key for key in header if key in tensors]
        if twice:
            found = f"{len(twice)} keys are in {file} and in another file, e.g. {twice[0]}"
            problems.append(Problem("CKPT-DUPLICATE", found, source.where(file), "remove one of the files"))
        tensors |= header
    if weight_map is not None and not problems:
        problems += _compare_index(source, weight_map, tensors)
    if problems:
        raise Refusal(*problems)
    if not tensors:
        raise refuse(
            "CKPT-NONE", "the safetensors files hold no tensor", source.name, "download the model again"
        )
    return Checkpoint(
        source=source.name,
        files=files,
        tensors=tensors,
        total_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        bytes_read=source.bytes_read - before,
        left_out=left_out,
        notes=[f"not part of the checkpoint: {', '.join(left_out)}"] if left_out else [],
    )


def _read_index(source: Source) -> dict[str, str] | None:
    """Checkpoint key -> file name of the index, or None without one."""
    if INDEX_NAME not in source.sizes or SINGLE_NAME in source.sizes:
        return None
    where = source.where(INDEX_NAME)
    try:
        index = parse_json(source.read(INDEX_NAME, 0, LARGEST_INDEX_BYTES).decode())
        weight_map = index["weight_map"]
        if (
            not weight_map
            or not isinstance(weight_map, dict)
            or any(not isinstance(file, str) for file in weight_map.values())
        ):
            raise ValueError("weight_map is not an object of file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) or type(error).__name__
        raise refuse("CKPT-INDEX", f"damaged index: {reason}", where, "download the file again") from error
    return dict(weight_map)


def _files(source: Source, weight_map: dict[str, str] | None) -> tuple[list[str], list[str]]:
    """The safetensors files that make up the checkpoint, and the others beside them, in name order."""
    present = sorted(name for name in source.sizes if name.endswith(".safetensors"))
    if weight_map is not None:
        named = set(weight_map.values())
        missing = sorted(named - set(present))
        if missing:
            listing = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise refuse(
                "CKPT-INDEX",
                f"the index names {len(missing)} file(s) that are not there: {listing}",
                source.where(INDEX_NAME),
                "download the missing files",
            )
    elif SINGLE_NAME in present:
        named = {SINGLE_NAME}
    elif len(present) == 1:
        named = set(present)
    elif present:
        raise refuse(
            "CKPT-INDEX",
            f"{len(present)} safetensors files and no {INDEX_NAME}: {', '.join(present[:5])}",
            source.name,
            f"download {INDEX_NAME}, or keep only the files of the model",
        )
    else:
        raise _no_safetensors(source)
    return sorted(named), sorted(set(present) - named)


def pickle_files(source: Source) -> list[str]:
    return sorted(name for name in source.sizes if name.endswith((".bin", ".pt", ".pth", ".ckpt")))


def no_weights(source: Source) -> Checkpoint | None:
    """A checkpoint without tensors for a folder with a config and no weights at all; None where there are some."""
    if pickle_files(source) or any(name.endswith(".safetensors") for name in source.sizes):
        return None
    note = "no weights are there: biases, fused tensors, the head, sizes and quantisation were not checked"
    return Checkpoint(source=source.name, files=[], tensors={}, total_bytes=0, bytes_read=0, notes=[note])


def _no_safetensors(source: Source) -> Refusal:
    pickles = pickle_files(source)
    if pickles:
        return refuse(
            "CKPT-BIN",
            f"only pickle files, which are not opened: {', '.join(pickles)}",
            source.name,
            "convert it where you trust it: python -c 'from transformers import AutoModelForCausalLM as M; "
            f'M.from_pretrained("{source.name}", dtype="auto").save_pretrained("converted")\'',
        )
    is_file = Path(source.name).expanduser().is_file()
    step = (
        "pass the model's folder, or one of its .safetensors files"
        if is_file
        else "download the model's weights"
    )
    return refuse("CKPT-NONE", "no .safetensors file", source.name, step)


def _compare_index(
    source: Source, weight_map: dict[str, str], tensors: dict[str, TensorHeader]
) -> Iterator[Problem]:
    """Every key that the index and the files do not agree on, layers folded."""
    disagreements: dict[str, list[str]] = {}
    for key, file in weight_map.items():
        if key not in tensors:
            disagreements.setdefault(f"is not in {file}, where the index puts it", []).append(key)
        elif tensors[key].file != file:
            text = f"is in {tensors[key].file}, not in {file}, where the index puts it"
            disagreements.setdefault(text, []).append(key)
    for key, tensor in tensors.items():
        if key not in weight_map:
            disagreements.setdefault(f"is in {tensor.file} but not in the index", []).append(key)
    for text, keys in disagreements.items():
        for name, layers in fold_all(keys).items():
            found = f"{label(name, layers)} {text}"
            yield Problem("CKPT-INDEX", found, source.where(INDEX_NAME), "download index and files again")


def read_header(source: Source, file: str) -> dict[str, TensorHeader]:
    """Read and check the header of one safetensors file.

    Raises:
        Refusal: CKPT-HEADER when the header is damaged or does not fit the file's size.
    """
    try:
        size = source.sizes[file]
        head = source.read(file, 0, source.first_read)
        if len(head) < 8:
            raise ValueError(f"{len(head)} bytes is no safetensors file")
        length = int.from_bytes(head[:8], "little")
        if length > LARGEST_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes (at most {LARGEST_HEADER_BYTES})")
        if 8 + length > size:
            raise ValueError(f"truncated: {size} bytes, and the header alone ends at {8 + length}")
        if 8 + length > len(head):
            head += source.read(file, len(head), 8 + length - len(head))
        _check_density(head, 8 + length)
        entries = parse_json(head[8 : 8 + length].decode())
        return _check_entries(entries, file, 8 + length, size)
    except ValueError as error:
        raise refuse("CKPT-HEADER", str(error), source.where(file), "download the file again") from error


def _check_density(head: bytes, end: int) -> None:
    """Refuse JSON that takes far more memory as objects than as text; an entry of a tensor is never that short.

    Raises:
        ValueError: More objects, lists or values than the entries of tensors can have.
    """
    for mark, shortest in ((b"{", 40), (b"[", 20), (b",", 6), (b":", 10)):
        count = head.count(mark, 8, end)
        if count * shortest > end + 4096:
            raise ValueError(f"{count} times {mark.decode()!r} in {end - 8} bytes is no header of tensors")


def _check_entries(entries: Any, file: str, data_start: int, size: int) -> dict[str, TensorHeader]:
    """Return the entries as types, after checking that they tile the file's data without gap or overlap.

    Args:
        data_start: Offset at which the data begins, in bytes.
        size: Size of the file in bytes.

    Raises:
        ValueError: the first thing that is wrong.
    """
    if not isinstance(entries, dict):
        raise ValueError("the header is not an object")
    entries.pop("__metadata__", None)
    tensors: dict[str, TensorHeader] = {}
    ranges: list[tuple[int, int, str]] = []
    for key, entry in entries.items():
        if not key.isprintable():
            raise ValueError(f"{key!r:.200} is no key of a tensor")
        try:
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{key} lacks dtype, shape or data_offsets") from None
        numbers = [*shape, start, end] if isinstance(shape, list) else [None]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{key} has shape {shape} and data_offsets {[start, end]}")
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise ValueError(f"{key} has unknown dtype {dtype!r}")
        expected = math.prod(shape) * DTYPE_BITS[dtype] / 8
        if end - start != expected:
            raise ValueError(
                f"{key} ({dtype} {shape}) takes {expected:.0f} bytes, data_offsets give {end - start}"
            )
        tensors[key] = TensorHeader(
            dtype, tuple(shape), file, num_bytes=end - start, offset=data_start + start
        )
        ranges.append((start, end, key))
    position = 0
    for start, end, key in sorted(ranges):
        if start != position:
            raise ValueError(f"data of {key} begins at {start}, not at {position}: a gap or an overlap")
        position = end
    if data_start + position > size:
        raise ValueError(f"truncated: {size} bytes, the tensors end at {data_start + position}")
    if data_start + position < size:
        raise ValueError(f"{size - data_start - position} bytes after the last tensor")
    return tensors
