"""A port's Python files as syntax trees, and what calls what in them. Nothing is imported."""

import ast
import collections
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from autoport.errors import Problem, Refusal
from autoport.review.syntax import (
    assigned,
    assignments,
    calls,
    constructor_calls,
    dotted,
    names_in,
    self_attribute,
    walk,
)

Def = ast.FunctionDef | ast.AsyncFunctionDef

# How many assignments are followed from a name; names can be defined by each other.
MAX_DEPTH = 12


class SourceFile:
    """One parsed file.

    Attributes:
        relative: Path below the workspace's root, with forward slashes.
        classes: Top-level classes by name.
        functions: Top-level functions by name.
        imports: Local name -> dotted origin; relative origins start with a dot (``.config.YiConfig``).
    """

    def __init__(self, path: Path, root: Path):
        """Raises: SyntaxError, ValueError, OSError."""
        self.path = path
        self.relative = path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, filename=str(path))
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, Def)}
        self.imports = _imports(self.tree)

    def at(self, node: ast.AST) -> str:
        return f"{self.relative}:{getattr(node, 'lineno', 1)}"

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around `node`, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node


def _imports(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                separator = "" if module.endswith(".") else "."
                names[alias.asname or alias.name] = f"{module}{separator}{alias.name}"
    return names


class Class(NamedTuple):
    file: SourceFile
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def at(self) -> str:
        return self.file.at(self.node)


class Function(NamedTuple):
    """A function or method. `owner` is the class it was looked up on, None for a module-level function."""

    file: SourceFile
    node: Def
    owner: Class | None

    @property
    def name(self) -> str:
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name

    @property
    def positional(self) -> list[str]:
        """Names of the parameters that can be given by position, without ``self`` or ``cls``."""
        arguments = self.node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        return names[1:] if names[:1] in (["self"], ["cls"]) else names

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters, without ``self`` or ``cls``."""
        return self.positional + [argument.arg for argument in self.node.args.kwonlyargs]


class PortSource:
    """All Python files of a port's model folder, which is called `folder`."""

    def __init__(self, folder: str, files: list[SourceFile]):
        self.folder = folder
        self.files = files
        self._by_module = {file.path.stem: file for file in files}
        self._attributes: dict[ast.ClassDef, dict[str, list[tuple[Function, ast.expr]]]] = {}

    @classmethod
    def load(cls, folder: Path, root: Path) -> "PortSource":
        """Parse every ``*.py`` in `folder` and its subfolders.

        Raises:
            Refusal: REV-SYNTAX with every file that cannot be read or parsed.
        """
        files, problems = [], []
        for path in sorted(folder.rglob("*.py")):
            try:
                files.append(SourceFile(path, root))
            except (SyntaxError, ValueError, OSError) as error:
                problems.append(
                    Problem(
                        "REV-SYNTAX",
                        f"cannot be parsed: {error}",
                        str(path),
                        "correct the file, then review again",
                    )
                )
        if problems:
            raise Refusal(*problems)
        return cls(folder.name, files)

    # --- Classes -----------------------------------------------------------------------------------

    @functools.cached_property
    def classes(self) -> list[Class]:
        return [Class(file, node) for file in self.files for node in file.classes.values()]

    @functools.cached_property
    def modules(self) -> list[Class]:
        """Classes of the implementation that have a forward; factories, which only delegate, are left out."""
        return [cls for cls in self.classes if self.method(cls, "forward") and not self.is_factory(cls)]

    @functools.cached_property
    def heads(self) -> list[Class]:
        """The classes that the runner calls: they load weights and describe the KV cache.

        One that takes its forward from another head of the port is that head again.
        """
        heads = [
            cls
            for cls in self.modules
            if self.method(cls, "load_weights") and self.method(cls, "get_kv_spec")
        ]
        nodes = {cls.node for cls in heads}
        return [cls for cls in heads if not self._is_again(cls, nodes)]

    def _is_again(self, cls: Class, heads: set[ast.ClassDef]) -> bool:
        own = any(isinstance(node, Def) and node.name == "forward" for node in cls.node.body)
        return not own and any(base.node in heads for base in self.bases(cls) if base.node is not cls.node)

    @functools.cached_property
    def factories(self) -> list[Class]:
        return [cls for cls in self.classes if self.is_factory(cls)]

    def is_factory(self, cls: Class) -> bool:
        """Whether the class only selects an implementation."""
        return cls.file.path.stem.startswith("factory") and self.method(cls, "from_configs") is not None

    def find_class(self, file: SourceFile, name: str) -> Class | None:
        """The class that `name` stands for in `file`, when it is defined in this port."""
        if name in file.classes:
            return Class(file, file.classes[name])
        other, original = self._imported(file, name)
        return Class(other, other.classes[original]) if other and original in other.classes else None

    def _imported(self, file: SourceFile, name: str) -> tuple[SourceFile | None, str]:
        """The file of this port that `name` is imported from, and its name there."""
        module, _, original = file.imports.get(name, "").rpartition(".")
        ours = module.startswith(".") or f".{self.folder}." in f".{module}."
        return self._by_module.get(module.rpartition(".")[2]) if ours else None, original

    def bases(self, cls: Class) -> Iterator[Class]:
        """The class and its bases in this port, in method resolution order (single inheritance)."""
        seen: set[ast.ClassDef] = set()
        queue = [cls]
        while queue:
            current = queue.pop(0)
            if current.node in seen:
                continue
            seen.add(current.node)
            yield current
            for base in current.node.bases:
                found = self.find_class(current.file, base.id) if isinstance(base, ast.Name) else None
                if found:
                    queue.append(found)

    def method(self, cls: Class, name: str) -> Function | None:
        for base in self.bases(cls):
            for node in base.node.body:
                if isinstance(node, Def) and node.name == name:
                    return Function(base.file, node, cls)
        return None

    def methods(self, cls: Class) -> Iterator[Function]:
        seen = set()
        for base in self.bases(cls):
            for node in base.node.body:
                if isinstance(node, Def) and node.name not in seen:
                    seen.add(node.name)
                    yield Function(base.file, node, cls)

    # --- Attributes --------------------------------------------------------------------------------

    def assignments(self, cls: Class, attribute: str) -> list[tuple[Function, ast.expr]]:
        """Every value that a method of the class assigns to ``self.<attribute>``."""
        if cls.node not in self._attributes:
            by_name: dict[str, list[tuple[Function, ast.expr]]] = {}
            for function in self.methods(cls):
                for target, value in assignments(function.node):
                    by_name.setdefault(self_attribute(target), []).append((function, value))
            self._attributes[cls.node] = by_name
        return self._attributes[cls.node].get(attribute, [])

    def attribute_types(self, cls: Class, attribute: str) -> list[tuple[str, Class | None]]:
        """Classes of ``self.<attribute>``: (dotted name, class when it is defined in this port).

        For a `ModuleList` these are the classes of its elements.
        """
        found = []
        for function, value in self.assignments(cls, attribute):
            for call in constructor_calls(value):
                name = dotted(call.func)
                local = self.find_class(function.file, name) if "." not in name else None
                found.append((name, local))
        return found

    def holders(self, cls: Class) -> list[Class]:
        """Modules that have the class as a submodule."""
        return [
            holder
            for holder in self.modules
            for attribute in {self_attribute(t) for f in self.methods(holder) for t, _ in assignments(f.node)}
            if any(local and local.node is cls.node for _, local in self.attribute_types(holder, attribute))
        ]

    def types_of(self, function: Function, node: ast.expr, depth: int = MAX_DEPTH) -> list[Class]:
        """Classes of an expression such as ``self.mlp``, ``self.layers[0].self_attn`` or a loop variable.

        A list has the classes of its elements; several classes mean that the constructor chooses one.
        """
        if depth == 0:
            return []
        if isinstance(node, ast.Subscript):
            return self.types_of(function, node.value, depth - 1)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self.types_of(function, node.elt, depth - 1)
        if isinstance(node, ast.Name):
            if node.id == "self":
                return [function.owner] if function.owner else []
            loop = _loop_over(function.file, node)
            values = [loop] if loop is not None else assigned(function.node, node.id)
            return _distinct(cls for value in values for cls in self.types_of(function, value, depth - 1))
        if isinstance(node, ast.Attribute):
            owners = self.types_of(function, node.value, depth - 1)
            types = (kind for owner in owners for kind in self.attribute_types(owner, node.attr))
            return _distinct(local for _, local in types if local)
        return []

    # --- Calls -------------------------------------------------------------------------------------

    def resolve(self, function: Function, target: ast.expr, depth: int = MAX_DEPTH) -> list[Function]:
        """The functions of this port that calling `target` may run.

        A method, a module's forward, a constructor, a module-level function, or what a local name is set to.
        """
        if depth == 0:
            return []
        if isinstance(target, ast.IfExp):
            branches = (target.body, target.orelse)
            return [item for branch in branches for item in self.resolve(function, branch, depth - 1)]
        if isinstance(target, ast.Name):
            if target.id in function.file.functions:
                return [Function(function.file, function.file.functions[target.id], None)]
            other, original = self._imported(function.file, target.id)
            if other and original in other.functions:
                return [Function(other, other.functions[original], None)]
            cls = self.find_class(function.file, target.id)
            constructor = self.method(cls, "__init__") if cls else None
            if constructor:
                return [constructor]
            values = assigned(function.node, target.id)
            values = [value for value in values if isinstance(value, (ast.Attribute, ast.IfExp))]
            found = [item for value in values for item in self.resolve(function, value, depth - 1)]
            if found:
                return found
        if isinstance(target, ast.Attribute):
            named = self.find_class(function.file, dotted(target.value))
            if dotted(target.value) in ("self", "cls"):
                named = function.owner
            owners = [named] if named else self.types_of(function, target.value)
            methods = [method for owner in owners if (method := self.method(owner, target.attr))]
            if methods:
                return methods
        children = self.types_of(function, target)
        return [forward for child in children if (forward := self.method(child, "forward"))]

    def reachable(self, roots: Iterable[Function], nested: bool = True) -> list[Function]:
        """The roots and every function of this port that they call, in order of discovery."""
        found: dict[tuple[ast.AST, ast.AST | None], Function] = {}
        queue = collections.deque(roots)
        while queue:
            function = queue.popleft()
            key = (function.node, function.owner.node if function.owner else None)
            if key in found:
                continue
            found[key] = function
            for node in walk(function.node, nested):
                if isinstance(node, ast.Call):
                    queue.extend(self.resolve(function, node.func))
        return list(found.values())

    @functools.cached_property
    def forward_path(self) -> list[Function]:
        """Every function that runs inside a forward."""
        return self.reachable(function for cls in self.modules if (function := self.method(cls, "forward")))

    @functools.cached_property
    def forward_calls(self) -> list[tuple[Function, ast.Call]]:
        """Every call in the forward path, each once."""
        found = {call: function for function in self.forward_path for call in calls(function.node)}
        return [(function, call) for call, function in found.items()]

    @functools.cached_property
    def constructor_path(self) -> list[Function]:
        """Every function that runs while a module is constructed."""
        roots = (function for cls in self.modules if (function := self.method(cls, "__init__")))
        return [
            function for function in self.reachable(roots, nested=False) if function.node.name != "forward"
        ]

    @functools.cached_property
    def load_path(self) -> list[Function]:
        """Every function that runs while weights are loaded."""
        return self.reachable(
            function for cls in self.heads if (function := self.method(cls, "load_weights"))
        )


def _distinct(classes: Iterable[Class]) -> list[Class]:
    return list({cls.node: cls for cls in classes}.values())


def enclosing_loop(file: SourceFile, name: ast.Name) -> tuple[ast.expr, ast.expr] | None:
    """Target and iterable of the innermost loop or comprehension around `name` that binds it."""
    for node in file.ancestors(name):
        loops: list[ast.For | ast.comprehension] = []
        if isinstance(node, ast.For):
            loops = [node]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            loops = list(node.generators)
        for loop in loops:
            if name.id in names_in(loop.target):
                return loop.target, loop.iter
    return None


def _loop_over(file: SourceFile, name: ast.Name) -> ast.expr | None:
    """What the loop variable `name` runs over (``enumerate`` seen through)."""
    loop = enclosing_loop(file, name)
    if loop is None:
        return None
    target, iterable = loop
    if isinstance(iterable, ast.Call) and dotted(iterable.func) == "enumerate" and iterable.args:
        iterable = iterable.args[0]
        if isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
    return iterable if isinstance(target, ast.Name) and target.id == name.id else None
