"""Strings that a port builds (parameter names, checkpoint keys, layer names), as patterns.

A pattern is a string in which ``{}`` stands for a part that is known at run time only, as a layer's index.
"""

import ast
import itertools
import re
from typing import NamedTuple

from autoport.review.source import Function, PortSource, enclosing_loop
from autoport.review.syntax import assigned, walk

UNKNOWN = "{}"
MAX_PATTERNS = 256


def origins(function: Function, node: ast.expr, depth: int = 6) -> list[ast.expr]:
    """The expressions that `node` may stand for: local names are followed to what is assigned to them."""
    if isinstance(node, ast.IfExp):
        return origins(function, node.body, depth) + origins(function, node.orelse, depth)
    if not isinstance(node, ast.Name) or depth == 0:
        return [node]
    found = [
        origin for value in assigned(function.node, node.id) for origin in origins(function, value, depth - 1)
    ]
    return found or [node]


def patterns(source: PortSource, function: Function, node: ast.expr, depth: int = 6) -> list[str]:
    """Patterns of the string, or of each string in the list, that `node` stands for; empty when unknown."""
    if depth == 0:
        return []
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = [
            patterns(source, function, part.value, depth - 1) or [UNKNOWN]
            if isinstance(part, ast.FormattedValue)
            else [str(part.value)]
            for part in node.values
            if isinstance(part, (ast.FormattedValue, ast.Constant))
        ]
        return _joined(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left = patterns(source, function, node.left, depth - 1)
        right = patterns(source, function, node.right, depth - 1)
        if isinstance(node.left, (ast.List, ast.ListComp)) or isinstance(
            node.right, (ast.List, ast.ListComp)
        ):
            return left + right
        return _joined([left or [UNKNOWN], right or [UNKNOWN]]) if left or right else []
    if isinstance(node, (ast.List, ast.Tuple)):
        return [pattern for item in node.elts for pattern in patterns(source, function, item, depth - 1)]
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return patterns(source, function, node.elt, depth - 1)
    if isinstance(node, ast.IfExp):
        return [
            p for branch in (node.body, node.orelse) for p in patterns(source, function, branch, depth - 1)
        ]
    if isinstance(node, ast.Name):
        looped = _loop_values(function, node)
        values = looped if looped else [origin for origin in origins(function, node) if origin is not node]
        return [pattern for value in values for pattern in patterns(source, function, value, depth - 1)]
    if isinstance(node, ast.Attribute):
        found = []
        for owner in source.types_of(function, node.value):
            for where, value in source.assignments(owner, node.attr):
                found += patterns(source, where, value, depth - 1)
        return found
    return []


def _joined(parts: list[list[str]]) -> list[str]:
    return ["".join(choice) for choice in itertools.islice(itertools.product(*parts), MAX_PATTERNS)]


def _loop_values(function: Function, name: ast.Name) -> list[ast.expr]:
    """The literals that the loop variable `name` takes."""
    loop = enclosing_loop(function.file, name)
    if loop is None:
        return []
    target, iterable = loop[0], origins(function, loop[1])[0]
    if isinstance(iterable, ast.Constant) and isinstance(iterable.value, str):
        return [ast.Constant(letter) for letter in iterable.value]
    if not isinstance(iterable, (ast.List, ast.Tuple)):
        return []
    if isinstance(target, ast.Name):
        return list(iterable.elts)
    rows = [row.elts for row in iterable.elts if isinstance(row, ast.Tuple)]
    for position, item in enumerate(target.elts if isinstance(target, ast.Tuple) else []):
        if isinstance(item, ast.Name) and item.id == name.id:
            return [row[position] for row in rows if len(row) > position]
    return []


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` can be `name`; unknown parts of `name` itself count as an index."""
    expression = ".+".join(re.escape(part) for part in pattern.split(UNKNOWN))
    return re.fullmatch(expression, name.replace(UNKNOWN, "0")) is not None


class Mapping(NamedTuple):
    """One entry of a weight mapping in the code: parameter patterns and checkpoint-key patterns."""

    function: Function
    node: ast.expr
    parameters: list[str]
    keys: list[str]


class Mappings(NamedTuple):
    """All entries found; `unread` are entries whose parameter name cannot be read from the code."""

    entries: list[Mapping]
    unread: list[tuple[Function, ast.expr]]

    def of(self, parameter: str) -> Mapping | None:
        return next(
            (entry for entry in self.entries if any(matches(known, parameter) for known in entry.parameters)),
            None,
        )


def weight_mappings(source: PortSource) -> Mappings:
    """The entries (parameter -> checkpoint keys) that the functions of the load path write."""
    entries, unread = [], []
    for function in source.load_path:
        for key, value in _pairs(function):
            keys = patterns(source, function, value)
            parameters = patterns(source, function, key)
            if keys and parameters and set(parameters) != {UNKNOWN}:
                entries.append(Mapping(function, key, parameters, keys))
            elif keys or isinstance(value, (ast.List, ast.ListComp)):
                unread.append((function, key))
    return Mappings(entries, unread)


def _pairs(function: Function) -> list[tuple[ast.expr, ast.expr]]:
    found: list[tuple[ast.expr, ast.expr]] = []
    for node in walk(function.node):
        if isinstance(node, ast.Dict):
            found += [
                (key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None
            ]
        elif isinstance(node, ast.DictComp):
            found.append((node.key, node.value))
        elif isinstance(node, ast.Assign):
            found += [
                (target.slice, node.value) for target in node.targets if isinstance(target, ast.Subscript)
            ]
    return found
