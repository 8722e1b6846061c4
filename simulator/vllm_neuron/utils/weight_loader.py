"""Weight loaders: how slices of checkpoint tensors become one rank's parameter.

A loader hangs on its parameter (`set_weight_loader`) and is called with lazy slices, so a rank reads no more
of a checkpoint tensor than it keeps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F


class Slice(Protocol):
    """A checkpoint tensor that is read when indexed (safetensors' ``PySafeSlice``)."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


Transform = Callable[[list[Any], int], torch.Tensor]


@dataclass
class ShardSpec:
    """How a dimension is split: `num_shards` shards of `size` along `dim`."""

    dim: int
    size: int
    num_shards: int


@dataclass
class SafetensorsWeightLoader:
    """Turns the slices of a parameter's checkpoint keys into the rank's tensor.

    Attributes:
        transform: ``(slices, rank) -> tensor``; None reads the one slice whole.
    """

    transform: Transform | None = None

    def load(self, slices: Sequence[Slice], rank: int) -> torch.Tensor:
        """Return the rank's tensor, contiguous.

        Raises:
            AssertionError: There is no transform and not exactly one slice.
        """
        if self.transform is not None:
            return self.transform(list(slices), rank).contiguous()
        return _single(slices)[:].contiguous()


def set_weight_loader(param: torch.nn.Parameter, loader: SafetensorsWeightLoader) -> None:
    param.weight_loader = loader


def get_weight_loader(param: torch.nn.Parameter) -> SafetensorsWeightLoader:
    """Return the parameter's loader, or one that reads the whole tensor."""
    return getattr(param, "weight_loader", None) or SafetensorsWeightLoader()


def with_rank_override(loader: SafetensorsWeightLoader, rank: int) -> SafetensorsWeightLoader:
    """Return a loader that takes `rank` instead of the rank it is called with.

    For parameters that are sharded over another group than the tensor-parallel one.
    """
    return SafetensorsWeightLoader(lambda slices, _: loader.load(slices, rank))


def get_shard(slice_obj: Slice, dim: int, shard_size: int, num_shards: int, rank: int) -> torch.Tensor:
    """Return shard ``rank % num_shards`` of dimension `dim`; not padded where the tensor ends."""
    return _narrow(slice_obj, dim, (rank % num_shards) * shard_size, shard_size)


def get_shard_deinterleaved(
    slice_obj: Slice, dim: int, shard_size: int, num_shards: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a shard of an interleaved tensor (gate 0, up 0, gate 1, up 1, ...) into its gate and up halves.

    Returns:
        (gate, up), `shard_size` elements each along `dim`.
    """
    pairs = get_shard(slice_obj, dim, 2 * shard_size, num_shards, rank)
    even = torch.arange(0, 2 * shard_size, 2)
    return pairs.index_select(dim, even), pairs.index_select(dim, even + 1)


def pad_to_shape(tensor: torch.Tensor, target_shape: Sequence[int]) -> torch.Tensor:
    """Pad with zeros at the end of each dimension."""
    padding: list[int] = []
    for size, target in zip(reversed(tensor.shape), reversed(list(target_shape)), strict=True):
        padding += [0, target - size]
    return F.pad(tensor, padding)


def sharding_weight_loader(
    shard_dim: int,
    shard_size: int,
    num_shards: int,
    is_storage_transposed: bool = False,
    pad_shard: bool = False,
) -> SafetensorsWeightLoader:
    """Load one shard of a tensor.

    Args:
        shard_dim: Dimension of the parameter that is split.
        shard_size: Elements per rank along it.
        num_shards: Number of shards; ranks beyond it start again at the first.
        is_storage_transposed: The checkpoint holds the transpose of the (at most 2-D) parameter.
        pad_shard: Pad a short shard with zeros to `shard_size`.
    """

    def transform(slices: list[Slice], rank: int) -> torch.Tensor:
        source = _single(slices)
        shard = get_shard(
            source, _storage_dim(source, shard_dim, is_storage_transposed), shard_size, num_shards, rank
        )
        shard = shard.T if is_storage_transposed else shard
        return _pad_dim(shard, shard_dim, shard_size) if pad_shard else shard

    return SafetensorsWeightLoader(transform)


def sharding_weight_loader_with_padding(
    shard_dim: int,
    shard_size: int,
    num_shards: int,
    is_storage_transposed: bool = False,
    pad_dim: int | None = None,
    padded_size: int | None = None,
    unpadded_size: int | None = None,
) -> SafetensorsWeightLoader:
    """Load one shard of a 2-D tensor and append ``padded_size - unpadded_size`` zeros on `pad_dim`."""
    sharded = sharding_weight_loader(shard_dim, shard_size, num_shards, is_storage_transposed)

    def transform(slices: list[Slice], rank: int) -> torch.Tensor:
        shard = sharded.load(slices, rank)
        if pad_dim is None or padded_size is None or unpadded_size is None:
            return shard
        return _pad_dim(shard, pad_dim, shard.shape[pad_dim] + padded_size - unpadded_size)

    return SafetensorsWeightLoader(transform)


def last_dim_padding_weight_loader(padded_size: int) -> SafetensorsWeightLoader:
    """Load the whole tensor, its last dimension padded with zeros to `padded_size` if it is shorter."""
    return SafetensorsWeightLoader(lambda slices, _: _pad_dim(slices[0][:], -1, padded_size))


def scaled_bias_loader(scale: float, padded_size: int | None = None) -> SafetensorsWeightLoader:
    """Load a bias divided by `scale`, so that it counts once after the sum over `scale` ranks."""

    def transform(slices: list[Slice], rank: int) -> torch.Tensor:
        bias = _single(slices)[:] / scale
        return bias if padded_size is None else _pad_dim(bias, -1, padded_size)

    return SafetensorsWeightLoader(transform)


def fused_qkv_weight_loader(
    q_size: int,
    kv_size: int,
    shard_dim: int,
    num_shards: int,
    is_storage_transposed: bool = False,
    num_kv_replicas: int = 1,
    padded_hidden_size: int | None = None,
    unpadded_hidden_size: int | None = None,
    attention_dp_rank: int = 0,
    attention_dp_size: int = 1,
    kv_sharded_across_attention_dp: bool = False,
) -> SafetensorsWeightLoader:
    """Load the rank's Q, K and V weights (2-D, slices in this order) concatenated on `shard_dim`.

    Args:
        q_size: Q rows per rank (heads of a rank times head size).
        kv_size: K (and V) rows per rank.
        shard_dim: Dimension of the parameter that is split, 0 or 1.
        num_shards: Number of Q shards.
        is_storage_transposed: The checkpoint holds the transposes.
        num_kv_replicas: Consecutive ranks that hold the same K and V heads.
        padded_hidden_size, unpadded_hidden_size: Append the difference as zeros on dimension 0.
        attention_dp_rank, attention_dp_size, kv_sharded_across_attention_dp: Attention data parallelism.

    Raises:
        AssertionError: Not exactly three 2-D slices, or another `shard_dim`.
    """
    assert shard_dim in (0, 1), f"shard_dim must be 0 or 1, got {shard_dim}"

    def transform(slices: list[Slice], rank: int) -> torch.Tensor:
        assert len(slices) == 3, f"expected the 3 slices q, k, v, got {len(slices)}"
        assert all(len(s.get_shape()) == 2 for s in slices), "q, k and v must be 2-D"
        local = rank % num_shards
        q_rank = attention_dp_rank + local * attention_dp_size
        kv_rank = q_rank if kv_sharded_across_attention_dp else local // num_kv_replicas
        dim = 1 - shard_dim if is_storage_transposed else shard_dim
        shards = []
        for source, size, shard in zip(
            slices, (q_size, kv_size, kv_size), (q_rank, kv_rank, kv_rank), strict=True
        ):
            part = _narrow(source, dim, shard * size, size)
            shards.append(part.T if is_storage_transposed else part)
        fused = torch.cat(shards, dim=shard_dim)
        if padded_hidden_size is None or unpadded_hidden_size is None:
            return fused
        return _pad_dim(fused, 0, fused.shape[0] + padded_hidden_size - unpadded_hidden_size)

    return SafetensorsWeightLoader(transform)


# --- Experts ----------------------------------------------------------------------------------------------


class SliceView:
    """A restriction of a slice or tensor that is read only when indexed.

    Args:
        base: Slice, tensor or view.
        index: Per dimension a slice, an int (the dimension is dropped) or a list of ints; None is everything.
            Missing dimensions are whole, an Ellipsis stands for any number of whole ones.

    Raises:
        TypeError: The index holds None, a bool or a tensor.
    """

    def __init__(self, base: Any, index: Any = None):
        base_shape = list(base.get_shape() if hasattr(base, "get_shape") else base.shape)
        self._base = base
        # Per dimension of `base` an int, or the list of kept positions.
        self._positions: list[int | Sequence[int]] = [range(size) for size in base_shape]
        for dim, entry in enumerate(_expand_index(index, len(base_shape))):
            self._positions[dim] = _select(range(base_shape[dim]), entry)

    @property
    def shape(self) -> list[int]:
        return [len(p) for p in self._positions if not isinstance(p, int)]

    def get_shape(self) -> list[int]:
        return self.shape

    def view(self, index: Any) -> "SliceView":
        """Return a further restricted view; nothing is read."""
        view = SliceView(self._base)
        view._positions = list(self._positions)
        dims = [dim for dim, p in enumerate(self._positions) if not isinstance(p, int)]
        for dim, entry in zip(dims, _expand_index(index, len(dims)), strict=True):
            kept = self._positions[dim]
            assert not isinstance(kept, int)
            view._positions[dim] = _select(kept, entry)
        return view

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.view(index)._read()

    def _read(self) -> torch.Tensor:
        spans = tuple(_span(p) for p in self._positions)
        tensor = self._base[spans]
        for dim, (positions, span) in enumerate(zip(self._positions, spans, strict=True)):
            if not isinstance(positions, int) and positions != range(span.start, span.stop):
                chosen = torch.tensor([p - span.start for p in positions], dtype=torch.int64)
                tensor = tensor.index_select(dim, chosen)
        return tensor[tuple(0 if isinstance(p, int) else slice(None) for p in self._positions)]


def expert_parallel_tensor_dim_loader(
    local_expert_indices: Sequence[int], original_loader: SafetensorsWeightLoader, expert_dim: int = 0
) -> SafetensorsWeightLoader:
    """Restrict every slice to the rank's experts on `expert_dim`, then apply `original_loader`.

    Raises:
        ValueError: The expert indices are not contiguous.
    """
    first, last = _contiguous_range(local_expert_indices)

    def transform(slices: list[Slice], rank: int) -> torch.Tensor:
        index = (slice(None),) * expert_dim + (slice(first, last + 1),)
        return original_loader.load([SliceView(s, index) for s in slices], rank)

    return SafetensorsWeightLoader(transform)


def expert_parallel_grouped_loader(
    local_expert_indices: Sequence[int], original_loader: SafetensorsWeightLoader, total_num_experts: int
) -> SafetensorsWeightLoader:
    """Keep the rank's experts of slices laid out item by item (all experts of the first, of the second, ...).

    Raises:
        ValueError: The expert indices are not contiguous; at load, the slices do not divide by the experts.
    """
    first, last = _contiguous_range(local_expert_indices)

    def transform(slices: list[Slice], rank: int) -> torch.Tensor:
        items = _items_per_expert(slices, total_num_experts)
        kept = [slices[i * total_num_experts + e] for i in range(items) for e in range(first, last + 1)]
        return original_loader.load(kept, rank)

    return SafetensorsWeightLoader(transform)


def expert_parallel_interleaved_loader(
    local_expert_indices: Sequence[int], original_loader: SafetensorsWeightLoader, total_num_experts: int
) -> SafetensorsWeightLoader:
    """Keep the rank's experts of slices laid out expert by expert (all items of expert 0, of expert 1, ...).

    Raises:
        ValueError: The expert indices are not contiguous; at load, the slices do not divide by the experts.
    """
    first, last = _contiguous_range(local_expert_indices)

    def transform(slices: list[Slice], rank: int) -> torch.Tensor:
        items = _items_per_expert(slices, total_num_experts)
        return original_loader.load(slices[first * items : (last + 1) * items], rank)

    return SafetensorsWeightLoader(transform)


# --- Helpers ----------------------------------------------------------------------------------------------


def _single(slices: Sequence[Slice]) -> Slice:
    assert len(slices) == 1, f"expected exactly 1 slice, got {len(slices)}"
    return slices[0]


def _storage_dim(source: Slice, dim: int, is_storage_transposed: bool) -> int:
    if not is_storage_transposed:
        return dim
    assert len(source.get_shape()) <= 2, (
        f"transposed storage needs at most 2 dimensions, got {source.get_shape()}"
    )
    return 1 - dim if dim in (0, 1) else dim


def _narrow(source: Slice, dim: int, start: int, size: int) -> torch.Tensor:
    index = [slice(None)] * len(source.get_shape())
    index[dim] = slice(start, start + size)
    return source[tuple(index)]


def _pad_dim(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    if tensor.shape[dim] >= size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    return pad_to_shape(tensor, shape)


def _contiguous_range(indices: Sequence[int]) -> tuple[int, int]:
    if not indices or list(indices) != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(f"local_expert_indices must be contiguous and not empty, got {list(indices)}")
    return indices[0], indices[-1]


def _items_per_expert(slices: Sequence[Slice], total_num_experts: int) -> int:
    if len(slices) % total_num_experts:
        raise ValueError(f"{len(slices)} slices do not divide by {total_num_experts} experts")
    return len(slices) // total_num_experts


def _expand_index(index: Any, num_dims: int) -> list[Any]:
    entries = [] if index is None else list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        if entry is None or isinstance(entry, bool | torch.Tensor):
            raise TypeError(f"a SliceView takes slices, ints, lists and Ellipsis, not {entry!r}")
    whole = [slice(None)] * (num_dims - len([e for e in entries if e is not Ellipsis]))
    if Ellipsis not in entries:
        return entries + whole
    at = entries.index(Ellipsis)
    return entries[:at] + whole + entries[at + 1 :]


def _select(positions: Sequence[int], entry: Any) -> int | Sequence[int]:
    return [positions[i] for i in entry] if isinstance(entry, list) else positions[entry]


def _span(positions: int | Sequence[int]) -> slice:
    if isinstance(positions, int):
        return slice(positions, positions + 1)
    return slice(min(positions), max(positions) + 1) if len(positions) else slice(0, 0)
