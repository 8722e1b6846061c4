"""The model beside its reference model, one row for each section of model.py."""

import re
from collections.abc import Sequence

from autoport.analysis.moe import has_dense_layers
from autoport.analysis.reference import load_table
from autoport.analysis.windows import binds
from autoport.research.keys import ranges
from autoport.schema.architecture import Architecture, Norm, Rope, SharedExperts
from autoport.schema.facts import Facts
from autoport.schema.plan import Section
from autoport.schema.weights import WeightMap
from autoport.units import number_text

Row = tuple[str, str, str]
"""What the model does, the change to the reference, where that is known from."""

WEIGHTS = {"plain": "", "one_plus": ", times 1 + w", "none": ", no weight"}
ROTATED_SHARE = ("partial_rotary_factor", "rotary_pct", "rotary_dim")
QK_WIDTHS = {
    "head": "each head of",
    "each_head": "each head, with a weight of its own, of",
    "full": "all heads together of",
}
TOPOLOGIES = {
    "pre_norm": "pre-norm, sequential",
    "parallel": "attention and MLP in parallel, one norm",
    "parallel_two_norms": "attention and MLP in parallel, a norm each",
    "sandwich": "norms before and after attention and MLP",
    "post_norm": "norms after attention and MLP, before the residual sum",
    "post_residual_norm": "norms after the residual sum",
}


def compare(architecture: Architecture, facts: Facts, weights: WeightMap, reference: str) -> list[Section]:
    """Compare the model with its reference, section by section."""
    described = load_table()["models"][reference]["sections"]
    source = {name: _named(name, fact.source) for name, fact in facts.fields.items()}
    loaded = f"{len(weights.entries)} kinds of parameters in {architecture.dtype}; left out: " + (
        "; ".join(f"{item.pattern} ({item.reason})" for item in weights.ignored) or "nothing"
    )
    rows: dict[str, Row] = {
        "norm": _norm(architecture.norm, facts, source),
        "rope": _rope(architecture, facts, source),
        "attention": _attention(architecture, facts, source),
        "mlp": _mlp(architecture, facts, source),
        "moe": _moe(architecture, facts),
        "decoder": _decoder(architecture, facts),
        "backbone": _backbone(architecture, facts, source),
        "head": _head(architecture, facts, source),
        "weights": (loaded, "weight map", _joined(source.get("dtype", ""), "safetensors headers")),
    }
    return [Section(name, described[name], *row) for name, row in rows.items()]


def _places(facts: Facts, *topics: str, of: str = "") -> str:
    """Where the modeling file says so, with a mark for what was measured.

    Args:
        of: Regular expression that the class of the finding ends with.
    """
    places = dict.fromkeys(
        f"{finding.where}{' (measured)' if finding.confirmed else ''}"
        for finding in facts.modeling.findings
        if finding.topic in topics and re.search(rf"{of}$", re.split(r"[.:]", finding.subject)[0])
    )
    return "; ".join(list(places)[:3])


def _named(field: str, source: str) -> str:
    """A source that names its field: config.json by the key, anything else by what stands before it."""
    return source if source.startswith("config.json: ") else f"{field} {source}"


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _norm(norm: Norm, facts: Facts, source: dict[str, str]) -> Row:
    name = "LayerNorm" if norm.kind == "layer" else "RMSNorm"
    bias = ", with a bias" if norm.bias else ""
    target = f"{name}{WEIGHTS[norm.weight]}{bias}, eps {norm.eps:g}"
    changes = ["eps"]
    if norm.kind == "layer":
        changes.insert(0, "LayerNorm in place of RMSNorm")
    if norm.weight != "plain":
        changes.insert(0, "1 + w" if norm.weight == "one_plus" else "no weight")
    return target, ", ".join(changes), _joined(source["norm_eps"], _places(facts, "norm"))


def _rope(architecture: Architecture, facts: Facts, source: dict[str, str]) -> Row:
    given = _joined(source.get("rope_theta", ""), source.get("rope_type", ""))
    origin = _joined(given, _places(facts, "rope"))
    if architecture.rope is None and not architecture.ropes:
        return "none", "no rotary embedding", origin
    ropes: dict[str, Rope | None] = {**architecture.ropes} or {"": architecture.rope}
    texts = [f"{label + ': ' if label else ''}{_rope_text(rope)}" for label, rope in ropes.items() if rope]
    used = [rope for rope in ropes.values() if rope]
    scaled = any(rope.parameters for rope in used)
    changes = ["theta" + (" and scaling" if scaled else "; no scaling")]
    without = [i for i, label in enumerate(architecture.layers.ropes) if label is None]
    partial = any(rope.rotary_dim for rope in used)
    if partial:
        changes.append("partial rotation")
    if any(rope.pairing == "interleaved" for rope in used):
        changes.append("interleaved pairs")
    if without:
        texts.append(f"none (NoPE) in {_layers(without, architecture)}")
        changes.append("layers without rotation")
    share = _rotated_share(facts, source) if partial else ""
    layers = source.get("layer_rope", "") if without else ""
    return "; ".join(texts), ", ".join(changes), _joined(given, share, layers, _places(facts, "rope"))


def _rotated_share(facts: Facts, source: dict[str, str]) -> str:
    """Where it is said how much of a head rotates."""
    text = facts.config
    for part in facts.text_path.split(".")[:-1]:
        text = text[part]
    named = next((f"config.json: {facts.text_path}{name}" for name in ROTATED_SHARE if name in text), "")
    return source.get("partial_rotary_factor") or named or source.get("rope_parameters", "")


def _rope_text(rope: Rope) -> str:
    numbers = {name: number for name, number in rope.parameters.items() if isinstance(number, (int, float))}
    scaling = ", ".join(f"{name} {number_text(number)}" for name, number in numbers.items())
    text = f"{rope.kind}, theta {number_text(rope.theta)}" + (f" ({scaling})" if scaling else "")
    text += f", {rope.rotary_dim} dimensions of a head" if rope.rotary_dim else ""
    text += ", neighbours paired" if rope.pairing == "interleaved" else ""
    return text + (", direction reversed" if rope.sign == -1 else "")


def _layers(indices: Sequence[int], architecture: Architecture) -> str:
    """Which layers, and how many of them there are."""
    total = architecture.num_layers
    return (
        f"all {total} layers"
        if len(indices) == total
        else f"layers {ranges(indices)} ({len(indices)} of {total})"
    )


def _labelled(label: str, places: str) -> str:
    return f"{label}: {places}" if places else ""


def _attention(architecture: Architecture, facts: Facts, source: dict[str, str]) -> Row:
    attention = architecture.attention
    parts = [
        f"{attention.num_heads} query and {attention.num_kv_heads} KV heads of {attention.head_dim}, "
        f"{'with' if attention.qkv_bias else 'without'} bias on q, k and v"
    ]
    changes = ["add qkv_proj_bias (2-D for the decode kernel)"] if attention.qkv_bias else ["sizes"]
    if attention.o_bias:
        changes.append("bias on the output projection")
    if attention.qk_norm:
        norm = "LayerNorm" if attention.qk_norm.norm.kind == "layer" else "RMSNorm"
        place = attention.qk_norm.place.replace("_", " ")
        parts.append(f"{norm} on {QK_WIDTHS[attention.qk_norm.width]} q and k {place}")
    windows = sorted({window for window in architecture.layers.windows if window})
    if windows:
        inside = [i for i, window in enumerate(architecture.layers.windows) if window is not None]
        text = f"window of {', '.join(map(str, windows))} tokens in {_layers(inside, architecture)}"
        if not any(binds(window, architecture) for window in windows):
            text += f", which never binds: the model has {architecture.max_position_embeddings} positions"
        parts.append(text)
        changes.append("windows")
    for name, value in (
        ("scale", attention.scale),
        ("softcap", attention.softcap),
        ("clip", attention.qkv_clip),
    ):
        if value is not None:
            parts.append(f"{name} {value:g}")
            changes.append(name)
    if attention.sinks:
        parts.append("sinks")
    if attention.alibi:
        parts.append("ALiBi")
    if attention.composed:
        changes.append(f"smaller operators in place of the fused ones ({'; '.join(attention.composed)})")
    origin = _joined(
        source["num_kv_heads"], source["head_dim"], source.get("layer_windows", "") if windows else "",
        "biases: keys of every layer",
        _labelled("scale", _places(facts, "attention_scale")),
        _labelled("norms", _places(facts, "qk_norm")) if attention.qk_norm else "",
        _labelled("sinks", _places(facts, "sinks")),
        _labelled("softcap", _places(facts, "softcap", of="(?<!ForCausalLM)")) if attention.softcap else "",
    )  # fmt: skip
    return "; ".join(parts), "; ".join(changes), origin


def _mlp(architecture: Architecture, facts: Facts, source: dict[str, str]) -> Row:
    mlp = architecture.mlp
    if not has_dense_layers(architecture):
        return "none: every layer has experts", "none", source["num_experts"]
    bias = ", with biases" if mlp.bias else ""
    target = f"{mlp.kind}, {mlp.activation}, intermediate {mlp.intermediate_size}{bias}"
    changes = ["sizes"]
    if mlp.kind == "plain":
        changes.append("no gate")
    if mlp.activation != "silu":
        changes.append("activation")
    origin = _joined(source["intermediate_size"], source["activation"], _places(facts, "activation"))
    return target, ", ".join(changes), origin


def _moe(architecture: Architecture, facts: Facts) -> Row:
    moe = architecture.moe
    if moe is None:
        return "none", "none", "checkpoint keys"
    routing = moe.routing
    routed = architecture.layers.moe or [True] * architecture.num_layers
    layers = _layers([i for i, has_experts in enumerate(routed) if has_experts], architecture)
    parts = [
        f"{routing.num_experts} experts of {moe.intermediate_size}, {routing.top_k} per token, in {layers}",
        f"{routing.score} over {routing.score_over}",
    ]
    for present, text in (
        (routing.normalise, "renormalised"),
        (not routing.normalise and routing.score_over == "all", "not renormalised"),
        (routing.correction_bias, "a bias for the choice only"),
        (routing.groups > 1, f"{routing.top_groups} of {routing.groups} groups"),
        (routing.scaling is not None, f"times {routing.scaling}"),
        (moe.activation != "silu", moe.activation),
        (moe.clamp is not None, f"gate and up clamped at {moe.clamp}"),
        (moe.up_offset is not None, f"up plus {moe.up_offset}"),
        (moe.bias, "biases in the experts"),
        (routing.bias, "a bias of the router"),
        (moe.shared is not None, _shared_text(moe.shared)),
    ):
        if present:
            parts.append(text)
    source = _joined(
        facts.fields["num_experts"].source if "num_experts" in facts.fields else "", _places(facts, "router")
    )
    composed = f"; smaller operators in decode ({'; '.join(moe.composed)})" if moe.composed else ""
    change = f"sizes and routing{composed}"
    return "; ".join(parts), change, source or "checkpoint keys"


def _shared_text(shared: SharedExperts | None) -> str:
    if shared is None:
        return ""
    gate = ", times the sigmoid of a projection" if shared.gated else ""
    combine = ", averaged with the experts" if shared.combine == "average" else ""
    return f"shared experts of {shared.intermediate_size} together{gate}{combine}"


def _decoder(architecture: Architecture, facts: Facts) -> Row:
    block = architecture.block
    scale = f", branches times {block.residual_scale:g}" if block.residual_scale is not None else ""
    changes = [] if block.topology == "pre_norm" else ["norm placement and residuals"]
    changes += ["residual factor"] if scale else []
    scales = _places(facts, "scale", of="Layer|Block") if scale else ""
    origin = _joined("checkpoint keys", _places(facts, "block"), scales)
    return TOPOLOGIES[block.topology] + scale, ", ".join(changes) or "none", origin


def _backbone(architecture: Architecture, facts: Facts, source: dict[str, str]) -> Row:
    embedding = architecture.embedding
    parts = [
        f"{architecture.num_layers} layers, hidden {architecture.hidden_size}, vocabulary {architecture.vocab_size}"
    ]
    changes = ["sizes"]
    if embedding.scale is not None:
        rounded = " in their dtype" if embedding.scale_rounded else ""
        parts.append(f"embeddings times {embedding.scale:g}{rounded}")
        changes.append("embedding factor")
    if embedding.norm:
        parts.append("embeddings normalised")
        changes.append("embedding norm")
    if embedding.positions != "none":
        offset = f", from row {embedding.position_offset} on" if embedding.position_offset else ""
        parts.append(f"{embedding.positions} positions{offset}")
        changes.append("absolute positions")
    scales = _places(facts, "embedding_scale", "scale", of="Model") if embedding.scale is not None else ""
    origin = _joined(source["num_layers"], source["hidden_size"], source["vocab_size"], scales)
    return ", ".join(parts), ", ".join(changes), origin


def _head(architecture: Architecture, facts: Facts, source: dict[str, str]) -> Row:
    head = architecture.head
    target = "tied to the embedding" if head.tied else "untied"
    change = "map lm_head.weight to the embedding's key" if head.tied else "own lm_head.weight"
    for name, value in (("logits times", head.scale), ("softcap", head.softcap)):
        if value is not None:
            target, change = f"{target}, {name} {value:g}", f"{change}; {name}"
    if head.bias:
        target, change = f"{target}, with a bias", f"{change}; bias"
    changed = head.scale is not None or head.softcap is not None
    scales = _places(facts, "scale", "softcap", of="ForCausalLM|HeadModel") if changed else ""
    return target, change, _joined(source["tie_word_embeddings"], scales)
