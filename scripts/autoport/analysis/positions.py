"""The rotary embeddings of a decoder: scaling, pairing, how much of a head rotates, and which layers do."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from autoport.analysis.traits import Traits
from autoport.research.rope import SCALINGS
from autoport.schema.architecture import Rope
from autoport.schema.facts import Fact


def describe_rope(traits: Traits) -> Rope | None:
    """The rotary embedding of all layers, or None when there is none or layers have one of several."""
    family = traits.family
    if not traits.value(family.rotary):
        return None
    fields = traits.facts.fields
    kind, parameters = fields["rope_type"].value, fields["rope_parameters"].value
    if kind == "per_layer_type":
        blocks = rope_blocks(parameters)
        return _rope(traits, blocks.get("full_attention") or next(iter(blocks.values())))
    theta = fields["rope_theta"].value
    return _rope(traits, {"rope_type": kind, "rope_theta": theta} | dict(parameters))


def rope_by_label(traits: Traits, labels: Sequence[str | None]) -> dict[str, Rope]:
    """The rotary embedding by layer label, when config.json holds one for each label."""
    parameters = traits.facts.fields["rope_parameters"].value
    if traits.facts.fields["rope_type"].value != "per_layer_type":
        return {}
    present = [label for label in dict.fromkeys(labels) if label is not None]
    blocks = rope_blocks(parameters)
    return {label: _rope(traits, blocks.get(label) or {}) for label in present}


def rope_blocks(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The block of each kind of layer, without the single values that may stand beside them."""
    return {label: block for label, block in parameters.items() if isinstance(block, dict)}


def _rope(traits: Traits, block: dict[str, Any]) -> Rope:
    family = traits.family
    kind = block.get("rope_type", block.get("type", "default"))
    names = SCALINGS[kind].names if kind in SCALINGS else ()
    known = get_args(Rope.__annotations__["kind"])
    return Rope(
        kind=kind if kind in known else "default",
        theta=float(block.get("rope_theta") or traits.facts.fields["rope_theta"].value),
        parameters={name: block[name] for name in names if block.get(name) is not None},
        pairing=family.pairing,
        rotary_dim=rotary_dim(traits, block),
        sign=family.rope_sign,
        mscale=kind == "longrope" and family.rope_mscale,
    )


def rotary_dim(traits: Traits, block: dict[str, Any]) -> int | None:
    """Rotated dimensions per head; None for all of them."""
    head_dim = traits.facts.fields["head_dim"].value
    if traits.family.rotary_dim:
        value = traits.value(traits.family.rotary_dim)
        return None if value is None or value == head_dim else int(value)
    factor = block.get("partial_rotary_factor")
    if factor is None:
        fact: Fact | None = traits.facts.fields.get("partial_rotary_factor")
        factor = fact.value if fact else traits.family.partial_rotary_factor
    if factor is None or factor == 1:
        return None
    return int(head_dim * factor)
