"""The classes of a modeling file that make up the decoder, and what they read from the config."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from autoport.research.modeling.attributes import config_attribute
from autoport.research.modeling.branches import Branches
from autoport.research.modeling.lineage import class_definitions, lineage
from autoport.research.modeling.locate import LONGEST_LINEAGE, ModelingFile

OTHER_TOWERS = ("Vision", "Audio", "Image", "Video", "Speech")


class Decoder:
    """The classes and functions that the entry classes build and call, vision and audio towers left out.

    Attributes:
        file: Name of the modeling file.
        classes, functions: Definitions by name.
        values: Config attributes, which choose the branches of `__init__`.
    """

    def __init__(self, file: ModelingFile, values: Mapping[str, Any] | None = None):
        self.values = values or {}
        self.file = file.name
        self.own = file.own
        self._classes = class_definitions(file.tree)
        self._functions = {node.name: node for node in file.tree.body if isinstance(node, ast.FunctionDef)}
        self._tables = {
            target.id: node
            for node in file.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self._reach(file.entries)

    def _reach(self, names: tuple[str, ...]) -> None:
        pending = list(names)
        seen: set[str] = set()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            node: ast.AST
            if current in self._classes and not any(word in current for word in OTHER_TOWERS):
                node = self.classes[current] = self._classes[current]
            elif current in self._functions:
                node = self.functions[current] = self._functions[current]
            elif current in self._tables:
                node = self._tables[current]
            else:
                continue
            pending += [item.id for item in ast.walk(node) if isinstance(item, ast.Name)]

    def where(self, node: ast.AST) -> str:
        return f"{self.file}:{getattr(node, 'lineno', 0)}"

    def method(self, owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
        """A method of a class or of the first base in the file that has it."""
        current: ast.ClassDef | None = owner
        seen: set[str] = set()
        while current is not None and current.name not in seen:
            seen.add(current.name)
            for node in current.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return node
            bases = [base.id for base in current.bases if isinstance(base, ast.Name)]
            current = next((self._classes[base] for base in bases if base in self._classes), None)
        return None

    def parts(self, owner: ast.ClassDef) -> dict[str, ast.Call]:
        """Modules that `__init__` makes: attribute -> the call that makes it, e.g. ``nn.LayerNorm(...)``."""
        found: dict[str, ast.Call] = {}
        for target, call in self.made(owner):
            found.setdefault(target, call)
        return found

    def made(self, owner: ast.ClassDef) -> Iterator[tuple[str, ast.Call]]:
        """Every module that `__init__` may make for an attribute: one for each branch that the config leaves."""
        for target, value in self.assignments(owner):
            for call in _calls(value):
                if class_of(call)[:1].isupper():
                    yield target, call

    def assignments(self, owner: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
        """``self.<name> = value`` of `__init__` in branches that may be taken, bases first."""
        return iter(self.follow(owner)[0])

    def follow(self, owner: ast.ClassDef) -> tuple[list[tuple[str, ast.expr]], Branches]:
        """The assignments of `__init__`, bases first, and what is known of the config after them."""
        branches = Branches(self.values)
        return list(self._assignments(owner, branches)), branches

    def _assignments(self, owner: ast.ClassDef, branches: Branches) -> Iterator[tuple[str, ast.expr]]:
        for node in lineage(self._classes, owner, LONGEST_LINEAGE):
            init = next(
                (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
            )
            yield from branches.assignments(init.body if init else [])

    def config_reads(self) -> dict[str, str]:
        """Config attributes that the decoder reads: name -> the first place."""
        found: dict[str, str] = {}
        for node in (*self.classes.values(), *self.functions.values()):
            for item in ast.walk(node):
                name = config_attribute(item)
                if name:
                    found.setdefault(name, self.where(item))
        return found

    def config_names(self, owner: ast.ClassDef) -> dict[str, str]:
        """Attributes of the class that hold a config attribute as it is: own name -> config's name."""
        return self.follow(owner)[1].names


def _calls(node: ast.expr) -> Iterator[ast.Call]:
    return (item for item in ast.walk(node) if isinstance(item, ast.Call))


def class_of(call: ast.Call) -> str:
    """Class that a call makes, e.g. ``LlamaRMSNorm`` or ``LayerNorm`` for ``nn.LayerNorm(...)``."""
    return ast.unparse(call.func).rpartition(".")[2]


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((item.value for item in call.keywords if item.arg == name), None)
