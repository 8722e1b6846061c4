"""What a Hugging Face class is, as a declaration: everything that differs from Llama."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from autoport import expressions
from autoport.families.moe_style import MoeStyle

# Names of a layer's norms in the generated model, in the order in which they are applied.
NORM_NAMES: dict[str, tuple[str, ...]] = {
    "pre_norm": ("input_layernorm", "post_attention_layernorm"),
    "parallel": ("input_layernorm",),
    "parallel_two_norms": ("input_layernorm", "post_attention_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "post_norm": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "post_residual_norm": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Names in the checkpoint, without ``.weight`` and ``.bias``; those of a layer are below its index.

    Attributes:
        bases: What may stand before the decoder's keys; the first that occurs counts.
        layers: Name of the list of layers.
        norms: The layer's norms, in the order of `NORM_NAMES` for the topology, or a dict of that by topology.
            Empty: the same names.
        q_norm, k_norm: With ``{h}`` for the head where each head has a tensor of its own.
        ignored: Regular expressions of keys that are no weights, each with the reason.
    """

    bases: tuple[str, ...] = ("model.", "")
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    embedding_norm: str = ""
    final_norm: str = "norm"
    head: str = "lm_head"
    norms: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    output_gate: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    down: str = "mlp.down_proj"
    ignored: tuple[tuple[str, str], ...] = ()

    def layer_norms(self, topology: str) -> tuple[str, ...]:
        """Names of a layer's norms, in the order of `NORM_NAMES`."""
        given = self.norms.get(topology, ()) if isinstance(self.norms, dict) else self.norms
        return given or NORM_NAMES[topology]


class QkNormStyle(msgspec.Struct, frozen=True, kw_only=True):
    """A norm on queries and keys where `when` holds, of the same kind and eps as the family's other norms."""

    when: str = "True"
    weight: Literal["plain", "one_plus", "none"] = "plain"
    width: Literal["head", "each_head", "full"] = "head"
    place: Literal["before_rope", "after_rope"] = "before_rope"
    rounding: Literal["before_weight", "after_weight"] = "before_weight"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type`. The defaults are Llama's; strings named below are expressions over config attributes.

    Attributes:
        qkv_bias, o_bias, mlp_bias: Whether there are biases (expression), None: as the checkpoint has them.
        head_bias: Whether the head may have a bias.
        output_gate, output_gate_width: Function of the gate on the heads' outputs, empty for none; expression for
            ``head`` or ``element``.
        topology: Expression for one of `NORM_NAMES`.
        rotary: Expression; whether there are rotary embeddings at all.
        rotary_dim: Expression for the rotated dimensions per head; empty for all of them, or for what
            `partial_rotary_factor` says.
        partial_rotary_factor: Its value where neither config.json nor the class attribute gives one.
        windows: Expression for the window of each layer (a list with None for full attention).
        rope_labels: Expression for the label of each layer's rotary embedding (None for none).
        scale, softcap, logit_scale, logit_softcap, embedding_scale, residual_scale, qkv_clip: Expressions; empty
            or None for none.
        embedding_scale_rounded: Whether the scale is rounded to the embeddings' dtype first.
        scale_by_layer: Expression; whether the scale is divided by the layer's number.
        embedding_norm: Whether embeddings are normalised without a weight (`Keys` names one with a weight).
        float32_scores: Whether scores are computed from float32 queries and keys.
        q_temperature: Expression; whether queries are scaled by their position, as in Llama 4.
        positions: Absolute position embeddings.
        requires: (expression that must hold, rule, what is wrong otherwise, with expressions in braces).
    """

    model_type: str
    hf_name: str
    keys: Keys = Keys()
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: Literal["plain", "one_plus", "none"] = "plain"
    norm_rounding: Literal["before_weight", "after_weight"] = "before_weight"
    final_norm: str = "True"
    qkv_bias: str | None = None
    o_bias: str | None = None
    mlp_bias: str | None = None
    head_bias: bool = False
    qkv_layout: str = "'separate'"
    gate_up_layout: Literal["separate", "concat"] = "separate"
    transposed: bool = False
    qk_norm: QkNormStyle | None = None
    sinks: str = "False"
    output_gate: Literal["", "sigmoid", "softplus"] = ""
    output_gate_width: str = "'element'"
    alibi: str = "False"
    mlp: Literal["gated", "plain"] = "gated"
    moe: MoeStyle | None = None
    topology: str = "'pre_norm'"
    rotary: str = "True"
    pairing: Literal["half", "interleaved"] = "half"
    rotary_dim: str = ""
    partial_rotary_factor: float | None = None
    rope_sign: Literal[1, -1] = 1
    rope_mscale: bool = False
    windows: str = ""
    rope_labels: str = ""
    scale: str = ""
    scale_by_layer: str = "False"
    softcap: str = ""
    qkv_clip: str = ""
    q_temperature: str = "False"
    float32_scores: bool = False
    logit_scale: str = ""
    logit_softcap: str = ""
    embedding_scale: str = ""
    embedding_scale_rounded: bool = False
    residual_scale: str = ""
    embedding_norm: bool = False
    positions: Literal["none", "learned", "sinusoidal", "sinusoidal_halves"] = "none"
    position_offset: int = 0
    requires: tuple[tuple[str, str, str], ...] = ()


def names_read(family: Family) -> set[str]:
    """Config attributes that the expressions of a declaration read."""
    found: set[str] = set()
    for text in _texts(family):
        with contextlib.suppress(ValueError):  # not an expression
            found.update(expressions.names(text))
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from _texts(getattr(value, field))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _texts(item)
