"""Biases: two-dimensional where a kernel takes them, and added once where the output is summed over ranks."""

import ast
from typing import NamedTuple

from autoport.review.finding import Finding, NotApplicable, Subject, check, failed, judge, passed
from autoport.review.names import origins
from autoport.review.parameters import declaration, loader_of, rank_of
from autoport.review.reductions import follow
from autoport.review.source import Class, Function, PortSource
from autoport.review.syntax import argument, calls, is_none, last_name, names_in, number, self_attribute

# Loaders that give every rank the whole bias, or a part of it that is not divided.
WHOLE_LOADERS = {
    "sharding_weight_loader",
    "sharding_weight_loader_with_padding",
    "last_dim_padding_weight_loader",
}


class BiasArgument(NamedTuple):
    """A bias argument of an operator.

    Attributes:
        position: Its position when it is given without a name, None where it is given by name only.
        rank: Dimensions that the kernel asks for.
        row_parallel: The operator's output is summed over the ranks, so a bias would be added once per rank.
    """

    operator: str
    name: str
    position: int | None
    rank: int
    row_parallel: bool = False


BIASES = (
    BiasArgument("attention_decode", "bias_qkv", None, 2),
    BiasArgument("attention_decode", "bias_out", None, 2, row_parallel=True),
    BiasArgument("qkv_proj", "bias", None, 2),
    BiasArgument("o_proj", "bias", 2, 2, row_parallel=True),
    BiasArgument("mlp", "gate_b", None, 2),
    BiasArgument("mlp", "up_b", None, 2),
    BiasArgument("mlp", "down_b", None, 2, row_parallel=True),
    BiasArgument("moe_block_tkg", "router_bias", None, 2),
    BiasArgument("rmsnorm_router_topk_tkg", "router_bias", 3, 2),
    BiasArgument("router", "router_bias", 3, 1),
)


@check
def bias_rank(subject: Subject) -> list[Finding]:
    findings = []
    for bias in BIASES:
        for function, call in subject.functional_calls(bias.operator):
            value = argument(call, bias.name, bias.position)
            if is_none(value):
                continue
            assert value is not None
            for origin in origins(function, value):
                if is_none(origin):
                    continue
                where = function.file.at(value)
                rank = tensor_rank(subject.source, function, origin)
                text = f"{bias.operator}({bias.name}={ast.unparse(origin)})"
                if rank is None:
                    findings.append(judge(where, f"{text}: is it {bias.rank}-D?"))
                elif rank == bias.rank:
                    findings.append(passed(where, f"{text} is {rank}-D"))
                else:
                    findings.append(failed(where, f"{text} is {rank}-D, the kernel takes {bias.rank}-D"))
    if not findings:
        raise NotApplicable("no operator is given a bias")
    return findings


def tensor_rank(source: PortSource, function: Function, node: ast.expr, depth: int = 12) -> int | None:
    """Dimensions of a parameter after unsqueeze, view and indexing; None where it cannot be told."""
    if depth == 0:
        return None
    if isinstance(node, ast.Attribute):
        attribute = self_attribute(node)
        parameter = declaration(source, function.owner, attribute) if attribute and function.owner else None
        return rank_of(parameter) if parameter else None
    if isinstance(node, ast.Name):
        found = [origin for origin in origins(function, node) if origin is not node]
        ranks = {tensor_rank(source, function, origin, depth - 1) for origin in found}
        return ranks.pop() if len(ranks) == 1 else None
    if isinstance(node, ast.Subscript):
        return _indexed_rank(tensor_rank(source, function, node.value, depth - 1), node.slice)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
        return tensor_rank(source, function, node.left, depth - 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, base = node.func.attr, node.func.value
        if method in ("view", "reshape"):
            sizes = node.args
            if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
                sizes = sizes[0].elts
            return None if any(isinstance(size, ast.Starred) for size in sizes) else len(sizes) or None
        inner = tensor_rank(source, function, base, depth - 1)
        if inner is None:
            return None
        if method == "unsqueeze":
            return inner + 1
        if method in ("to", "float", "bfloat16", "contiguous", "clone", "type", "detach"):
            return inner
    return None


def _indexed_rank(rank: int | None, index: ast.expr) -> int | None:
    if rank is None:
        return None
    for item in index.elts if isinstance(index, ast.Tuple) else [index]:
        if isinstance(item, ast.Constant) and item.value is None:
            rank += 1
        elif number(item) is not None:
            rank -= 1
        elif not isinstance(item, ast.Slice) and not (isinstance(item, ast.Constant) and item.value is ...):
            return None
    return rank


@check
def row_parallel_bias(subject: Subject) -> list[Finding]:
    findings = []
    for bias in (bias for bias in BIASES if bias.row_parallel):
        for function, call in subject.functional_calls(bias.operator):
            value = argument(call, bias.name, bias.position)
            for origin in [] if value is None else origins(function, value):
                if not is_none(origin):
                    text = f"{bias.operator}({bias.name}={ast.unparse(origin)})"
                    findings.append(_added_once(subject.source, function, origin, text, reduced=False))
    for added in follow(subject).biases.values():
        text = f"+ {ast.unparse(added.node)}"
        findings.append(_added_once(subject.source, added.function, added.node, text, added.reduced))
    if not findings:
        raise NotApplicable("no row-parallel output has a bias")
    return findings


def _added_once(source: PortSource, function: Function, value: ast.expr, text: str, reduced: bool) -> Finding:
    """Whether a bias that is added before (or after) the sum over the ranks is loaded divided (or whole)."""
    where = function.file.at(value)
    if any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) for node in ast.walk(value)):
        return passed(where, f"{text} is divided before it is summed over the ranks")
    attribute = next((name for node in ast.walk(value) if (name := self_attribute(node))), "")
    if not attribute or function.owner is None:
        return judge(where, f"{text}: is it added once, or once per rank?")
    loading, kind = _loading(source, function.owner, attribute)
    divided = "scaled_bias_loader" in kind
    if not divided and kind and not set(kind) & WHOLE_LOADERS:
        return judge(loading, f"{text} is loaded by {kind[0]}: is it added once, or once per rank?")
    how = "loaded divided by the number of ranks" if divided else "loaded whole"
    when = "after" if reduced else "before"
    report = passed if divided != reduced else failed
    return report(loading or where, f"{text} is {how} and added {when} the sum over the ranks")


def _loading(source: PortSource, cls: Class, attribute: str) -> tuple[str, list[str]]:
    """Place of an attribute's weight loader, and the functions that make it; both empty when it has none."""
    loader = loader_of(source, cls, attribute)
    if loader is None:
        return "", []
    function, expression = loader[0], origins(*loader)[0]
    made_by = [expression] if isinstance(expression, ast.Call) else []
    made_by += calls(expression)
    names = [last_name(call.func) for call in made_by] or [ast.unparse(expression)]
    for call in made_by:
        for called in source.resolve(function, call.func):
            names += sorted(names_in(called.node) & {"scaled_bias_loader"})
    return function.file.at(expression), names
