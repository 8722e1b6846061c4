"""Which parameters a port has, read from the constructors of its modules."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from autoport.review.names import origins
from autoport.review.source import Class, Function, PortSource
from autoport.review.syntax import (
    CONTAINERS,
    argument,
    assignments,
    calls,
    dotted,
    keyword,
    last_name,
    self_attribute,
    walk,
)

# Parameters of modules that a port takes from the plugin or from torch. The bias is there unless bias=False.
SHARED_MODULES: dict[str, tuple[str, ...]] = {
    "ColumnParallelLinear": ("weight", "bias"),
    "RowParallelLinear": ("weight", "bias"),
    "VocabDimShardedEmbedding": ("weight",),
    "EmbedDimShardedEmbedding": ("weight",),
    "Linear": ("weight", "bias"),
    "Embedding": ("weight",),
    "LayerNorm": ("weight", "bias"),
    "RMSNorm": ("weight",),
}


class Parameter(NamedTuple):
    """A parameter of the model.

    Attributes:
        name: Pattern of its full name, ``model.layers.{}.mlp.gate_proj_weight``.
        attribute: The attribute it is assigned to, ``gate_proj_weight`` (``lm_head`` for ``lm_head.weight``).
        value: The expression assigned.
    """

    name: str
    attribute: str
    function: Function
    value: ast.expr

    @property
    def at(self) -> str:
        return self.function.file.at(self.value)


def model_parameters(source: PortSource, head: Class) -> tuple[list[Parameter], list[str]]:
    """Every parameter below `head`, and the names of submodules whose class is not known."""
    unknown: list[str] = []
    found = list(_parameters(source, head, "", unknown, ()))
    return list({parameter.name: parameter for parameter in found}.values()), unknown


def _parameters(
    source: PortSource, cls: Class, prefix: str, unknown: list[str], path: tuple[ast.ClassDef, ...]
) -> Iterator[Parameter]:
    if cls.node in path:
        return
    path = (*path, cls.node)
    for function in source.methods(cls):
        for attribute, value in _assigned(function):
            for branch in _branches(value):
                yield from _from_value(source, function, prefix + attribute, attribute, branch, unknown, path)


def _assigned(function: Function) -> Iterator[tuple[str, ast.expr]]:
    for target, value in assignments(function.node):
        if attribute := self_attribute(target):
            yield attribute, value
    for call in calls(function.node):
        if dotted(call.func) == "self.register_parameter":
            name, parameter = argument(call, "name", 0), argument(call, "param", 1)
            if isinstance(name, ast.Constant) and parameter is not None:
                yield str(name.value), parameter


def _branches(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.IfExp):
        return _branches(value.body) + _branches(value.orelse)
    return [value]


def _from_value(
    source: PortSource,
    function: Function,
    name: str,
    attribute: str,
    value: ast.expr,
    unknown: list[str],
    path: tuple[ast.ClassDef, ...],
) -> Iterator[Parameter]:
    if not isinstance(value, ast.Call):
        return
    kind = last_name(value.func)
    if kind in CONTAINERS:
        assert function.owner is not None, "a value of an attribute is assigned in a method"
        for type_name, local in source.attribute_types(function.owner, attribute):
            if local:
                yield from _parameters(source, local, f"{name}.{{}}.", unknown, path)
            elif type_name.rpartition(".")[2] in SHARED_MODULES:
                for leaf in SHARED_MODULES[type_name.rpartition(".")[2]][:1]:
                    yield Parameter(f"{name}.{{}}.{leaf}", attribute, function, value)
        return
    local = source.find_class(function.file, kind) if isinstance(value.func, ast.Name) else None
    if local:
        yield from _parameters(source, local, f"{name}.", unknown, path)
    elif kind == "Parameter" or makes_parameter(source, function, value):
        yield Parameter(name, attribute, function, value)
    elif kind in SHARED_MODULES:
        bias = keyword(value, "bias")
        without_bias = isinstance(bias, ast.Constant) and bias.value is False
        for leaf in SHARED_MODULES[kind]:
            if leaf != "bias" or not without_bias:
                yield Parameter(f"{name}.{leaf}", attribute, function, value)
    elif isinstance(value.func, ast.Name) and kind.endswith(("_cls", "_class")):
        unknown.append(name)


def makes_parameter(source: PortSource, function: Function, call: ast.Call) -> bool:
    """Whether a call runs a function of this port that returns an `nn.Parameter`."""
    return any(
        isinstance(origin, ast.Call) and last_name(origin.func) == "Parameter"
        for called in source.resolve(function, call.func)
        for node in walk(called.node)
        if isinstance(node, ast.Return) and node.value is not None
        for origin in origins(called, node.value)
    )


def declaration(source: PortSource, cls: Class, attribute: str) -> Parameter | None:
    """The parameter that ``self.<attribute>`` is, when a constructor declares one."""
    for function, value in source.assignments(cls, attribute):
        for branch in _branches(value):
            if isinstance(branch, ast.Call) and (
                last_name(branch.func) == "Parameter" or makes_parameter(source, function, branch)
            ):
                return Parameter(attribute, attribute, function, branch)
    return None


def tensor_call(parameter: Parameter) -> ast.Call | None:
    """The call that makes a parameter's tensor, as in ``nn.Parameter(torch.empty(...))``."""
    inner = [call for call in calls(parameter.value) if dotted(call.func).startswith("torch.")]
    return inner[0] if inner else None


def rank_of(parameter: Parameter) -> int | None:
    """Number of dimensions that a parameter is declared with."""
    call = tensor_call(parameter)
    if call is None or last_name(call.func) not in ("empty", "zeros", "ones", "randn"):
        return None
    sizes = keyword(call, "size")
    positional = [sizes] if sizes is not None else call.args
    if len(positional) == 1 and isinstance(positional[0], (ast.Tuple, ast.List)):
        positional = positional[0].elts
    if any(isinstance(item, ast.Starred) for item in positional):
        return None
    return len(positional) or None


def loader_of(source: PortSource, cls: Class, attribute: str) -> tuple[Function, ast.expr] | None:
    """The weight loader set on ``self.<attribute>``, as the expression given to `set_weight_loader`."""
    for function in source.methods(cls):
        for node in walk(function.node):
            if isinstance(node, ast.Call) and last_name(node.func) == "set_weight_loader":
                target, loader = argument(node, "param", 0), argument(node, "loader", 1)
                if target is not None and loader is not None and self_attribute(target) == attribute:
                    return function, loader
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if (
                        isinstance(target, ast.Attribute)
                        and target.attr == "weight_loader"
                        and self_attribute(target.value) == attribute
                    ):
                        return function, node.value
    return None
