"""What differs from layer to layer: windows, and which layers have no rotary embedding."""

from collections.abc import Mapping

from autoport.research.aliases import READ_WITH
from autoport.research.fields import (
    Resolver,
    describe,
    is_count,
    is_flag,
    is_flag_list,
    is_integer,
    is_text_list,
)
from autoport.research.readings import reading
from autoport.schema.facts import Fact

WINDOWED = ("sliding_attention", "local", "local_attention")
FULL = ("full_attention", "global", "attention")
CHUNKED = "chunked_attention"
NOT_ATTENTION = "layers that are not attention are not ported; a model of attention layers only can be"

# Classes whose modeling file rotates only in layers with a window.
ROTATED_WHERE_WINDOWED = ("cohere2", "exaone4", "exaone_moe", "afmoe")


def resolve_layers(resolver: Resolver, facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Facts on windows and rotary embeddings by layer.

    Returns:
        `sliding_window`: the window in tokens (value None: switched off); absent for a model without the field.
        `layer_windows`: window of each layer, None for full attention. `layer_types`: the kinds, where the
        model has any. `layer_rope`: whether each layer rotates, where some do not.
    """
    resolver.consumed.update(READ_WITH["layers"])
    layers = facts.get("num_layers")
    in_use = resolver.optional("use_sliding_window", is_flag, strict=True)
    before = len(resolver.warnings)
    window = _window(resolver, in_use)
    if in_use is not None and not in_use.value and in_use.source.startswith("config.json: "):
        del resolver.warnings[before:]  # the class does as config.json says
    elif in_use is not None and not in_use.value and len(resolver.warnings) > before:
        given = describe(resolver.config["sliding_window"])
        resolver.warnings[before:] = [
            f"sliding_window {given} is not in force: use_sliding_window is false ({in_use.source})"
        ]
    first = resolver.optional("max_window_layers", is_count, strict=True)
    kinds = resolver.optional("layer_types", is_text_list)
    found: dict[str, Fact] = {}
    if window is not None and window.value is None and in_use is not None and not in_use.value:
        window = Fact(None, f"{in_use.source} is false ({window.source})")
    if window is not None:
        found["sliding_window"] = window
    if layers is None:
        return found
    size = window.value if window else None
    if kinds:
        found["layer_types"] = kinds
        _check_kinds(resolver, kinds, layers.value, size)
        windows = [size if kind in WINDOWED else None for kind in kinds.value]
        if size and not any(windows):
            reason = f"{first.source} leaves no layer with a window" if first else f"{kinds.source}: all full"
            found["sliding_window"] = Fact(None, reason)
        source = f"{kinds.source}; {window.source}" if window and any(windows) else kinds.source
    elif in_use is not None and not in_use.value:
        found["sliding_window"] = Fact(None, f"{in_use.source} is false")
        windows, source = [None] * layers.value, f"{in_use.source} is false"
    elif size and in_use is not None and first and not resolver.attributes:
        windows = [size if i >= first.value else None for i in range(layers.value)]
        source = f"{window.source if window else ''}; {first.source}"
        if not any(windows):
            found["sliding_window"] = Fact(None, f"{first.source} leaves no layer with a window")
    else:
        windows = [size] * layers.value
        source = window.source if window else "derived: no key gives a window"
    found["layer_windows"] = Fact(windows, source)
    chunk = resolver.optional("attention_chunk_size", is_integer, strict=True)
    if chunk and kinds and CHUNKED in kinds.value:
        found["attention_chunk_size"] = chunk
    rope = _rotated(resolver, layers.value, windows)
    if rope:
        found["layer_rope"] = rope
    return found


def _window(resolver: Resolver, in_use: Fact | None) -> Fact | None:
    before = len(resolver.warnings)
    window = resolver.optional("sliding_window", is_count, strict=True)
    if window is not None and window.value == 0 and not window.source.startswith("config.json: "):
        return Fact(None, window.source)  # a class that computes 0 means no window
    if window is not None and window.value == 0 and in_use is not None and not in_use.value:
        return Fact(None, window.source)  # as such a class writes the window that is switched off
    if window is not None and window.value == 0:
        found = f"sliding_window is 0, which the class takes for a window of no tokens ({window.source})"
        resolver.problem(
            "CFG-TYPE", found, "write null in config.json for no window, else the window in tokens"
        )
        return None
    if window is not None:
        return window
    if "sliding_window" not in resolver.config:
        return None
    if resolver.config["sliding_window"] is None:
        return Fact(None, f"config.json: {resolver.path}sliding_window is null")
    fact = resolver.attribute("sliding_window")
    if fact is not None and len(resolver.warnings) > before:
        return Fact(None, fact.source)
    return None


def _check_kinds(resolver: Resolver, kinds: Fact, count: int, window: int | None) -> None:
    def problem(found: str, next_step: str = "correct layer_types in config.json") -> None:
        resolver.problem("CFG-LAYER-TYPES", found, next_step)

    if len(kinds.value) != count:
        problem(f"layer_types has {len(kinds.value)} entries for {count} layers")
    known = {*WINDOWED, *FULL, CHUNKED, "indexed_attention"}
    foreign = sorted(set(kinds.value) - known)
    if foreign:
        where = [i for i, kind in enumerate(kinds.value) if kind in foreign]
        found = f"layer_types has {', '.join(foreign)} (layer {where[0]}; {kinds.source})"
        problem(found, NOT_ATTENTION)
    if set(kinds.value) & set(WINDOWED) and not window:
        problem("layer_types has sliding_attention but no sliding_window is in force")


def _rotated(resolver: Resolver, count: int, windows: list[int | None]) -> Fact | None:
    """Whether each layer rotates; None when all do."""
    flags = resolver.attribute("no_rope_layers")
    value = flags.value if flags else resolver.config.get("no_rope_layers")
    source = flags.source if flags else f"config.json: {resolver.path}no_rope_layers"
    if value is None and type(resolver.config.get("no_rope_layer_interval")) is int:
        step = resolver.config["no_rope_layer_interval"]
        value = [int((i + 1) % step != 0) for i in range(count)] if step > 0 else None
        source = f"config.json: {resolver.path}no_rope_layer_interval"
    if value is not None:
        if not isinstance(value, list) or any(item not in (0, 1) for item in value) or len(value) != count:
            found = f"no_rope_layers is {describe(value)}, not a list of {count} times 0 or 1"
            resolver.problem(
                "CFG-NOPE", found, "correct no_rope_layers in config.json (1: the layer rotates)"
            )
            return None
        return Fact([bool(item) for item in value], f"{source} (1: rotates, 0: NoPE)")
    thetas = resolver.attribute("layer_rope_theta")
    if thetas is not None and isinstance(thetas.value, list):
        if len(thetas.value) != count:
            found = f"layer_rope_theta has {len(thetas.value)} entries for {count} layers"
            resolver.problem("CFG-NOPE", found, "correct layer_rope_theta in config.json")
        return Fact([bool(theta) for theta in thetas.value], f"{thetas.source} (0: NoPE)")
    if reading(resolver.model_type, "layer_rope"):
        return resolver.optional("layer_rope", is_flag_list)
    if resolver.model_type in ROTATED_WHERE_WINDOWED and any(windows):
        reason = f"derived: modeling_{resolver.model_type}.py rotates in layers with a window only"
        return Fact([item is not None for item in windows], reason)
    return None
