"""Config classes as text, and the objects that following their text makes."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class Unfollowed(Exception):
    """A statement that this reading does not cover, or that the values at hand make fail."""


class Rejected(Exception):
    """A method raised an error."""


class ClassText(msgspec.Struct, frozen=True):
    """A class as text: its methods, and the names of its bases."""

    name: str
    path: Path
    bases: tuple[str, ...]
    methods: dict[str, ast.FunctionDef]


class Instance:
    """A config object.

    Attributes:
        mro: The class and its bases, in the order in which methods are looked for.
        attributes: Values by attribute name.
        sources: Where each value comes from.
        renamed: `attribute_map` of the class: standard name -> own name.
    """

    def __init__(self, mro: list[ClassText], renamed: Mapping[str, str]):
        self.mro = mro
        self.renamed = renamed
        self.attributes: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return self.renamed.get(name, name) in self.attributes

    def get(self, name: str) -> Any:
        own = self.renamed.get(name, name)
        if own not in self.attributes:
            raise Unfollowed(f"{self.mro[0].name} has no {name}")
        return self.attributes[own]

    def set(self, name: str, value: Any, source: str) -> None:
        own = self.renamed.get(name, name)
        unchanged = own in self.attributes and same(self.attributes[own], value)
        self.attributes[own] = value
        if not unchanged:
            self.sources[own] = source


def same(left: Any, right: Any) -> bool:
    """Equality that tells 1 from True and 1.0."""
    return type(left) is type(right) and bool(left == right)
