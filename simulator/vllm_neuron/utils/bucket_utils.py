"""Padded sizes ("buckets") of prefill, decode and context, and the segment sizes of chunked prefill."""

import warnings
from collections.abc import Sequence

SUPPORTED_KV_SEGMENT_SIZES = frozenset({512, 1024, 2048, 4096, 8192})
MAX_SINGLE_SHOT_PREFILL = 16 * 1024
FIRST_PREFILL_BUCKET = 128


def get_max_num_batched_tokens(max_num_batched_tokens: int, max_model_len: int) -> int:
    """Tokens of the largest prefill step."""
    return min(max_num_batched_tokens, max_model_len)


def resolve_num_batched_tokens_buckets(
    max_num_batched_tokens: int, buckets: Sequence[int] | None = None
) -> list[int]:
    """Prefill buckets: the user's, or powers of two from 128 up and the maximum.

    Raises:
        ValueError: the user's list is empty, not ascending, or does not end at the maximum.
    """
    if buckets is None:
        return _doubling(FIRST_PREFILL_BUCKET, max_num_batched_tokens)
    return _checked(buckets, "num_batched_tokens_buckets", max_num_batched_tokens, "max_num_batched_tokens")


def resolve_num_seqs_buckets(max_num_seqs: int, buckets: Sequence[int] | None = None) -> list[int]:
    """Decode buckets: the user's, or powers of two from 1 up and the maximum.

    Raises:
        ValueError: the user's list is empty, not ascending, or does not end at the maximum.
    """
    if buckets is None:
        return _doubling(1, max_num_seqs)
    return _checked(buckets, "num_seqs_buckets", max_num_seqs, "max_num_seqs")


def resolve_decode_context_length_buckets(
    max_model_len: int, buckets: Sequence[int] | None = None
) -> list[int]:
    """Context lengths that decode is compiled for: the user's, then `max_model_len`.

    Raises:
        ValueError: the user's list is empty or not ascending, or an entry is not a multiple of 128 below
            `max_model_len`.
    """
    if buckets is None:
        return [max_model_len]
    name = "decode_context_length_buckets"
    _check_ascending(buckets, name)
    if any(size >= max_model_len or size % 128 for size in buckets):
        raise ValueError(
            f"{name} must hold multiples of 128 below max_model_len {max_model_len}, got {list(buckets)}"
        )
    return [*buckets, max_model_len]


def resolve_segmented_prefill_config(
    max_num_batched_tokens: int, max_model_len: int
) -> tuple[list[int] | None, list[int] | None]:
    """Whether prefill is cut into segments.

    Returns:
        `(num_batched_tokens_buckets, kv_segment_size_buckets)`: both `[max_num_batched_tokens]` for segmented
        prefill, both None when a prompt fits one step.

    Raises:
        ValueError: one step but `max_model_len` above 16384, or segments of a size that is not supported.
    """
    if max_num_batched_tokens >= max_model_len:
        if max_model_len > MAX_SINGLE_SHOT_PREFILL:
            raise ValueError(
                f"Prefill in one step is limited to max_model_len {MAX_SINGLE_SHOT_PREFILL}, got "
                f"{max_model_len}; set max_num_batched_tokens to one of {sorted(SUPPORTED_KV_SEGMENT_SIZES)}"
            )
        return None, None
    if max_num_batched_tokens not in SUPPORTED_KV_SEGMENT_SIZES:
        raise ValueError(
            f"max_num_batched_tokens {max_num_batched_tokens} is below max_model_len {max_model_len}, so it "
            f"must be a segment size: one of {sorted(SUPPORTED_KV_SEGMENT_SIZES)}"
        )
    return [max_num_batched_tokens], [max_num_batched_tokens]


def resolve_kv_segment_size_buckets(
    kv_segment_size_buckets: Sequence[int], num_batched_tokens_buckets: Sequence[int] | None = None
) -> list[int]:
    """The user's segment size, as a list of one.

    Raises:
        ValueError: not exactly one size, a size that is not supported, or prefill buckets that differ.
    """
    sizes = list(kv_segment_size_buckets)
    if len(sizes) != 1 or sizes[0] not in SUPPORTED_KV_SEGMENT_SIZES:
        raise ValueError(
            f"kv_segment_size_buckets must hold one of {sorted(SUPPORTED_KV_SEGMENT_SIZES)}, got {sizes}"
        )
    if num_batched_tokens_buckets is not None and list(num_batched_tokens_buckets) != sizes:
        raise ValueError(
            f"num_batched_tokens_buckets {list(num_batched_tokens_buckets)} must equal "
            f"kv_segment_size_buckets {sizes}"
        )
    return sizes


def get_bucket_for_count(count: int, buckets: Sequence[int]) -> int:
    """Smallest bucket that holds `count`; the largest, with a warning, when none does."""
    for bucket in buckets:
        if bucket >= count:
            return bucket
    warnings.warn(f"{count} exceeds the largest bucket {buckets[-1]}", stacklevel=2)
    return buckets[-1]


def get_decode_padded_batch_size(
    num_reqs: int, max_query_len: int, num_seqs_buckets: Sequence[int], decode_token_threshold: int = 1
) -> int:
    """Padded number of requests: a bucket in decode, unchanged in prefill."""
    if max_query_len > decode_token_threshold:
        return num_reqs
    return get_bucket_for_count(num_reqs, num_seqs_buckets)


def _doubling(first: int, last: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def _check_ascending(buckets: Sequence[int], name: str) -> None:
    positive = all(isinstance(size, int) and size > 0 for size in buckets)
    if not buckets or not positive or sorted(set(buckets)) != list(buckets):
        raise ValueError(f"{name} must be positive integers in ascending order, got {list(buckets)}")


def _checked(buckets: Sequence[int], name: str, maximum: int, maximum_name: str) -> list[int]:
    _check_ascending(buckets, name)
    if buckets[-1] != maximum:
        raise ValueError(f"{name} must end at {maximum_name} {maximum}, got {list(buckets)}")
    return list(buckets)
