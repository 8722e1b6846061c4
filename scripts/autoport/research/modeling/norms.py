"""What a norm computes: decided by its forward, never by its name."""

import ast
from collections.abc import Iterator
from typing import Literal

from autoport.research.modeling.attributes import config_attribute
from autoport.research.modeling.classes import Decoder, class_of, keyword
from autoport.schema.facts import Finding

Weight = Literal["plain", "one_plus", "none"]
GAINS = ("weight", "scale", "gain", "gamma", "g")
CASTS = (".to(", ".type_as(", ".type(")


def norm_findings(decoder: Decoder) -> Iterator[Finding]:
    """One finding for each norm that a module of the decoder makes: where it is used, and what it computes."""
    seen: set[tuple[str, str, str]] = set()
    for owner in decoder.classes.values():
        for attribute, call in decoder.made(owner):
            name = class_of(call)
            described = None
            if name in ("LayerNorm", "RMSNorm") and name not in decoder.classes:
                described = _library_norm(name, call)
                where = decoder.where(call)
            elif name in decoder.classes:
                described = read_norm(decoder, decoder.classes[name])
                method = decoder.method(decoder.classes[name], "forward")
                where = decoder.where(method or decoder.classes[name])
            if described is None or (owner.name, attribute, name) in seen:
                continue
            seen.add((owner.name, attribute, name))
            eps = keyword(call, "eps") or (call.args[1] if len(call.args) > 1 else None)
            read = config_attribute(eps) if eps is not None else ""
            value = described | {"class": name, "eps": read or (ast.unparse(eps) if eps else "")}
            yield Finding("norm", f"{owner.name}.{attribute}", value, where)


def _library_norm(name: str, call: ast.Call) -> dict[str, object]:
    """torch's own norms: affine unless told otherwise."""
    affine = keyword(call, "elementwise_affine")
    bias = keyword(call, "bias")
    plain = affine is None or ast.unparse(affine) == "True"
    value: dict[str, object] = {
        "kind": "layer" if name == "LayerNorm" else "rms",
        "weight": "plain" if plain else f"plain if {ast.unparse(affine)} else none" if affine else "none",
        "bias": name == "LayerNorm" and plain,
        "float32": False,
        "rounding": "once",
    }
    if bias is not None and ast.unparse(bias) != "True":
        value["bias"] = False if ast.unparse(bias) == "False" else ast.unparse(bias)
    return value


def read_norm(decoder: Decoder, node: ast.ClassDef) -> dict[str, object] | None:
    """Kind, weight, bias and rounding of a norm class; None when its forward normalises nothing."""
    methods = _methods(decoder, node)
    if not methods:
        return None
    nodes = [item for method in methods for item in ast.walk(method)]
    text = "\n".join(ast.unparse(method) for method in methods)
    call = next((item for item in nodes if isinstance(item, ast.Call) and _is_functional(item)), None)
    if call is not None:
        return _functional(call, text)
    roots = ("rsqrt(", "sqrt(", "** -0.5", "** 0.5", ".std(", "** (-0.5)", "F.normalize(")
    if not any(root in text for root in roots) or (
        ".mean(" not in text and "mean(" not in text and ".var(" not in text
    ):
        return None
    if any(
        isinstance(item, ast.Call) and ast.unparse(item.func) in ("torch.matmul", "F.linear")
        for item in nodes
    ):
        return None
    centred = _subtracts_mean(nodes)
    weight = _weight(nodes)
    return {
        "kind": "layer" if centred else "rms",
        "weight": weight,
        "bias": any(_adds_bias(item) for item in nodes),
        "float32": "float32" in text or ".float()" in text,
        "rounding": _rounding(methods) if weight != "none" else "once",
    }


def _methods(decoder: Decoder, node: ast.ClassDef) -> list[ast.FunctionDef]:
    forward = decoder.method(node, "forward")
    if forward is None:
        return []
    called = {
        item.func.attr
        for item in ast.walk(forward)
        if isinstance(item, ast.Call)
        and isinstance(item.func, ast.Attribute)
        and ast.unparse(item.func.value) == "self"
    }
    return [forward, *(method for name in sorted(called) if (method := decoder.method(node, name)))]


def _is_functional(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith((".layer_norm", ".rms_norm"))


def _functional(call: ast.Call, text: str) -> dict[str, object]:
    """`F.layer_norm(x, shape, weight, bias, eps)`; the arguments may have been packed in a tuple before."""
    is_layer = ast.unparse(call.func).endswith(".layer_norm")
    given = [ast.unparse(item) for item in call.args]
    weight = ast.unparse(keyword(call, "weight") or ast.Constant(None)) if len(given) < 3 else given[2]
    bias = ast.unparse(keyword(call, "bias") or ast.Constant(None)) if len(given) < 4 else given[3]
    if given[:1] and given[0].startswith("*"):
        weight = (
            "1 + self.weight" if _text_adds_one(text) else "self.weight" if "self.weight" in text else "None"
        )
        bias = "self.bias" if "self.bias" in text else "None"
    kind: Weight = "none" if weight == "None" else "one_plus" if _text_adds_one(weight) else "plain"
    return {
        "kind": "layer" if is_layer else "rms",
        "weight": kind,
        "bias": bias != "None",
        "float32": "float32" in text or ".float()" in text,
        "rounding": "once",
    }


def _text_adds_one(text: str) -> bool:
    return any(form in text for form in ("weight + 1", "1 + self.weight", "1.0 + self.weight", "+ 1.0"))


def _subtracts_mean(nodes: list[ast.AST]) -> bool:
    """Whether a mean is subtracted: directly, or through a name that holds one."""
    means = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign)
        for name in node.targets
        for target in ast.walk(name)
        if isinstance(target, ast.Name) and _is_mean(node.value)
    }
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            right = node.right
            if _is_mean(right) or (isinstance(right, ast.Name) and right.id in means):
                return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".var", "var_mean", ".std")):
            return True  # a variance is about the mean
    return False


def _is_mean(node: ast.expr) -> bool:
    """`x.mean(...)` or `torch.mean(x, ...)` of x itself, not of its square."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("mean"):
        return False
    text = ast.unparse(node)
    return not any(square in text for square in ("pow(2)", "** 2", "square(", "pow(x, 2)"))


def _weight(nodes: list[ast.AST]) -> Weight:
    kind: Weight = "none"
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = (node.left, node.right)
            if any(_is_gain(side) for side in sides) and any(_is_one(side) for side in sides):
                return "one_plus"
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mult)
            and (_is_gain(node.left) or _is_gain(node.right))
        ):
            kind = "plain"
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult) and _is_gain(node.value):
            kind = "plain"
    return kind


def _is_gain(node: ast.expr) -> bool:
    text = ast.unparse(node).removeprefix("self.")
    return any(text == gain or text.startswith(f"{gain}.") for gain in GAINS)


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (1, 1.0)


def _adds_bias(node: ast.AST) -> bool:
    value = (
        node.right if isinstance(node, ast.BinOp) else node.value if isinstance(node, ast.AugAssign) else None
    )
    is_add = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Add)
    sides = [value] + ([node.left] if isinstance(node, ast.BinOp) else [])
    return is_add and any(
        side is not None and ast.unparse(side).startswith(("self.bias", "self.beta")) for side in sides
    )


def _rounding(methods: list[ast.FunctionDef]) -> str:
    """Where the normalised value goes back to the input's dtype: before or after the weight.

    A name stands for what was assigned to it last before the weight is applied.
    """
    for method in methods:
        nodes = list(ast.walk(method))
        for node in nodes:
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                for gain, other in ((node.left, node.right), (node.right, node.left)):
                    if _is_gain(gain):
                        text = _assigned_before(node, other.id, nodes) if isinstance(other, ast.Name) else ""
                        text = text or ast.unparse(other)
                        cast = any(item in text for item in CASTS) and not text.endswith("float32)")
                        return "before_weight" if cast else "after_weight"
    return "after_weight"


def _assigned_before(place: ast.expr, name: str, nodes: list[ast.AST]) -> str:
    """What a name was given last before a place; empty when nothing was."""
    given = [
        node
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == name
        and (node.end_lineno or node.lineno) < place.lineno
    ]
    last = max(given, key=lambda node: node.lineno, default=None)
    return ast.unparse(last.value) if last else ""
