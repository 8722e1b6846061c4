"""How norms, attention and MLP are joined in a decoder layer, by following its forward symbolically."""

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from autoport.research.modeling.attributes import config_attribute
from autoport.research.modeling.branches import Unknown, condition
from autoport.research.modeling.classes import Decoder
from autoport.schema.facts import Finding

LAYERS = ("DecoderLayer", "Block", "Layer", "DecoderBlock")
ATTENTION = ("attn", "attention")
MLP = ("mlp", "feed_forward", "ffn", "moe", "expert", "ff", "fc1", "fc2")


LARGEST_TERM = 1000  # terms in it; those of transformers' layers have fewer than 20


class Term(NamedTuple):
    """A value: ``hidden`` (the layer's input), ``norm``, ``attention`` or ``mlp`` of other terms, or ``sum``.

    `scale` is the factor that it is multiplied by, as text; `size` the number of terms in it.
    """

    kind: str
    name: str = ""
    parts: tuple["Term", ...] = ()
    scale: str = ""
    size: int = 1


def _made(kind: str, name: str, parts: tuple[Term, ...]) -> Term:
    """A term of other terms.

    Raises:
        Unknown: when it grows beyond what a layer computes.
    """
    size = 1 + sum(part.size for part in parts)
    if size > LARGEST_TERM:
        raise Unknown("a value that is used too often")
    return Term(kind, name, parts, size=size)


HIDDEN = Term("hidden")


def block_findings(decoder: Decoder) -> Iterator[Finding]:
    """The topology of each kind of decoder layer."""
    for node in decoder.classes.values():
        forward = decoder.method(node, "forward")
        if not node.name.endswith(LAYERS) or forward is None:
            continue
        kinds = {_part_kind(name) for name, _ in decoder.assignments(node)}
        if not {"attention", "mlp"} <= kinds and not {"attention", "norm"} <= kinds:
            continue
        try:
            output = Follower(decoder, node).run(forward)
        except (Unknown, RecursionError):
            continue
        topology, order, scale = classify(output)
        if topology:
            value = {"topology": topology, "norms": order, "residual_scale": scale}
            yield Finding("block", node.name, value, decoder.where(forward))


def _part_kind(name: str) -> str:
    lowered = name.lower()
    if "norm" in lowered or lowered.startswith("ln"):
        return "norm"
    if any(word in lowered for word in ATTENTION):
        return "dropout" if "dropout" in lowered else "attention"
    if "drop" in lowered or lowered.startswith("act"):
        return "dropout"
    return "mlp" if any(word in lowered for word in MLP) else ""


class Follower:
    """Runs a layer's forward on terms instead of tensors."""

    def __init__(self, decoder: Decoder, owner: ast.ClassDef):
        branches = decoder.follow(owner)[1]
        self.values, self.config_names = branches.values, branches.names
        self.variables: dict[str, Term | None] = {}

    def run(self, forward: ast.FunctionDef) -> Term:
        names = [argument.arg for argument in forward.args.args if argument.arg != "self"]
        if not names:
            raise Unknown("forward takes nothing")
        self.variables = dict.fromkeys(names)
        self.variables[names[0]] = HIDDEN
        result = self.block(forward.body)
        if result is None:
            raise Unknown("nothing is returned")
        return result

    def block(self, statements: list[ast.stmt]) -> Term | None:
        for node in statements:
            if isinstance(node, ast.Return) and node.value is not None:
                return self.tensor(node.value)
            if isinstance(node, ast.If):
                result = self.branch(node)
                if result is not None:
                    return result
            elif isinstance(node, ast.Assign):
                value = self.term(node.value)
                for target in node.targets:
                    self.assign(target, value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                binary = ast.BinOp(ast.Name(node.target.id), node.op, node.value)
                self.variables[node.target.id] = self.term(binary)
            elif isinstance(node, (ast.With, ast.Try)):
                result = self.block(node.body)
                if result is not None:
                    return result
        return None

    def branch(self, node: ast.If) -> Term | None:
        """Take the branch that the condition chooses; when it is not known, both must come to the same."""
        try:
            taken = condition(node.test, self.scalar)
        except Unknown:
            before = dict(self.variables)
            result = self.block(node.body)
            after, self.variables = self.variables, before
            if self.block(node.orelse) != result or {**before, **after} != {**after, **self.variables}:
                raise
            return result
        return self.block(node.body if taken else node.orelse)

    def assign(self, target: ast.expr, value: Term | None) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
        elif isinstance(target, ast.Tuple) and target.elts:
            self.assign(target.elts[0], value)

    def scalar(self, node: ast.expr) -> Any:
        """A config attribute, or an argument: one that is left out is None."""
        if isinstance(node, ast.Constant):
            return node.value
        name = config_attribute(node)
        if not name and isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            name = self.config_names.get(node.attr, "")
            if node.attr == "training":
                return False
        if name in self.values:
            return self.values[name]
        if isinstance(node, ast.Name) and node.id in self.variables and self.variables[node.id] is None:
            return None
        raise Unknown(ast.unparse(node))

    def tensor(self, node: ast.expr) -> Term:
        if isinstance(node, ast.Tuple) and node.elts:
            node = node.elts[0]
        value = self.term(node)
        if value is None:
            raise Unknown(ast.unparse(node))
        return value

    def term(self, node: ast.expr) -> Term | None:
        if isinstance(node, ast.Name):
            return self.variables.get(node.id)
        if isinstance(node, ast.Tuple) and node.elts:
            return self.term(node.elts[0])
        if isinstance(node, ast.Subscript):
            return self.term(node.value)
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        return None

    def binary(self, node: ast.BinOp) -> Term | None:
        left, right = self.term(node.left), self.term(node.right)
        if isinstance(node.op, ast.Add) and left is not None and right is not None:
            if left.kind == right.kind == "mlp" and left.parts == right.parts:
                return left  # experts and shared experts
            return _made("sum", "", _flat(left) + _flat(right))
        if isinstance(node.op, (ast.Mult, ast.Div)) and (left is None) != (right is None):
            value, factor = (left, node.right) if left is not None else (right, node.left)
            sign = "" if isinstance(node.op, ast.Mult) else "1 / "
            text = ast.unparse(factor)
            name = config_attribute(factor) or self.config_names.get(text.removeprefix("self."), "")
            return value._replace(scale=f"{sign}{name or text}") if value else None
        return None

    def call(self, node: ast.Call) -> Term | None:
        text = ast.unparse(node.func)
        inputs = [self.term(item) for item in node.args]
        named = {item.arg: self.term(item.value) for item in node.keywords}
        value = next((item for item in (*inputs, named.get("hidden_states"), named.get("x")) if item), None)
        if text.endswith("dropout_add") and len(inputs) >= 2 and inputs[0] and inputs[1]:
            return _made("sum", "", _flat(inputs[0]) + _flat(inputs[1]))
        if text.endswith("dropout") and inputs:
            return value
        if not text.startswith("self.") or value is None:
            if isinstance(node.func, ast.Attribute) and (owner := self.term(node.func.value)):
                return owner  # x.view(...), x.to(...)
            return None
        name = text.removeprefix("self.")
        kind = _part_kind(name)
        if kind == "dropout":
            return value
        if not kind:
            return None
        if kind == value.kind == "mlp" and not value.scale:
            return value  # the second projection of an MLP without a class of its own
        term = _made(kind, name, (value,))
        residual = len(node.args) > 1 and isinstance(node.args[1], ast.Name) and node.args[1].id == "residual"
        if kind in ("attention", "mlp") and residual and inputs[1]:
            return _made("sum", "", (*_flat(inputs[1]), term))  # the residual is added inside
        return term


def _flat(term: Term) -> tuple[Term, ...]:
    return term.parts if term.kind == "sum" and not term.scale else (term,)


def classify(output: Term) -> tuple[str, list[str], str]:
    """Topology (a name of `Block.topology`, or empty), its norms in order, and the residual factor."""
    if output.kind == "norm":
        inner = output.parts[0]
        branches = _branches(inner)
        return ("post_residual_norm" if branches else "", _norms(output), _scale(branches))
    branches = _branches(output)
    if len(branches) != 2:
        return "", [], ""
    attention, mlp = branches
    scale = _scale(branches)
    pre, post = _input(attention), attention.kind == "norm"
    mlp_pre, mlp_post = _input(mlp), mlp.kind == "norm"
    names = [*_branch_norms(attention), *_branch_norms(mlp)]
    if pre is None or mlp_pre is None:
        return "", [], ""
    normed, mlp_normed = pre.kind == "norm", mlp_pre.kind == "norm"
    source = mlp_pre.parts[0] if mlp_normed else mlp_pre
    if post and mlp_post:
        return ("sandwich" if normed else "post_norm"), names, scale
    if normed and mlp_normed and not post:
        if mlp_pre == pre:
            return "parallel", [pre.name], scale
        if source == HIDDEN:
            return "parallel_two_norms", names, scale
        return "pre_norm", names, scale
    if not normed and not mlp_normed and source.kind == "norm":
        return "post_residual_norm", names, scale
    return "", [], ""


def _branches(output: Term) -> list[Term]:
    """The attention and the MLP branch of a residual sum."""
    found = {}
    for part in output.parts:
        core = part.parts[0] if part.kind == "norm" and part.parts else part
        if core.kind in ("attention", "mlp"):
            found[core.kind] = part
    return [found[kind] for kind in ("attention", "mlp") if kind in found]


def _input(branch: Term) -> Term | None:
    core = branch.parts[0] if branch.kind == "norm" else branch
    return core.parts[0] if core.parts else None


def _branch_norms(branch: Term) -> list[str]:
    inner = _input(branch)
    before = [inner.name] if inner is not None and inner.kind == "norm" else []
    return before + ([branch.name] if branch.kind == "norm" else [])


def _norms(term: Term) -> list[str]:
    inner = [name for part in term.parts for name in _norms(part)]
    return list(dict.fromkeys(inner + ([term.name] if term.kind == "norm" else [])))


def _scale(branches: list[Term]) -> str:
    scales = {branch.scale for branch in branches}
    return scales.pop() if len(scales) == 1 else ", ".join(sorted(scales))
