"""Small questions about syntax trees."""

import ast
import functools
from collections.abc import Iterator

CONTAINERS = ("ModuleList", "ModuleDict", "Sequential")  # of torch.nn: modules that hold others
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@functools.lru_cache(maxsize=4096)
def walk(root: ast.AST, nested: bool = True) -> tuple[ast.AST, ...]:
    """Every node below `root` in source order; `nested=False` leaves functions defined inside it out."""
    return tuple(_below(root, nested))


def _below(root: ast.AST, nested: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(root):
        if nested or not isinstance(child, SCOPES):
            yield child
            yield from _below(child, nested)


def calls(root: ast.AST, nested: bool = True) -> list[ast.Call]:
    return [node for node in walk(root, nested) if isinstance(node, ast.Call)]


def dotted(node: ast.AST) -> str:
    """``self.tp_group.all_reduce`` for such an expression; ``""`` where something else is inside."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def last_name(node: ast.AST) -> str:
    """The last part of a name or attribute: ``all_reduce`` for ``anything().all_reduce``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def self_attribute(node: ast.AST) -> str:
    """``x`` for ``self.x``, otherwise ``""``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return ""


@functools.lru_cache(maxsize=1024)
def assignments(root: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Every (target, value) assigned below `root`; ``a, b = x, y`` gives two of them."""
    found: list[tuple[ast.expr, ast.expr]] = []
    for node in walk(root):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    found += zip(target.elts, node.value.elts, strict=False)
                else:
                    found.append((target, node.value))
    return found


def assigned(root: ast.AST, name: str) -> list[ast.expr]:
    """Values that the local name `name` is assigned below `root`, without those that use it themselves."""
    return [
        value
        for target, value in assignments(root)
        if isinstance(target, ast.Name) and target.id == name and not _uses(value, name)
    ]


def _uses(node: ast.AST, name: str) -> bool:
    return any(isinstance(item, ast.Name) and item.id == name for item in ast.walk(node))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((item.value for item in call.keywords if item.arg == name), None)


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument by name, or by position (0 is the first) where it is given without one."""
    found = keyword(call, name)
    if found is None and position is not None and position < len(call.args):
        found = call.args[position]
    return found


def is_none(node: ast.AST | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def number(node: ast.AST | None) -> int | float | None:
    """The value of a number literal (not a bool), with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = number(node.operand)
        return -value if value is not None else None
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        return node.value
    return None


def names_in(node: ast.AST) -> set[str]:
    """Every name and attribute name used in an expression."""
    found = set()
    for item in (node, *walk(node)):
        if isinstance(item, ast.Name):
            found.add(item.id)
        elif isinstance(item, ast.Attribute):
            found.add(item.attr)
    return found


def constructor_calls(value: ast.expr) -> list[ast.Call]:
    """The constructor calls in a value: ``X(...)``, ``X(...) if c else Y(...)``, ``ModuleList([X(...)])``."""
    if isinstance(value, ast.IfExp):
        return constructor_calls(value.body) + constructor_calls(value.orelse)
    if not isinstance(value, ast.Call):
        return []
    if dotted(value.func).rpartition(".")[2] not in CONTAINERS:
        return [value]
    return [
        call
        for argument in value.args
        for element in _elements(argument)
        for call in constructor_calls(element)
    ]


def _elements(node: ast.expr) -> list[ast.expr]:
    """The elements of a list, dictionary or comprehension; anything else is its own only element."""
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return [node.elt]
    if isinstance(node, ast.DictComp):
        return [node.value]
    if isinstance(node, ast.Dict):
        return node.values
    return node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
