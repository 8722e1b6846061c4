"""What a model tells the runner about its KV cache."""

from dataclasses import dataclass

import torch


@dataclass
class LayerSpec:
    """KV cache of one layer.

    Attributes:
        name: Key of the layer in the caches and in the attention metadata, ``"layers.<i>.self_attn"``.
        num_kv_heads: KV heads of one rank.
        head_size: Size of a head.
        dtype: Model dtype; the cache itself takes the runner's cache dtype.
        sliding_window_size: Window in tokens, None for full attention.
        chunk_size: Chunk of chunked attention in tokens, None for full attention.
    """

    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window_size: int | None = None
    chunk_size: int | None = None


@dataclass
class KVSpec:
    """KV caches of a model, one entry per layer that has one."""

    layers: list[LayerSpec]
