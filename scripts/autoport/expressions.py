"""Small expressions over a model's config, written once and used twice.

A family declares a number as an expression over config attributes, e.g. ``"hidden_size ** 0.5"``. The analysis
evaluates it on what config.json says; the generated config.py evaluates the same text on the Hugging Face
config at run time. Only literals, arithmetic, comparisons, conditions, subscripts, list comprehensions and the
functions in `FUNCTIONS` are expressions. An attribute of an attribute (``attn_config.clip_qkv``) is one of a nested
config: an object at run time, a dict in the analysis.
"""

import ast
from collections.abc import Mapping
from typing import Any

FUNCTIONS: dict[str, Any] = {
    "bool": bool,
    "float": float,
    "int": int,
    "isinstance": isinstance,
    "len": len,
    "max": max,
    "min": min,
    "range": range,
}

_NODES = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.BinOp, ast.operator, ast.UnaryOp,
    ast.unaryop, ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop, ast.IfExp, ast.Subscript, ast.List,
    ast.Tuple, ast.Dict, ast.ListComp, ast.comprehension, ast.Call, ast.Attribute,
)  # fmt: skip


def parse(text: str) -> ast.Expression:
    """Parse an expression.

    Raises:
        ValueError: The text is not an expression of the kind described above.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not an expression: {error}") from error
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ValueError(f"{text!r} has {type(node).__name__}, which is not allowed")
        if isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
            if not known or node.keywords:
                raise ValueError(f"{text!r} calls {ast.unparse(node.func)}")
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name.startswith("_"):
            raise ValueError(f"{text!r} reads {name}")
    return tree


def names(text: str) -> list[str]:
    """The config attributes that an expression reads, in order of appearance."""
    tree = parse(text)
    bound = _bound(tree)
    found = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in bound]
    return list(dict.fromkeys(found))


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """Value of an expression; `values` holds what `names` lists, nested configs as dicts.

    Raises:
        ValueError: It cannot be computed from these values.
    """
    tree = ast.fix_missing_locations(_Subscripts().visit(parse(text)))
    try:
        code = compile(tree, "<expression>", "eval")
        return eval(code, {"__builtins__": {}, **FUNCTIONS, **values})
    except (ArithmeticError, TypeError, LookupError, ValueError, NameError) as error:
        raise ValueError(f"{text!r} cannot be computed: {error}") from error


class _Subscripts(ast.NodeTransformer):
    """Turns attributes into subscripts."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Subscript(self.visit(node.value), ast.Constant(node.attr), ast.Load())


def qualify(text: str, owner: str) -> str:
    """The expression with every config attribute read from the variable `owner`."""
    tree = parse(text)
    bound = _bound(tree)

    class Qualify(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if node.id in bound:
                return node
            return ast.Attribute(ast.Name(owner, ast.Load()), node.id, ast.Load())

    return ast.unparse(ast.fix_missing_locations(Qualify().visit(tree)))


def _bound(tree: ast.AST) -> set[str]:
    stored = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return stored | set(FUNCTIONS)
