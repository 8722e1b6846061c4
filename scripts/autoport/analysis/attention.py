"""The attention of a decoder: biases, norms, scale, and whether the fused operators can express it."""

from collections.abc import Iterator, Sequence

from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.traits import Traits
from autoport.schema.architecture import Attention, Norm, OutputGate, QkNorm

LARGEST_FUSED_HEAD_DIM = 128  # flash, segmented and decode attention kernels
BLOCK_SIZE = 32  # the plugin's default; the segmented kernel takes windows of whole blocks
PARTITIONS = 128  # rows of the on-chip memory; the QKV kernels split hidden_size into pieces of this size


def describe_attention(
    traits: Traits, keys: CheckpointKeys, norm: Norm, windows: Sequence[int | None]
) -> Attention:
    """Describe the attention.

    Args:
        windows: Window of each layer; empty for none.
    """
    family, names = traits.family, keys.names
    value = {name: fact.value for name, fact in traits.facts.fields.items()}
    head_dim = value["head_dim"]
    softcap = traits.number(family.softcap)
    qk_norm = _qk_norm(traits, keys, norm)
    alibi = bool(traits.value(family.alibi))
    qkv_clip = traits.number(family.qkv_clip)
    q_temperature = bool(traits.value(family.q_temperature))
    reasons = [*_composed(head_dim, qk_norm, softcap, alibi, qkv_clip, windows)]
    if value["hidden_size"] % (2 * PARTITIONS) == PARTITIONS:
        reasons.append(f"hidden_size {value['hidden_size']} is an odd multiple of {PARTITIONS}")
    if q_temperature:
        reasons.append("queries scaled by their position")
    if family.float32_scores:
        reasons.append("scores of float32 queries and keys")
    if family.output_gate:
        reasons.append("a gate on the heads' outputs")
    return Attention(
        num_heads=value["num_heads"],
        num_kv_heads=value["num_kv_heads"],
        head_dim=head_dim,
        qkv_bias=any(keys.in_layers(name, "bias") for name in (names.qkv, names.q, names.k, names.v)),
        o_bias=keys.in_layers(names.o, "bias"),
        qk_norm=qk_norm,
        scale=traits.number(family.scale),
        scale_by_layer=bool(traits.value(family.scale_by_layer)),
        softcap=softcap,
        sinks=bool(traits.value(family.sinks)),
        output_gate=_output_gate(traits),
        alibi=alibi,
        qkv_clip=qkv_clip,
        q_temperature=q_temperature,
        float32_scores=family.float32_scores,
        composed=tuple(reasons),
    )


def _qk_norm(traits: Traits, keys: CheckpointKeys, norm: Norm) -> QkNorm | None:
    style = traits.family.qk_norm
    if style is None or not traits.value(style.when):
        return None
    described = Norm(
        kind=norm.kind,
        eps=norm.eps,
        weight=style.weight,
        bias=keys.in_layers(keys.names.q_norm.replace("{h}", "0"), "bias"),
        rounding="after_weight" if norm.kind == "layer" else style.rounding,
    )
    return QkNorm(described, style.width, style.place)


def _output_gate(traits: Traits) -> OutputGate | None:
    family = traits.family
    if not family.output_gate:
        return None
    return OutputGate(family.output_gate, traits.value(family.output_gate_width))


def _composed(
    head_dim: int,
    qk_norm: QkNorm | None,
    softcap: float | None,
    alibi: bool,
    qkv_clip: float | None,
    windows: Sequence[int | None],
) -> Iterator[str]:
    """Why the fused attention operators cannot express this attention."""
    if head_dim > LARGEST_FUSED_HEAD_DIM:
        yield f"head_dim {head_dim} (the kernels take up to {LARGEST_FUSED_HEAD_DIM})"
    if softcap is not None:
        yield "softcap of the attention scores"
    if alibi:
        yield "ALiBi"
    if qkv_clip is not None:
        yield "clipping of q, k and v"
    if qk_norm is not None and qk_norm.norm.kind == "layer":
        yield "LayerNorm on q and k"
    if qk_norm is not None and qk_norm.width != "head":
        yield "a norm on q and k that is not the same for every head"
    if any(window and window % BLOCK_SIZE for window in windows):
        yield f"a sliding window that is no multiple of {BLOCK_SIZE} tokens"
