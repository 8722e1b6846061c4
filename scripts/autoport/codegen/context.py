"""What the templates ask of an architecture beyond its fields."""

from typing import Any

from autoport import expressions
from autoport.analysis.dimensions import EXPERT, SHARED, Dimensions
from autoport.analysis.padding import padded_sizes
from autoport.analysis.weight_map import reorders_heads
from autoport.codegen.moe import FLOAT_FIELDS as EXPERT_FLOAT_FIELDS
from autoport.codegen.moe import moe_context, moe_loaders
from autoport.codegen.render import Checked
from autoport.codegen.support import norm_parameters
from autoport.families.family import NORM_NAMES
from autoport.schema.architecture import Architecture

# Activations of NF.mlp, by the names of `ActFnType`.
KERNEL_ACTIVATIONS = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU_Tanh_Approx"}

# Names of `hidden_act` that mean the same function.
ACTIVATION_NAMES = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_tanh", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    "relu": ("relu",),
    "relu2": ("relu2",),
    "xielu": ("xielu",),
}

FIELD_TYPES = {
    "rope_parameters": "dict[str, Any]",
    "layer_windows": "list[int | None]",
    "layer_ropes": "list[str | None]",
    "layer_moe": "list[bool]",
}
FLOAT_FIELDS = (
    "norm_eps",
    "attention_scale",
    "attention_softcap",
    "qkv_clip",
    "residual_scale",
    "logit_scale",
    "logit_softcap",
    "embedding_scale",
    *EXPERT_FLOAT_FIELDS,
)


def architecture_context(architecture: Architecture) -> dict[str, Any]:
    """Names for the templates; constant text of the code is `Checked`."""
    attention, composed = architecture.attention, bool(architecture.attention.composed)
    loaders = own_loaders(architecture)
    ropes = [*architecture.ropes.values()] or ([architecture.rope] if architecture.rope else [])
    labels = [label for label in architecture.layers.ropes if label is not None]
    norm_eps_field = "rms_norm_eps" if architecture.norm.kind == "rms" else "layer_norm_eps"
    position = "position_embeddings, " if architecture.rope else ""
    position_type = "CosSin | None" if None in architecture.layers.ropes else "CosSin"
    return {
        "position_type": Checked(position_type),
        "position_parameter": Checked(f"position_embeddings: {position_type}, " if position else ""),
        "position_argument": Checked(position),
        "attention_arguments": Checked(
            f"{position}attn_metadata, {'mask, is_prefill' if composed else 'decode_mask'}"
        ),
        "attention_input": Checked("self.hidden_size"),
        "cos_sin": {
            "each": _cos_sin("rotary_emb", architecture),
            "one": _cos_sin("self.rotary_emb", architecture),
        },
        "is_prefill": Checked("is_prefill" if composed else "decode_mask is None"),
        "residual_scale": Checked(
            "" if architecture.block.residual_scale is None else " * self.residual_scale"
        ),
        "norm_names": NORM_NAMES[architecture.block.topology],
        "norm_class": "RMSNorm" if architecture.norm.kind == "rms" else "LayerNorm",
        "norm_eps_field": norm_eps_field,
        "qk_norm_parameters": norm_parameters(attention.qk_norm.norm) if attention.qk_norm else [],
        "qk_one_plus": bool(attention.qk_norm and attention.qk_norm.norm.weight == "one_plus"),
        "own_loaders": loaders,
        "own_qkv_loader": "qkv_weight_loader" in loaders,
        "own_head_norm_loader": "head_norm_loader" in loaders,
        "reorders": reorders_heads(architecture),
        "rotary_size": Checked(
            "rotary_dim" if architecture.rope and architecture.rope.rotary_dim else "head_dim"
        ),
        "rope_kinds": list(dict.fromkeys(rope.kind for rope in ropes)),
        **padding_context(architecture),
        "rope_label": labels[0] if labels else None,
        "kernel_activations": KERNEL_ACTIVATIONS,
        "config_fields": config_fields(architecture, norm_eps_field),
        "checked_attributes": checked_attributes(architecture),
        "config_checks": config_checks(architecture),
        "sharded_sizes": sharded_sizes(architecture),
    } | moe_context(architecture)


def _cos_sin(rotary_emb: str, architecture: Architecture) -> Checked:
    """The backbone's call for the cos and sin that its attention takes."""
    if not architecture.attention.composed:
        return Checked(f"self.cos_sin({rotary_emb}, positions, metadata)")
    if architecture.attention.q_temperature:
        return Checked(f"self.cos_sin({rotary_emb}, positions)")
    return Checked(f"{rotary_emb}(positions)")


def own_loaders(architecture: Architecture) -> list[str]:
    """Functions of the port's own weight_loaders.py that model.py imports."""
    attention, storage = architecture.attention, architecture.storage
    reorders = reorders_heads(architecture)
    names = []
    if storage.qkv != "separate" or reorders or storage.transposed:
        names.append("qkv_weight_loader")
    elif attention.qkv_bias:
        names.append("fused_qkv_bias_loader")
    qk_norm = attention.qk_norm
    if qk_norm and norm_parameters(qk_norm.norm):
        if qk_norm.width != "head":
            names.append("heads_norm_loader")
        elif reorders or qk_norm.norm.weight == "one_plus":
            names.append("head_norm_loader")
    if storage.gate_up == "concat":
        names.append("gate_up_loader")
    if architecture.norm.weight == "one_plus":
        names.append("plus_one_loader")
    if architecture.mlp.activation == "xielu":
        names.append("scalar_loader")
    return sorted(names + moe_loaders(architecture))


def sharded_sizes(architecture: Architecture) -> list[str]:
    """Config fields that the ranks divide evenly."""
    padded = padded_sizes(Dimensions.from_architecture(architecture))
    fields = {
        "intermediate_size": "intermediate_size",
        EXPERT: "moe_intermediate_size",
        SHARED: "shared_intermediate_size",
        "vocab_size": "vocab_size",
    }
    names = ["num_attention_heads", *(field for name, field in fields.items() if name not in padded)]
    return [name for name in names if name in architecture.readings]


def padding_context(architecture: Architecture) -> dict[str, bool]:
    """Which sizes the ranks fill up with zeros."""
    padded = padded_sizes(Dimensions.from_architecture(architecture))
    return {
        "pads_intermediate": "intermediate_size" in padded,
        "pads_experts": EXPERT in padded,
        "pads_shared": SHARED in padded,
        "pads_vocabulary": "vocab_size" in padded,
    }


def config_fields(architecture: Architecture, norm_eps_field: str) -> list[tuple[str, Checked, str | None]]:
    """Name, annotation and reading of each field of the generated config; head_dim may have no reading."""
    readings = {name: text for name, text in architecture.readings.items() if name != "activation"}
    fields: list[tuple[str, Checked, str | None]] = []
    for name, text in readings.items():
        kind = FIELD_TYPES.get(name, "float" if name in FLOAT_FIELDS else "int")
        fields.append((norm_eps_field if name == "norm_eps" else name, Checked(kind), text))
    if "head_dim" not in readings:
        place = next(i for i, field in enumerate(fields) if field[0] == "num_key_value_heads") + 1
        fields.insert(place, ("head_dim", Checked("int"), None))
    return fields


def checked_attributes(architecture: Architecture) -> list[tuple[str, tuple[Any, ...]]]:
    """Attributes of the Hugging Face config that must have one of these values, for the factory."""
    absent = (None, False)
    checks: list[tuple[str, tuple[Any, ...]]] = []
    activation = architecture.readings.get("activation")
    if activation is not None and activation.isidentifier():
        checks.append((activation, ACTIVATION_NAMES[architecture.mlp.activation]))
    if not architecture.layers.windows and not any("sliding_window" in text for text in architecture.checks):
        checks.append(("sliding_window", (None,)))
    if not architecture.attention.qkv_bias and not architecture.attention.o_bias:
        checks.append(("attention_bias", absent))
    if not architecture.mlp.bias:
        checks.append(("mlp_bias", absent))
    return checks


def config_checks(architecture: Architecture) -> list[tuple[str, str, Any]]:
    """The setting in words, the expression over the config, and the value that it must have, for the factory."""
    return [(_setting(text), text, value) for text, value in architecture.checks.items()]


def _setting(expression: str) -> str:
    """What a message calls an expression: its text, or the fields in it where that is a condition or a list."""
    if " if " not in expression:
        return expression
    first, *others = sorted(expressions.names(expression), key=expression.index)
    return f"{first} with {' and '.join(others)}:" if others else first
