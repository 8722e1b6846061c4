"""Running the small part of Python that transformers' config classes use, from their text.

A config class computes fields in ``__post_init__``: layer types from a pattern, key/value heads from the heads,
RoPE parameters from older spellings. The methods are read as text and followed statement by statement; nothing is
imported, and no name outside the class, its arguments and the functions below can be reached.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from autoport.research.class_text import ClassText, Instance, Rejected, Unfollowed

LARGEST_STEPS = 400_000
LARGEST_LENGTH = 100_000

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bool": bool, "int": int, "float": float, "str": str, "len": len, "list": list, "dict": dict, "set": set,
    "tuple": tuple, "max": max, "min": min, "range": range, "sum": sum, "any": any, "all": all,
    "enumerate": enumerate, "zip": zip, "sorted": sorted, "round": round,
}  # fmt: skip
TYPES: dict[str, type] = {"dict": dict, "list": list, "int": int, "str": str, "float": float, "bool": bool}
METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "pop", "setdefault", "update", "items", "keys", "values", "copy"}),
    list: frozenset({"append", "extend", "index", "count", "copy"}),
    set: frozenset({"isdisjoint", "issubset", "add"}),
    str: frozenset({"endswith", "startswith", "lower", "replace"}),
}


class _Continue(Exception):
    pass


class _Return(Exception):
    def __init__(self, value: Any):
        self.value = value


class Runner:
    """Follows methods of an `Instance`.

    Args:
        build: Makes an instance of another class of the file: name, arguments -> `Instance`, or None.
        base_method: What a method does that no class text has: instance, method name, kwargs -> value.
        source: Text for where a line of a class is.
    """

    def __init__(
        self,
        build: Callable[[str, dict[str, Any]], Instance | None],
        base_method: Callable[["Runner", Instance, str, dict[str, Any]], Any],
        source: Callable[[ClassText, int], str],
    ):
        self.build = build
        self.base_method = base_method
        self.source = source
        self.steps = 0

    def call(self, instance: Instance, name: str, arguments: dict[str, Any], above: int = 0) -> Any:
        """Call a method, looked for from position `above` of the mro on.

        Raises:
            Unfollowed: Something in it is not covered.
        """
        if name.startswith(("validate_", "_validate")):
            return None
        for position in range(above, len(instance.mro)):
            if name in instance.mro[position].methods:
                frame = _Frame(self, instance, position, instance.mro[position].methods[name], arguments)
                return frame.run()
        return self.base_method(self, instance, name, arguments)

    def check(self, instance: Instance) -> str:
        """What the class's own `validate_architecture` rejects, as its condition and its place; empty for nothing."""
        for position, owner in enumerate(instance.mro):
            method = owner.methods.get("validate_architecture")
            if method is None:
                continue
            try:
                _Frame(self, instance, position, method, {}).run()
            except Rejected as rejected:
                return str(rejected)
            except Unfollowed:
                return ""
            return ""
        return ""

    def step(self) -> None:
        self.steps += 1
        if self.steps > LARGEST_STEPS:
            raise Unfollowed("too many steps")


class _Frame:
    """One call of a method: its variables and its place."""

    def __init__(
        self,
        runner: Runner,
        instance: Instance,
        position: int,
        method: ast.FunctionDef,
        given: dict[str, Any],
    ):
        self.runner, self.instance, self.position, self.method = runner, instance, position, method
        self.variables: dict[str, Any] = {"self": instance}
        arguments = method.args
        positional = [argument.arg for argument in arguments.args if argument.arg != "self"]
        for name, default in zip(reversed(positional), reversed(arguments.defaults), strict=False):
            self.variables[name] = self.value(default)
        for name in positional:
            if name in given:
                self.variables[name] = given.pop(name)
        if arguments.kwarg:
            self.variables[arguments.kwarg.arg] = given

    def run(self) -> Any:
        try:
            self.block(self.method.body)
        except _Return as result:
            return result.value
        except Unfollowed:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise Unfollowed(f"{type(error).__name__}: {error}") from error
        return None

    def where(self, node: ast.AST) -> str:
        owner = self.instance.mro[self.position]
        return f"derived: {owner.name}.{self.method.name} ({self.runner.source(owner, getattr(node, 'lineno', 0))})"

    # --- Statements ---

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.runner.step()
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self.assign(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.assign(node.target, self.value(node.value))
        elif isinstance(node, ast.If):
            chosen = node.body if self.value(node.test) else node.orelse
            if chosen and isinstance(chosen[0], ast.Raise):
                condition = ast.unparse(node.test).replace("self.", "")
                raise Rejected(f"{condition} ({self.where(chosen[0]).removeprefix('derived: ')})")
            self.block(chosen)
        elif isinstance(node, ast.For):
            for item in self.value(node.iter):
                self.assign(node.target, item)
                try:
                    self.block(node.body)
                except _Continue:
                    continue
        elif isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):
                self.value(node.value)
        elif isinstance(node, ast.Return):
            raise _Return(self.value(node.value) if node.value else None)
        elif isinstance(node, ast.Continue):
            raise _Continue
        elif not isinstance(node, (ast.Pass, ast.Import, ast.ImportFrom)):
            raise Unfollowed(ast.unparse(node))

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
        elif isinstance(target, ast.Tuple):
            for part, item in zip(target.elts, value, strict=True):
                self.assign(part, item)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            if not isinstance(owner, Instance):
                raise Unfollowed(ast.unparse(target))
            owner.set(target.attr, value, self.where(target))
        elif isinstance(target, ast.Subscript):
            owner = self.value(target.value)
            if not isinstance(owner, (dict, list)):
                raise Unfollowed(ast.unparse(target))
            owner[self.value(target.slice)] = value
        else:
            raise Unfollowed(ast.unparse(target))

    # --- Expressions ---

    def value(self, node: ast.expr) -> Any:
        self.runner.step()
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                if node.id not in self.variables:
                    raise Unfollowed(f"{node.id} is not known")
                return self.variables[node.id]
            case ast.Attribute():
                return self.attribute(node)
            case ast.List() | ast.Tuple() | ast.Set():
                kind: Any = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
                return kind(self.value(item) for item in node.elts)
            case ast.Dict():
                return self.dictionary(node)
            case ast.BinOp():
                return self.binary(type(node.op), self.value(node.left), self.value(node.right))
            case ast.UnaryOp():
                return OPERATORS[type(node.op)](self.value(node.operand))
            case ast.BoolOp():
                return self.boolean(node)
            case ast.Compare():
                return self.compare(node)
            case ast.IfExp():
                return self.value(node.body if self.value(node.test) else node.orelse)
            case ast.NamedExpr():
                self.assign(node.target, self.value(node.value))
                return self.value(node.target)
            case ast.Subscript():
                return self.value(node.value)[self.value(node.slice)]
            case ast.Slice():
                return slice(*(part and self.value(part) for part in (node.lower, node.upper, node.step)))
            case ast.ListComp() | ast.GeneratorExp():
                return [self.value(node.elt) for _ in self.loop(node.generators)]
            case ast.SetComp():
                return {self.value(node.elt) for _ in self.loop(node.generators)}
            case ast.DictComp():
                return {self.value(node.key): self.value(node.value) for _ in self.loop(node.generators)}
            case ast.JoinedStr():
                return ""
            case ast.Call():
                return self.call(node)
        raise Unfollowed(ast.unparse(node))

    def attribute(self, node: ast.Attribute) -> Any:
        owner = self.value(node.value)
        if isinstance(owner, Instance):
            if not owner.has(node.attr) and any(node.attr in text.methods for text in owner.mro):
                return self.runner.call(owner, node.attr, {})  # a property
            return owner.get(node.attr)
        raise Unfollowed(ast.unparse(node))

    def dictionary(self, node: ast.Dict) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                items.update(self.value(value))
            else:
                items[self.value(key)] = self.value(value)
        return items

    def binary(self, kind: type[ast.operator], left: Any, right: Any) -> Any:
        lengths = [len(side) for side in (left, right) if isinstance(side, (list, str, tuple))]
        counts = [side for side in (left, right) if type(side) is int]
        if kind is ast.Mult and lengths and counts and lengths[0] * counts[0] > LARGEST_LENGTH:
            raise Unfollowed("a list that is too long")
        if isinstance(left, str) and kind is ast.Mod:
            raise Unfollowed("formatting")
        if kind is ast.Pow and not (abs(left) < 2**64 and abs(right) <= 64):
            raise Unfollowed("a power that is too large")
        if kind not in OPERATORS:
            raise Unfollowed(kind.__name__)
        return OPERATORS[kind](left, right)

    def boolean(self, node: ast.BoolOp) -> Any:
        result: Any = None
        for part in node.values:
            result = self.value(part)
            if bool(result) != isinstance(node.op, ast.And):
                return result
        return result

    def compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for kind, part in zip(node.ops, node.comparators, strict=True):
            right = self.value(part)
            if not OPERATORS[type(kind)](left, right):
                return False
            left = right
        return True

    def loop(self, generators: list[ast.comprehension]) -> Iterator[None]:
        if not generators:
            yield None
            return
        first, *rest = generators
        for item in self.value(first.iter):
            self.runner.step()
            self.assign(first.target, item)
            if all(self.value(condition) for condition in first.ifs):
                yield from self.loop(rest)

    def call(self, node: ast.Call) -> Any:
        text = ast.unparse(node.func)
        if text.startswith("logger.") or text == "warnings.warn":
            return None
        if text == "isinstance":
            return self.is_instance(node)
        arguments = [self.value(argument) for argument in node.args]
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                keywords.update(self.value(keyword.value))
            else:
                keywords[keyword.arg] = self.value(keyword.value)
        if text in ("getattr", "hasattr"):
            return self.reflect(text, arguments)
        if text == "setattr":
            arguments[0].set(arguments[1], arguments[2], self.where(node))
            return None
        if isinstance(node.func, ast.Name):
            return self.function(node.func.id, arguments, keywords)
        if not isinstance(node.func, ast.Attribute):
            raise Unfollowed(text)
        if text == "math.sqrt":
            return math.sqrt(*arguments)
        if ast.unparse(node.func.value) == "super()":
            return self.runner.call(self.instance, node.func.attr, keywords, self.position + 1)
        if text == "PreTrainedConfig.__post_init__":
            return self.runner.base_method(self.runner, self.instance, "__post_init__", keywords)
        return self.method_of(self.value(node.func.value), node, arguments, keywords)

    def function(self, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if name in FUNCTIONS:
            if name == "range" and len(range(*arguments)) > LARGEST_LENGTH:
                raise Unfollowed("a range that is too long")
            return FUNCTIONS[name](*arguments, **keywords)
        made = self.runner.build(name, keywords)
        if made is None:
            raise Unfollowed(f"{name}() is not known")
        return made

    def method_of(self, owner: Any, node: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        assert isinstance(node.func, ast.Attribute)
        name = node.func.attr
        if isinstance(owner, Instance):
            method = next((text.methods[name] for text in owner.mro if name in text.methods), None)
            if method is not None:
                names = [argument.arg for argument in method.args.args if argument.arg != "self"]
                keywords |= dict(zip(names, arguments, strict=False))
            return self.runner.call(owner, name, keywords)
        if name not in METHODS.get(type(owner), frozenset()):
            raise Unfollowed(ast.unparse(node))
        added = isinstance(owner, dict) and name == "setdefault" and arguments[0] not in owner
        if added and owner is self.variables.get("kwargs"):
            self.instance.sources.setdefault(f"kwargs.{arguments[0]}", self.where(node))
        return getattr(owner, name)(*arguments, **keywords)

    def is_instance(self, node: ast.Call) -> bool:
        value, kinds = self.value(node.args[0]), node.args[1]
        names = [ast.unparse(kind) for kind in (kinds.elts if isinstance(kinds, ast.Tuple) else [kinds])]
        if isinstance(value, Instance):
            return any(text.name in names for text in value.mro)
        return any(name in TYPES and isinstance(value, TYPES[name]) for name in names)

    def reflect(self, name: str, arguments: list[Any]) -> Any:
        owner, attribute = arguments[0], arguments[1]
        if not isinstance(owner, Instance) or not isinstance(attribute, str):
            raise Unfollowed(name)
        if name == "hasattr":
            return owner.has(attribute)
        return owner.get(attribute) if owner.has(attribute) or len(arguments) < 3 else arguments[2]
