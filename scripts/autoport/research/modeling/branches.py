"""Which branches of a class a config takes."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autoport.research.modeling.attributes import config_attribute


class Unknown(Exception):
    """The code cannot be followed."""


def condition(test: ast.expr, scalar: Callable[[ast.expr], Any]) -> bool:
    """Value of a condition over what `scalar` knows.

    Raises:
        Unknown: when it depends on something else.
    """
    if isinstance(test, ast.BoolOp):
        results = [condition(part, scalar) for part in test.values]
        return all(results) if isinstance(test.op, ast.And) else any(results)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not condition(test.operand, scalar)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = scalar(test.left), scalar(test.comparators[0])
        operator = test.ops[0]
        if isinstance(operator, (ast.Is, ast.Eq)):
            return bool(left == right)
        if isinstance(operator, (ast.IsNot, ast.NotEq)):
            return bool(left != right)
        raise Unknown(ast.unparse(test))
    return bool(scalar(test))


class Branches:
    """Follows `__init__` of a class: the statements that the config leaves, in their order.

    Attributes:
        values: Config attributes, with what `__init__` writes into the config.
        names: Own attributes that hold a config attribute as it is: own name -> config's name.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)
        self.names: dict[str, str] = {}
        self._written: Counter[str] = Counter()

    def assignments(self, body: list[ast.stmt], certain: bool = True) -> Iterator[tuple[str, ast.expr]]:
        """``self.<name> = value`` of the branches that are taken, or may be."""
        for node in body:
            if isinstance(node, ast.If):
                taken = self._taken(node.test)
                if taken is not False:
                    yield from self.assignments(node.body, certain and taken is True)
                if taken is not True:
                    yield from self.assignments(node.orelse, certain and taken is False)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from self._assign(target, node.value, certain)
            else:
                for field in ("body", "handlers", "orelse", "finalbody", "cases"):
                    yield from self.assignments(getattr(node, field, []), False)

    def _assign(self, target: ast.expr, value: ast.expr, certain: bool) -> Iterator[tuple[str, ast.expr]]:
        if not isinstance(target, ast.Attribute):
            return
        if ast.unparse(target.value) == "self":
            self._written[target.attr] += 1
            self.names.pop(target.attr, None)
            if read := config_attribute(value):
                self.names[target.attr] = read
            yield target.attr, value
        elif name := config_attribute(target):
            self.values.pop(name, None)
            if certain and isinstance(value, ast.Constant):
                self.values[name] = value.value

    def _taken(self, test: ast.expr) -> bool | None:
        try:
            return condition(test, self._scalar)
        except Unknown:
            return None

    def _scalar(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        name = config_attribute(node)
        if not name and isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            name = self.names.get(node.attr, "") if self._written[node.attr] == 1 else ""
        if name not in self.values:
            raise Unknown(ast.unparse(node))
        return self.values[name]
