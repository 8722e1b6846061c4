"""Enums of the prefill experts. The library's values are not published; only the members are."""

from enum import Enum, auto


class MoECTEImplementation(Enum):
    """The `_mx` members are for Trainium 3."""

    shard_on_block = auto()
    shard_on_i = auto()
    shard_on_i_hybrid = auto()
    shard_on_i_dropping = auto()
    shard_on_block_mx = auto()
    shard_on_i_mx = auto()
    shard_on_i_mx_hybrid = auto()


class BlockShardStrategy(Enum):
    PING_PONG = auto()
    HI_LO = auto()
