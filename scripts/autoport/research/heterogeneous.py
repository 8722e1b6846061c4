"""Configs whose layers have different shapes, or are no attention layers at all."""

from collections.abc import Mapping
from typing import Any

from autoport.research.aliases import ALIASES
from autoport.research.fields import Resolver, describe

BY_HAND = (
    "layers of different shapes are not ported: write the model by hand, from the nearest reference model"
)
PER_LAYER = ("num_heads", "num_kv_heads", "intermediate_size", "head_dim", "hidden_size")


def heterogeneous_problems(resolver: Resolver) -> set[str]:
    """Record (CFG-PER-LAYER) what makes layers differ in shape; returns the fields that are lists."""
    lists = set()
    for name in PER_LAYER:
        for key in ALIASES[name]:
            value = resolver.config.get(key)
            if isinstance(value, list):
                lists.add(name)
                _problem(resolver, f"{key} is {describe(value)}{_without(value)}")
    blocks = resolver.config.get("block_configs")
    if isinstance(blocks, list):
        _problem(resolver, f"block_configs describes {len(blocks)} layers one by one{_no_ops(blocks)}")
    pattern = resolver.config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and set(pattern) - {"*"}:
        _problem(
            resolver, f"hybrid_override_pattern is {describe(pattern)}: M is a Mamba layer, - an MLP alone"
        )
    return lists


def _problem(resolver: Resolver, found: str) -> None:
    resolver.problem("CFG-PER-LAYER", found, BY_HAND)


def _without(values: list[Any]) -> str:
    absent = [i for i, value in enumerate(values) if not value]
    return f": layer {absent[0]} has none" if absent else ": one value for each layer"


def _no_ops(blocks: list[Any]) -> str:
    for i, block in enumerate(blocks):
        for part in ("attention", "ffn"):
            described = block.get(part) if isinstance(block, Mapping) else None
            if isinstance(described, Mapping) and (
                described.get("no_op") or described.get("replace_with_linear")
            ):
                return f"; layer {i} has no {part}"
    return ""
