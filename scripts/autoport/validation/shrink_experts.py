"""Sizes of the twin's experts: few and small, with every choice of the router still a choice."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

MAX_EXPERTS = 8
MAX_TOP_K = 3
MAX_GROUPS = 4
MAX_SHARED = 2
EXPERT_SIZE = 64
# Where the port fills experts up to a multiple of 16; torch's grouped products take multiples of 8.
PADDED_SIZE = 72


def expert_sizes(
    value: Mapping[str, Any], divisible_as: Callable[[str, int], int], padded: Collection[str]
) -> dict[str, int]:
    """Small sizes by the name of the fact, for a model with experts; empty for a dense one.

    Groups stay at least two experts large (a group's score is the sum of two), some of them are left out where
    the real model leaves some out, and the groups that are chosen hold more experts than a token passes.

    Args:
        value: Values of the facts.
        padded: Facts of the sizes that the port fills up with zeros.
        divisible_as: ``(fact, start)`` -> smallest size from `start` on that TP sizes divide as they do the fact's.
    """
    if "num_experts" not in value:
        return {}
    groups, top_groups = value.get("n_group") or 1, value.get("topk_group") or 1
    small_groups = min(groups, MAX_GROUPS)
    sizes = {
        "num_experts": min(value["num_experts"], MAX_EXPERTS),
        "num_experts_per_tok": min(value["num_experts_per_tok"], MAX_TOP_K),
    }
    if groups > 1:
        in_group = min(value["num_experts"] // groups, -(-MAX_EXPERTS // small_groups))
        sizes["num_experts"] = small_groups * in_group
        sizes["n_group"] = small_groups
        sizes["topk_group"] = small_groups if top_groups == groups else max(1, small_groups // 2)
    for name in ("moe_intermediate_size", "shared_intermediate_size"):
        if value.get(name):
            is_padded = name == "moe_intermediate_size" and name in padded
            sizes[name] = min(value[name], PADDED_SIZE if is_padded else divisible_as(name, EXPERT_SIZE))
    if value.get("num_shared_experts"):
        sizes["num_shared_experts"] = min(value["num_shared_experts"], MAX_SHARED)
    return sizes
