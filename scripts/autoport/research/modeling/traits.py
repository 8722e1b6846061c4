"""Scales, caps, sinks, activations, and the place of norms on queries and keys."""

import ast
from collections.abc import Iterator

from autoport.research.modeling.attributes import config_attribute
from autoport.research.modeling.classes import Decoder
from autoport.schema.facts import Finding

ROTATES = ("apply_rotary", "rotary_emb(", "rotate_half", "apply_rotary_emb")
QK_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "qk_norm", "k_norm", "k_layernorm", "key_layernorm")


def trait_findings(decoder: Decoder) -> Iterator[Finding]:
    """Findings on what else a port has to do."""
    for owner in decoder.classes.values():
        yield from _scales(decoder, owner)
        yield from _activation(decoder, owner)
        yield from _qk_norm(decoder, owner)
        for name, value in decoder.assignments(owner):
            if name in ("sinks", "sink", "attention_sink_bias") and "Parameter" in ast.unparse(value):
                yield Finding("sinks", f"{owner.name}.{name}", {"sinks": True}, decoder.where(value))
    for owner in decoder.classes.values():
        for item in ast.walk(owner):
            if isinstance(item, ast.keyword) and item.arg == "embed_scale":
                text = ast.unparse(item.value)
                if text != "embed_scale":
                    yield Finding(
                        "embedding_scale", owner.name, {"expression": text}, decoder.where(item.value)
                    )
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) in (
                "normalizer",
                "self.embed_scale",
            ):
                text = ast.unparse(item.value)
                if "config" in text:
                    yield Finding("embedding_scale", owner.name, {"expression": text}, decoder.where(item))
    named = [*decoder.classes.items(), *decoder.functions.items()]
    for subject, definition in named:
        for item in ast.walk(definition):
            if isinstance(item, ast.Call) and ast.unparse(item.func) in ("torch.tanh", "F.tanh"):
                yield Finding("softcap", subject, {"expression": ast.unparse(item)}, decoder.where(item))


def _scales(decoder: Decoder, owner: ast.ClassDef) -> Iterator[Finding]:
    """Products and quotients with a config attribute, and the factor of attention scores."""
    names = decoder.config_names(owner)
    for name, value in decoder.assignments(owner):
        reads = [read for item in ast.walk(value) if (read := config_attribute(item))]
        if name in ("scaling", "scale", "softmax_scale", "attn_scale", "inv_norm_factor"):
            text = {"expression": ast.unparse(value), "config": reads}
            yield Finding("attention_scale", f"{owner.name}.{name}", text, decoder.where(value))
    forward = decoder.method(owner, "forward")
    for item in ast.walk(forward) if forward else ():
        if not isinstance(item, ast.BinOp) or not isinstance(item.op, (ast.Mult, ast.Div)):
            continue
        for side in (item.left, item.right):
            read = config_attribute(side) or names.get(ast.unparse(side).removeprefix("self."), "")
            if read and _is_factor(read):
                way = "divides" if isinstance(item.op, ast.Div) and side is item.right else "multiplies"
                yield Finding(
                    "scale", f"{owner.name}: {read}", {"config": read, "way": way}, decoder.where(item)
                )


def _is_factor(name: str) -> bool:
    return name.endswith(
        ("_multiplier", "_scale", "_scaling", "_factor", "scale_emb", "_scalar", "scale_depth")
    )


def _activation(decoder: Decoder, owner: ast.ClassDef) -> Iterator[Finding]:
    found = [
        value
        for _, value in decoder.assignments(owner)
        if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "ACT2FN"
    ]
    if found:
        gated = _is_gated(decoder, owner)
        for value in found:
            chosen = config_attribute(value.slice) or ast.unparse(value.slice)
            yield Finding("activation", owner.name, {"config": chosen, "gated": gated}, decoder.where(value))


def _is_gated(decoder: Decoder, owner: ast.ClassDef) -> bool:
    forward = decoder.method(owner, "forward")
    products = (
        [n for n in ast.walk(forward) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
        if forward
        else []
    )
    return any("act" in ast.unparse(item) or "gate" in ast.unparse(item) for item in products)


def _qk_norm(decoder: Decoder, owner: ast.ClassDef) -> Iterator[Finding]:
    """Norms on q and k, and whether they come before or after the rotation."""
    parts = decoder.parts(owner)
    names = [name for name in QK_NORMS if name in parts]
    forward = decoder.method(owner, "forward")
    if not names or forward is None:
        return
    text = ast.unparse(forward)
    calls = [text.find(f"self.{name}(") for name in names if f"self.{name}(" in text]
    rotates = [text.find(word) for word in ROTATES if word in text]
    if calls:
        after = bool(rotates) and min(calls) > min(rotates)
        value = {"place": "after_rope" if after else "before_rope", "names": names}
        yield Finding("qk_norm", owner.name, value, decoder.where(forward))
