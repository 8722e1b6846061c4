"""Rotary embedding parameters in both of the forms that config.json comes in, as one.

Before transformers 5: `rope_theta` at top level and `rope_scaling` with `type` or `rope_type`. Since then:
everything in `rope_parameters`. Precedence where both are given is that of transformers' own conversion
(`modeling_rope_utils.RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`).
"""

from typing import Any

import msgspec

from autoport.research.aliases import READ_WITH
from autoport.research.fields import Resolver, describe, is_number, is_text
from autoport.schema.facts import Fact


class Scaling(msgspec.Struct, frozen=True):
    """What a rope_type reads: numbers and lists that it cannot do without, and what may be missing."""

    numbers: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.numbers + self.lists + self.optional


# The types that can be ported, with what each reads in transformers' `modeling_rope_utils.ROPE_INIT_FUNCTIONS`.
SCALINGS: dict[str, Scaling] = {
    "default": Scaling(),
    "linear": Scaling(("factor",)),
    "dynamic": Scaling(("factor",)),
    "llama3": Scaling(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": Scaling(
        ("factor",),
        optional=(
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "llama_4_scaling_beta",
        ),
    ),
    "longrope": Scaling(
        ("original_max_position_embeddings",),
        ("short_factor", "long_factor"),
        ("factor", "attention_factor", "short_mscale", "long_mscale"),
    ),
}
RENAMED_TYPES = {"su": "longrope"}


def resolve_rope(resolver: Resolver) -> dict[str, Fact]:
    """Return `rope_type`, `rope_theta` and `rope_parameters` (the scaling's own numbers, `{}` for none).

    `rope_type` is ``"per_layer_type"`` where layers of different kinds rotate differently; `rope_parameters` then
    holds one block for each kind (None: these layers do not rotate). It is ``"none"`` for a class without RoPE.
    """
    resolver.consumed.update(READ_WITH["rope"])
    if resolver.attributes and not any(resolver.attribute(key) for key in ("rope_parameters", "rotary_dim")):
        reason = f"derived: the config class of {resolver.model_type!r} has no RoPE parameters"
        return {"rope_type": Fact("none", reason), "rope_parameters": Fact({}, reason)}
    count = len(resolver.problems)
    facts = _from_file(resolver)
    computed = resolver.attribute("rope_parameters")
    if computed is None or not isinstance(computed.value, dict) or len(resolver.problems) > count:
        if "rope_theta" not in facts and len(resolver.problems) == count:
            theta = _class_theta(resolver)
            facts |= {"rope_theta": theta} if theta else {}
        return facts
    facts |= _from_class(resolver, facts, computed)
    _check_factor(resolver, facts["rope_parameters"].value)
    if "rope_theta" not in facts and facts["rope_type"].value != "per_layer_type":
        resolver.problem(
            "CFG-ROPE",
            f"rope_theta is null, and so it is for the class ({computed.source})",
            "write its number in config.json, or remove the key to take the class's default",
        )
    return facts


def _check_factor(resolver: Resolver, parameters: dict[str, Any]) -> None:
    """Record (CFG-ROPE) a part of a head that cannot be: of all layers, or of a kind of layers."""
    for block in (parameters, *(part for part in parameters.values() if isinstance(part, dict))):
        factor = block.get("partial_rotary_factor")
        if factor is not None and (is_number(factor) or factor > 1):
            found = f"partial_rotary_factor is {describe(factor)}, not a number above 0 and up to 1"
            resolver.problem("CFG-ROPE", found, "correct it in config.json")


def _from_class(resolver: Resolver, facts: dict[str, Fact], computed: Fact) -> dict[str, Fact]:
    """What the config class makes of the file's values, where that is something else or more."""
    block: dict[str, Any] = computed.value
    by_kind = {key: part for key, part in block.items() if isinstance(part, dict) or part is None}
    by_kind = {key: part for key, part in by_kind.items() if key.endswith(("attention", "main", "compress"))}
    if any(by_kind.values()):
        _warn_of_ignored(resolver, {key: part for key, part in block.items() if key not in by_kind}, by_kind)
        parameters = {key: _renamed(part) for key, part in by_kind.items()}
        main = parameters.get("full_attention") or next(part for part in parameters.values() if part)
        found = {
            "rope_type": Fact("per_layer_type", computed.source),
            "rope_parameters": Fact(parameters, computed.source),
        }
        if is_number(main.get("rope_theta")) is None:
            found["rope_theta"] = Fact(
                float(main["rope_theta"]), _theta_source(resolver, main, facts, computed)
            )
        return found
    found = {}
    if is_number(block.get("rope_theta")) is None:
        theta = float(block["rope_theta"])
        found["rope_theta"] = Fact(theta, _theta_source(resolver, block, facts, computed))
    kind = _renamed(block).get("rope_type")
    old = facts.get("rope_type")
    if old is None or (old.value not in ("mrope", "per_layer_type") and kind != old.value):
        if old is not None and old.value != "default":
            resolver.warnings.append(
                f"{old.source.removeprefix('config.json: ')} is {old.value!r}, but the class takes {kind!r} "
                f"({computed.source.removeprefix('derived: ')})"
            )
        found["rope_type"] = Fact(kind, computed.source)
    parameters = {
        key: value
        for key, value in block.items()
        if key not in ("type", "rope_type", "rope_theta") and value is not None
    }
    given = facts["rope_parameters"].value if "rope_parameters" in facts else {}
    original = given.get("original_max_position_embeddings")
    if original is not None and kind != "default":
        parameters.setdefault("original_max_position_embeddings", original)
    if "rope_parameters" not in facts or parameters != given:
        found["rope_parameters"] = Fact(parameters, computed.source)
    return found


def _warn_of_ignored(resolver: Resolver, beside: dict[str, Any], by_kind: dict[str, Any]) -> None:
    """Warn of values beside the blocks for kinds of layers that these blocks do not repeat: no layer reads them."""
    blocks = [_renamed(part) for part in by_kind.values()]
    ignored = {
        key: value
        for key, value in _renamed(beside).items()
        if value is not None and any(block.get(key) != value for block in blocks)
    }
    if ignored:
        resolver.warnings.append(
            f"rope_parameters gives {describe(ignored)} for all layers; the class reads only the blocks for kinds "
            f"of layers ({', '.join(by_kind)}), and so does the port"
        )


def _renamed(block: dict[str, Any] | None) -> dict[str, Any]:
    if not block:
        return {}
    kind = block.get("rope_type", block.get("type", "default"))
    return block | {"rope_type": RENAMED_TYPES.get(kind, kind) if isinstance(kind, str) else kind}


def _theta_source(resolver: Resolver, block: dict[str, Any], facts: dict[str, Fact], computed: Fact) -> str:
    """Where the theta of `block` was read from: the file, the class, or the mixin that all classes share."""
    theta = float(block["rope_theta"])
    if "rope_theta" in facts and facts["rope_theta"].value == theta:
        return facts["rope_theta"].source
    for key in ("rotary_emb_base", "global_rope_theta", "rope_theta"):
        if resolver.config.get(key) == theta:
            return f"config.json: {resolver.path}{key}"
    default = resolver.defaults.get("default_theta")
    if default is not None:
        values = default.value.values() if isinstance(default.value, dict) else [default.value]
        if theta in [float(value) for value in values]:
            return default.source
    return computed.source


def _from_file(resolver: Resolver) -> dict[str, Fact]:
    """What config.json says, whatever the class does with it."""
    config = resolver.config
    block_key, block = _block(resolver)
    facts: dict[str, Fact] = {}
    theta = _theta(resolver, block_key, block)
    if theta:
        facts["rope_theta"] = theta
    rope_type = _type(resolver, block_key, block)
    if rope_type is None:
        return facts
    facts["rope_type"] = rope_type
    parameters = {
        key: value
        for key, value in block.items()
        if key not in ("type", "rope_type", "rope_theta") and value is not None
    }
    original = config.get("original_max_position_embeddings")
    if original is not None:
        nested = parameters.get("original_max_position_embeddings", original)
        if nested != original:
            resolver.warnings.append(
                f"original_max_position_embeddings is {original} at top level and {nested} in {block_key}; "
                + _taken("the one at top level")
            )
        parameters["original_max_position_embeddings"] = original
    source = f"config.json: {resolver.path}{block_key}" if block else _no_block(resolver)
    facts["rope_parameters"] = Fact(parameters, source)
    return facts


def _no_block(resolver: Resolver) -> str:
    """The source of what follows from the absence of a nested block."""
    return f"config.json: no {resolver.path}rope_scaling or {resolver.path}rope_parameters"


def supported_types() -> str:
    """The types that can be ported, each with the numbers that it needs."""
    needed = {kind: scaling.numbers + scaling.lists for kind, scaling in SCALINGS.items()}
    return "; ".join(f"{kind} (with {', '.join(names)})" for kind, names in needed.items() if names)


def _taken(key: str) -> str:
    return f"transformers takes {key}, and so does the port"


def _block(resolver: Resolver) -> tuple[str, dict[str, Any]]:
    """The nested block in force and its key; ``{}`` when there is none."""
    blocks: dict[str, dict[str, Any]] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = resolver.config.get(key)
        if value is None:
            continue
        if isinstance(value, dict):
            blocks[key] = value
        else:
            resolver.problem("CFG-ROPE", f"{key} is {describe(value)}, not an object", f"correct {key}")
    if len(blocks) == 2 and all(blocks.values()) and blocks["rope_scaling"] != blocks["rope_parameters"]:
        resolver.warnings.append(
            f"rope_scaling {describe(blocks['rope_scaling'])} and rope_parameters "
            f"{describe(blocks['rope_parameters'])} differ; {_taken('rope_scaling')}"
        )
    for key in ("rope_scaling", "rope_parameters"):
        if blocks.get(key):
            return key, blocks[key]
    return "rope_parameters", {}


def _theta(resolver: Resolver, block_key: str, block: dict[str, Any]) -> Fact | None:
    given = {
        f"{block_key}.rope_theta": block.get("rope_theta"),
        "rope_theta": resolver.config.get("rope_theta"),
    }
    found = {key: value for key, value in given.items() if value is not None}
    if not found:
        return resolver.defaults.get("rope_theta")
    key, value = next(iter(found.items()))
    wrong = is_number(value)
    if wrong:
        resolver.problem("CFG-ROPE", f"{key} {wrong}", f"correct {key} in config.json")
        return None
    if len(found) == 2 and found["rope_theta"] != value:
        resolver.warnings.append(f"{key} is {value} and rope_theta is {found['rope_theta']}; {_taken(key)}")
    return Fact(float(value), f"config.json: {resolver.path}{key}")


def _class_theta(resolver: Resolver) -> Fact | None:
    default = resolver.defaults.get("default_theta")
    if default is not None and is_number(default.value) is None:
        return default
    resolver.problem(
        "CFG-ROPE",
        "rope_theta has no value: config.json does not give it, nor does a config class",
        "add rope_theta to config.json",
    )
    return None


def _type(resolver: Resolver, block_key: str, block: dict[str, Any]) -> Fact | None:
    old, new = block.get("type"), block.get("rope_type")
    value = new if new is not None else old
    key = f"{block_key}.{'rope_type' if new is not None else 'type'}"
    wrong = None if value is None else is_text(value)
    if wrong:
        resolver.problem("CFG-ROPE", f"{key} {wrong}", f"correct {key}")
        return None
    if any(isinstance(item, dict) for item in block.values()):
        return Fact("per_layer_type", f"config.json: {resolver.path}{block_key}")
    if "mrope_section" in block:
        return Fact("mrope", f"config.json: {resolver.path}{block_key}.mrope_section")
    if value is None:
        scaling = sorted(set(block) - {"rope_theta", "partial_rotary_factor"})
        if scaling:
            resolver.problem(
                "CFG-ROPE",
                f"{block_key} has {', '.join(scaling)} but no rope_type",
                f"ask who made the checkpoint, and add {block_key}.rope_type: {supported_types()}",
            )
            return None
        source = f"config.json: {resolver.path}{block_key} names no scaling" if block else _no_block(resolver)
        return Fact("default", source)
    if old is not None and new is not None and old != new:
        resolver.warnings.append(
            f"{block_key} says rope_type {new!r} and type {old!r}; {_taken('rope_type')}"
        )
    return Fact(RENAMED_TYPES.get(value, value), f"config.json: {resolver.path}{key}")
