"""The fields of a mixture of experts: how many, how large, how tokens are routed, and in which layers."""

from collections.abc import Mapping
from typing import Any

from autoport.research.aliases import READ_WITH
from autoport.research.fields import (
    Resolver,
    describe,
    is_count,
    is_flag,
    is_integer,
    is_number,
    is_part_count_or_0,
    is_text,
)
from autoport.schema.facts import Fact

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
ROUTER_NAMES = ("router_score", "router_method")  # said by the file even where the class has only one
METHODS = ("greedy", "group_limited_greedy", "noaux_tc")

FIELDS: dict[str, Any] = {
    "moe_intermediate_size": is_integer,
    "norm_topk_prob": is_flag,
    "routed_scaling_factor": is_number,
    "router_score": is_text,
    "router_method": is_text,
    "n_group": is_integer,
    "topk_group": is_integer,
}


def resolve_experts(resolver: Resolver, facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Facts of the experts; empty for a dense model (none, null, 0 or 1 expert)."""
    experts = resolver.optional("num_experts", is_part_count_or_0, strict=True)
    per_token = _experts_per_token(resolver)
    if experts is None or experts.value < 2 or (per_token is not None and per_token.value == 0):
        resolver.consumed.update(_present(resolver, READ_WITH["experts"]))
        return {}
    found: dict[str, Fact | None] = {"num_experts": experts, "num_experts_per_tok": per_token}
    found |= {
        name: resolver.optional(name, check, strict=name not in ROUTER_NAMES)
        for name, check in FIELDS.items()
    }
    shared = resolver.optional("num_shared_experts", is_part_count_or_0, strict=True)
    found["num_shared_experts"] = shared if shared and shared.value else None
    width = resolver.optional("shared_intermediate_size", is_count, strict=True)
    found["shared_intermediate_size"] = width if width and width.value else None
    if found["moe_intermediate_size"] is None and "intermediate_size" in facts:
        fact = facts["intermediate_size"]
        found["moe_intermediate_size"] = Fact(fact.value, f"derived: intermediate_size ({fact.source})")
    _check_router(resolver, found)
    layers = facts.get("num_layers")
    if layers:
        found["layer_moe"] = _moe_layers(resolver, layers.value)
    return {name: fact for name, fact in found.items() if fact is not None}


def _experts_per_token(resolver: Resolver) -> Fact | None:
    """How many experts each token goes to; a list for the layers counts as its number when it has only one."""
    per_token = resolver.optional("num_experts_per_tok", _is_count_or_counts, strict=True)
    if per_token is None or not isinstance(per_token.value, list):
        return per_token
    values = per_token.value
    if any(value != values[0] for value in values):
        text = f"layers with different numbers of experts per token: {describe(values)} ({per_token.source})"
        step = "only one number for all layers can be ported; the rest by hand from Step 4 of SKILL.md on"
        resolver.problem("SCOPE-MOE", text, step)
        return None
    return Fact(values[0], f"derived: the same for every layer ({per_token.source})")


def _is_count_or_counts(value: Any) -> str | None:
    if not isinstance(value, list):
        return is_part_count_or_0(value)
    if not value:
        return "is an empty list"
    return next((wrong for item in value if (wrong := is_part_count_or_0(item))), None)


def _present(resolver: Resolver, keys: tuple[str, ...]) -> set[str]:
    return {key for key in keys if resolver.config.get(key) in (None, 0, 1, -1, [])}


def _check_router(resolver: Resolver, found: Mapping[str, Fact | None]) -> None:
    for name, known in zip(ROUTER_NAMES, (SCORES, METHODS), strict=True):
        fact = found[name]
        if fact is not None and fact.value not in known:
            text = (
                f"{fact.source.removeprefix('config.json: ')} is {describe(fact.value)}, which is not known"
            )
            resolver.problem(
                "CFG-ROUTER", text, f"known: {', '.join(known)}; the routing has to be read first"
            )
    experts, per_token = found["num_experts"], found["num_experts_per_tok"]
    if experts and per_token and per_token.value > experts.value:
        text = f"{per_token.value} experts per token of {experts.value} experts"
        resolver.problem("CFG-EXPERTS", text, "correct num_experts_per_tok in config.json")
    groups = found["n_group"]
    if experts and groups and experts.value % groups.value:
        text = f"{experts.value} experts do not divide into {groups.value} groups"
        resolver.problem("CFG-EXPERTS", text, "correct n_group in config.json")


def _moe_layers(resolver: Resolver, count: int) -> Fact | None:
    """Which layers have experts (a list of true and false), by whichever of the many keys says so."""
    resolver.consumed.update(READ_WITH["experts"])

    def of(key: str, kind: type) -> Any:
        """The key's value; None, and a problem, for one of another kind."""
        found = resolver.attribute(key)
        value = found.value if found is not None else resolver.config.get(key)
        if value is None or type(value) is kind:
            return value
        text = f"{key} is {describe(value)}, not {'a list' if kind is list else 'a whole number'}"
        resolver.problem("CFG-TYPE", text, f"correct {key} in config.json")
        return None

    def fact(layers: list[bool], *keys: str) -> Fact:
        given = [f"{resolver.path}{key}" for key in keys if resolver.config.get(key) is not None]
        computed = [
            item.source for key in keys if (item := resolver.attribute(key)) and key not in resolver.config
        ]
        return Fact(
            layers, f"config.json: {', '.join(given)}" if given else "; ".join(dict.fromkeys(computed))
        )

    def check_length(key: str, values: list[Any]) -> None:
        if len(values) != count:
            text = f"{key} has {len(values)} entries for {count} layers"
            resolver.problem("CFG-LAYER-TYPES", text, f"correct {key} in config.json")

    indices = range(count)
    kinds = of("mlp_layer_types", list)
    if kinds is not None:
        check_length("mlp_layer_types", kinds)
        return fact([kind != "dense" for kind in kinds], "mlp_layer_types")
    named = of("moe_layers", list)
    if named is not None:
        return fact([i in named for i in indices], "moe_layers", "interleave_moe_layer_step")
    start, end = of("moe_layer_start_index", int), of("moe_layer_end_index", int)
    if start is not None:
        step = of("moe_layer_interval", int) or 1
        last = count - 1 if end in (None, -1) else end
        layers = [start <= i <= last and (i + 1) % step == 0 for i in indices]
        return fact(layers, "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    period = of("expert_layer_period", int)
    if period:
        offset = of("expert_layer_offset", int) or 0
        return fact([i % period == offset for i in indices], "expert_layer_period", "expert_layer_offset")
    step, dense = of("decoder_sparse_step", int), of("mlp_only_layers", list)
    if step is not None or dense is not None:
        layers = [i not in (dense or []) and (i + 1) % (step or 1) == 0 for i in indices]
        return fact(layers, "decoder_sparse_step", "mlp_only_layers")
    frequency = resolver.config.get("moe_layer_freq")
    if isinstance(frequency, list):
        check_length("moe_layer_freq", frequency)
        return fact([bool(item) for item in frequency], "moe_layer_freq")
    first = of("first_k_dense_replace", int)
    first = of("num_dense_layers", int) if first is None else first
    if first is not None:
        step = of("moe_layer_freq", int) or 1
        layers = [i >= first and i % step == 0 for i in indices]
        return fact(layers, "first_k_dense_replace", "num_dense_layers", "moe_layer_freq")
    return Fact([True] * count, "derived: no key makes a layer dense")
