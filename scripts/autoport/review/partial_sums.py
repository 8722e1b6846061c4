"""Values of the interpreter in `reductions`: partial sums, and what is known on a path through a function."""

import ast
import re
from typing import NamedTuple

from autoport.review.finding import Status
from autoport.review.source import Function


class Origin(NamedTuple):
    operator: str
    where: str


class Partial(NamedTuple):
    """A sum over this rank's share: how often it was reduced, and the operators whose outputs are in it."""

    reductions: int
    origins: tuple[Origin, ...]


Value = Partial | None


class Event(NamedTuple):
    """What happened to the output of an operator."""

    status: Status
    origin: Origin
    text: str


class BiasSum(NamedTuple):
    """A parameter ``self.<attribute>`` added to the output of a row-parallel operator.

    Attributes:
        reduced: Whether the output had been summed over the ranks before, on every path.
    """

    function: Function
    node: ast.expr
    reduced: bool


class Path:
    """Names and conditions on one path through a function."""

    def __init__(self, values: dict[str, Value], conditions: dict[str, bool]):
        self.values = values
        self.conditions = conditions

    def fork(self) -> "Path":
        return Path(dict(self.values), dict(self.conditions))

    def forget(self, name: str) -> None:
        """Drop what was known of a name that is assigned again."""
        self.conditions = {
            atom: outcome for atom, outcome in self.conditions.items() if not re.search(rf"\b{name}\b", atom)
        }

    def key(self) -> tuple[object, ...]:
        tracked = sorted((name, value) for name, value in self.values.items() if value is not None)
        return (*tracked, *sorted(self.conditions.items()))
