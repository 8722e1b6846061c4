"""The sliding window that is in force, after the flags that switch it off."""

from collections.abc import Mapping

from autoport.research.fields import Resolver, is_flag, is_integer, is_text_list
from autoport.schema import Fact


def resolve_window(resolver: Resolver, facts: Mapping[str, Fact]) -> Fact | None:
    """The window in tokens (value None: switched off), or no fact for a model without the field."""
    window = resolver.optional("sliding_window", is_integer)
    in_use = resolver.optional("use_sliding_window", is_flag)
    first = resolver.optional("max_window_layers", lambda value: None if value == 0 else is_integer(value))
    layer_types = resolver.optional("layer_types", is_text_list)
    layers = facts.get("num_layers")
    switched_off = in_use is not None and not in_use.value
    if layer_types and layers:
        _check_layer_types(resolver, layer_types.value, layers.value, window is not None and not switched_off)
        if set(layer_types.value) == {"full_attention"}:
            return Fact(None, layer_types.source)
    if window is None:
        null = "sliding_window" in resolver.config
        return Fact(None, "config.json: sliding_window is null") if null else None
    if in_use is not None and switched_off:
        return Fact(None, f"{in_use.source} is false")
    if in_use is not None and first and layers and not layer_types and first.value >= layers.value:
        return Fact(None, f"{first.source} leaves no layer with a window")
    return window


def _check_layer_types(resolver: Resolver, kinds: list[str], num_layers: int, has_window: bool) -> None:
    def problem(found: str, next_step: str = "correct layer_types in config.json") -> None:
        resolver.problem("CFG-LAYER-TYPES", found, next_step)

    if len(kinds) != num_layers:
        problem(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    foreign = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if foreign:
        problem(f"layer_types has {', '.join(foreign)}", "only attention layers can be ported")
    if "sliding_attention" in kinds and not has_window:
        problem("layer_types has sliding_attention but no sliding_window is in force")
