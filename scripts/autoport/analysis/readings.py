"""How the generated config class reads each of its fields from the Hugging Face config."""

from collections.abc import Sequence
from typing import Any

from autoport.analysis.positions import describe_rope, rope_by_label
from autoport.analysis.traits import Traits
from autoport.expressions import names
from autoport.research.readings import reading

# Field of the generated config class -> field of `Facts`.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "norm_eps": "norm_eps",
}


def config_readings(
    traits: Traits, windows: Sequence[int | None], labels: Sequence[str | None]
) -> dict[str, str]:
    """Expressions over the Hugging Face config's attributes, by field of the generated config class."""
    family, model_type = traits.family, traits.facts.model_type.value
    readings = {field: traits.attribute(fact) for field, fact in SIZES.items()}
    kv_heads = traits.attribute("num_kv_heads")
    known = kv_heads in traits.values.defaults or kv_heads in traits.facts.config
    computed = reading(model_type, "num_kv_heads")
    activation = traits.attribute("activation")
    if reading(model_type, "activation") is None:
        readings["activation"] = activation
    readings["num_key_value_heads"] = computed or (kv_heads if known else readings["num_attention_heads"])
    head_dim = reading(model_type, "head_dim")
    if head_dim:
        readings["head_dim"] = head_dim
    if traits.value(family.rotary):
        readings["rope_parameters"] = reading(model_type, "rope_parameters") or "rope_parameters"
        rotary_dim = _rotary_dim(traits, readings)
        if rotary_dim:
            readings["rotary_dim"] = rotary_dim
    numbers: dict[str, tuple[str, Any]] = {
        "attention_scale": (family.scale, None),
        "attention_softcap": (family.softcap, None),
        "qkv_clip": (family.qkv_clip, None),
        "residual_scale": (family.residual_scale, 1),
        "logit_scale": (family.logit_scale, 1),
        "logit_softcap": (family.logit_softcap, None),
        "embedding_scale": (family.embedding_scale, 1),
    }
    for field, (expression, neutral) in numbers.items():
        if traits.number(expression, neutral) is not None:
            readings[field] = expression
    if any(windows):
        readings["layer_windows"] = family.windows
    if len(set(labels)) > 1 or rope_by_label(traits, labels):
        readings["layer_ropes"] = family.rope_labels
    rope = describe_rope(traits)
    if family.positions == "learned" or (rope and rope.kind in ("dynamic", "longrope")):
        readings["max_position_embeddings"] = traits.attribute("max_position_embeddings")
    return readings


def _rotary_dim(traits: Traits, readings: dict[str, str]) -> str:
    """Expression for the rotated dimensions per head; empty when all of them rotate."""
    rope = describe_rope(traits)
    if rope is None or rope.rotary_dim is None or traits.family.rotary_dim:
        return traits.family.rotary_dim if rope and rope.rotary_dim else ""
    derived = f"{readings['hidden_size']} // {readings['num_attention_heads']}"
    head_dim = "head_dim" if "head_dim" in traits.values.attributes else derived
    parameters = traits.facts.fields["rope_parameters"].value
    block = ""
    if traits.facts.fields["rope_type"].value == "per_layer_type":
        label = "full_attention" if "full_attention" in parameters else next(iter(parameters))
        block = f"[{label!r}]"
    return f"int({head_dim} * rope_parameters{block}['partial_rotary_factor'])"


def config_checks(traits: Traits, windows: Sequence[int | None]) -> dict[str, Any]:
    """The family's structural expressions that depend on the config, with their values for this model."""
    family = traits.family
    expressions = [
        family.topology,
        family.qkv_layout,
        family.rotary,
        family.sinks,
        family.output_gate_width,
        family.alibi,
        family.scale_by_layer,
        family.final_norm,
        family.qk_norm.when if family.qk_norm else "False",
    ]
    if family.windows and not any(windows):
        expressions.append(f"[w for w in {family.windows} if w]")
    return {text: traits.value(text) for text in dict.fromkeys(expressions) if names(text)}
