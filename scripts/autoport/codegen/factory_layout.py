"""Reading a factory: the method that selects an implementation, its branches, and its fallback.

Two layouts are known, in `_select_implementation` or in `from_configs` itself: branches one after another with the
fallback at the end, and a last ``if`` whose ``else`` is the fallback. Implementations are imported in the branches,
or at the top of the file.
"""

import re
from collections.abc import Container, Iterator

import libcst as cst
import libcst.matchers as m
import msgspec

from autoport.codegen.render import identifier
from autoport.errors import Refusal, refuse

METHODS = ("_select_implementation", "from_configs")
GENERATED = "_variant_problems"  # the check of the variants that a generated factory has
MODEL = "Model"  # what a branch calls the implementation that it imports

RETURN = m.SimpleStatementLine([m.Return()])


class Implementation(msgspec.Struct, frozen=True):
    """What a factory falls back to: the module in the model's package, and its class."""

    module: str
    class_name: str


class Found(msgspec.Struct, frozen=True):
    """A branch of a factory that is there: the statement that has it, its place in the ``elif`` chain, its kind."""

    statement: int
    link: int
    kind: str
    node: cst.If
    test: str  # with the local variables that it reads written out


class Ending(msgspec.Struct, frozen=True):
    """The fallback of a method.

    Attributes:
        index: The statement where it begins, or the ``if`` that ends with it.
        is_chain: Whether it is an ``else``.
        tail: Its statements, its import first.
        after: Statements behind the ``if`` that ends with it, which its branches run as well.
    """

    index: int
    is_chain: bool
    tail: list[cst.BaseStatement]
    after: list[cst.BaseStatement]
    implementation: Implementation


class Selection(msgspec.Struct, frozen=True):
    """What selects an implementation.

    Attributes:
        configs: Names of the method's parameters with the Hugging Face config and the plugin's.
        entry: The same of `from_configs`.
        others: Parameters of `from_configs` besides them that have no default.
        locals: Values of the variables that the method assigns.
        found: The branches, in order.
        is_generated: Whether the factory has the check that generated ones have.
    """

    method: cst.FunctionDef
    configs: tuple[str, str]
    entry: tuple[str, str]
    others: list[str]
    locals: dict[str, cst.BaseExpression]
    found: list[Found]
    ending: Ending
    is_generated: bool


def parse(source: str, where: object) -> cst.Module:
    """The syntax tree of a factory's text.

    Raises:
        Refusal: VAR-SYNTAX.
    """
    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise refuse("VAR-SYNTAX", f"not valid Python: {error.message}", where, "correct the file") from error


def factories(module: cst.Module) -> list[str]:
    """Names of the classes that select an implementation."""
    return [
        line.name.value
        for line in module.body
        if isinstance(line, cst.ClassDef) and any(_methods(line, name) for name in METHODS)
    ]


def find_class(module: cst.Module, name: str, where: object) -> cst.ClassDef:
    found = [line for line in module.body if isinstance(line, cst.ClassDef) and line.name.value == name]
    if len(found) != 1:
        raise layout(f"{len(found)} classes {name}", where)
    return found[0]


def find_method(factory: cst.ClassDef, name: str, where: object) -> cst.FunctionDef | None:
    """The method of this name, None if there is none.

    Raises:
        Refusal: VAR-LAYOUT.
    """
    found = _methods(factory, name)
    if len(found) > 1 or (found and not isinstance(found[0].body, cst.IndentedBlock)):
        raise layout(f"{factory.name.value} has {len(found)} methods {name}", where)
    return found[0] if found else None


def read_selection(module: cst.Module, architecture: str, where: object) -> Selection:
    """The selection of a factory.

    Raises:
        Refusal: VAR-LAYOUT.
    """
    factory = find_class(module, architecture, where)
    for name in METHODS:
        method = find_method(factory, name, where)
        if method is not None and (ending := _ending(module, method)):
            break
    else:
        raise layout(
            f"{architecture} has neither {' nor '.join(METHODS)} that ends with an implementation of its own",
            where,
        )
    configs, variables = _parameters(method, where), _locals(method)
    entry = find_method(factory, "from_configs", where) or method
    return Selection(
        method,
        configs,
        _parameters(entry, where),
        _others(entry, where),
        variables,
        list(_branches(method, _imported_on_top(module), variables, configs)),
        ending,
        find_method(factory, GENERATED, where) is not None,
    )


def code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def layout(found: str, where: object) -> Refusal:
    return refuse(
        "VAR-LAYOUT",
        found,
        where,
        "add the branch by hand: an import of the implementation in an 'if' of the factory",
    )


def reads_quantization(value: cst.BaseExpression, neuron_config: str) -> bool:
    """Whether an expression is the user's ``quantization``, e.g. ``getattr(neuron_config, "quantization", None)``."""
    if isinstance(value, cst.IfExp):
        return reads_quantization(value.body, neuron_config)
    if isinstance(value, cst.BooleanOperation):
        return reads_quantization(value.right, neuron_config) or reads_quantization(value.left, neuron_config)
    text = re.sub(r"\s", "", code(value))
    name = re.escape(neuron_config)
    return bool(re.fullmatch(rf"{name}\.quantization|getattr\({name},(['\"])quantization\1(,None)?\)", text))


# --- The parts of a method ----------------------------------------------------------------------------------


def _methods(factory: cst.ClassDef, name: str) -> list[cst.FunctionDef]:
    body = factory.body.body
    return [line for line in body if isinstance(line, cst.FunctionDef) and line.name.value == name]


def _ending(module: cst.Module, method: cst.FunctionDef) -> Ending | None:
    """The fallback of a method; None where it selects nothing."""
    lines = [line for line in method.body.body if isinstance(line, cst.BaseStatement)]
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if imported := _implementation(line):
            return Ending(index, False, lines[index:], [], imported)
        if isinstance(line, cst.If) and (end := _else(line)) is not None:
            tail = [item for item in end.body.body if isinstance(item, cst.BaseStatement)]
            named = [found for item in tail if (found := _implementation(item))]
            if named:
                after = [] if m.matches(tail[-1], RETURN) else lines[index + 1 :]
                return Ending(index, True, tail, after, named[0])
    return _ending_with_name(module, lines)


def _ending_with_name(module: cst.Module, lines: list[cst.BaseStatement]) -> Ending | None:
    """The fallback of a method that returns an implementation which is imported at the top of the file."""
    call = m.Call(func=m.Name() | m.Attribute(value=m.Name()))
    if not lines or not m.matches(lines[-1], m.SimpleStatementLine([m.Return(call)])):
        return None
    called = cst.ensure_type(m.findall(lines[-1], call)[0], cst.Call).func
    bound = code(called.value if isinstance(called, cst.Attribute) else called)
    if bound not in (on_top := _imported_on_top(module)):
        return None
    statement, alias = on_top[bound]
    named = alias.with_changes(asname=cst.AsName(cst.Name(MODEL)), comma=cst.MaybeSentinel.DEFAULT)
    # The imported name would become a local one in the whole method, so the copy has its own.
    last = cst.ensure_type(m.replace(lines[-1], m.Name(bound), cst.Name(MODEL)), cst.SimpleStatementLine)
    tail: list[cst.BaseStatement] = [
        cst.SimpleStatementLine([statement.with_changes(names=[named])]),
        last.with_changes(leading_lines=[cst.EmptyLine(indent=False)]),
    ]
    found = Implementation(_module(statement), str(identifier(alias.evaluated_name)))
    return Ending(len(lines) - 1, False, tail, [], found)


def _imported_on_top(module: cst.Module) -> dict[str, tuple[cst.ImportFrom, cst.ImportAlias]]:
    """What a factory imports of its own package at the top of the file, by the name that it has there."""
    found = {}
    for line in module.body:
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(statement, cst.ImportFrom) and _module(statement):
                for alias in () if isinstance(statement.names, cst.ImportStar) else statement.names:
                    found[alias.evaluated_alias or alias.evaluated_name] = statement, alias
    return found


def _implementation(line: cst.CSTNode) -> Implementation | None:
    """The implementation that a statement imports, if it imports one."""
    if not m.matches(line, m.SimpleStatementLine([m.ImportFrom()])):
        return None
    statement = cst.ensure_type(cst.ensure_type(line, cst.SimpleStatementLine).body[0], cst.ImportFrom)
    module = _module(statement)
    if not module or isinstance(statement.names, cst.ImportStar) or len(statement.names) != 1:
        return None
    return Implementation(module, str(identifier(statement.names[0].evaluated_name)))


def _module(statement: cst.ImportFrom) -> str:
    """The module of the package that a factory's import names; empty for one of another package."""
    text = code(statement.module) if statement.module else ""
    own = len(statement.relative) == 1 and "." not in text
    of_package = not statement.relative and re.search(r"(^|\.)model\.\w+\.\w+$", text)
    last = text.rpartition(".")[2]
    return last if (own or of_package) and last.isidentifier() and last != "config" else ""


def _else(line: cst.If) -> cst.Else | None:
    node: cst.If | cst.Else | None = line
    while isinstance(node, cst.If):
        node = node.orelse
    return node


def _parameters(method: cst.FunctionDef, where: object) -> tuple[str, str]:
    parameters = method.params
    names = [
        item.name.value
        for item in (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params)
    ]
    ours = [name for name in names if name.endswith("config")]
    neuron = next((name for name in ours if "neuron" in name and "vision" not in name), None)
    hugging_face = next((name for name in ours if "neuron" not in name), None)
    if neuron is None or hugging_face is None:
        raise layout(f"{method.name.value}({', '.join(names)}) takes no hf_config and neuron_config", where)
    return hugging_face, neuron


def _others(method: cst.FunctionDef, where: object) -> list[str]:
    parameters = [*method.params.params[1:], *method.params.kwonly_params]
    names = [str(identifier(item.name.value)) for item in parameters if item.default is None]
    return [name for name in names if name not in _parameters(method, where)]


def _locals(method: cst.FunctionDef) -> dict[str, cst.BaseExpression]:
    """Names that are assigned once at the top level of a method, and their values."""
    found: dict[str, cst.BaseExpression] = {}
    for line in method.body.body:
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if m.matches(statement, m.Assign(targets=[m.AssignTarget(m.Name())])):
                assign = cst.ensure_type(statement, cst.Assign)
                found[cst.ensure_type(assign.targets[0].target, cst.Name).value] = assign.value
            elif (
                isinstance(statement, cst.AnnAssign)
                and isinstance(statement.target, cst.Name)
                and statement.value
            ):
                found[statement.target.value] = statement.value
    return found


def _branches(
    method: cst.FunctionDef,
    on_top: Container[str],
    variables: dict[str, cst.BaseExpression],
    configs: tuple[str, str],
) -> Iterator[Found]:
    for index, line in enumerate(method.body.body):
        node: cst.CSTNode | None = line
        link = 0
        while isinstance(node, cst.If):
            names = [cst.ensure_type(name, cst.Name).value for name in m.findall(node.body, m.Name())]
            if m.findall(node.body, m.ImportFrom()) or any(name in on_top for name in names):
                test = written_out(node.test, variables)
                yield Found(index, link, _kind(code(node.test), test, configs), node, test)
            node, link = node.orelse, link + 1


def written_out(test: cst.BaseExpression, variables: dict[str, cst.BaseExpression]) -> str:
    """An expression, with the values of the local variables that it reads behind it."""
    text, waiting, seen = code(test), [test], set[str]()
    while waiting:
        for name in m.findall(waiting.pop(), m.Name()):
            key = cst.ensure_type(name, cst.Name).value
            if key in variables and key not in seen:
                seen.add(key)
                text += f"; {code(variables[key])}"
                waiting.append(variables[key])
    return text


def _kind(test: str, whole: str, configs: tuple[str, str]) -> str:
    """The kind of a branch by what its test reads."""
    if re.search(r"(?<![\w.])quantization\b", test) or re.search(r"\bquantization\b", whole):
        return "user"
    if "checkpoint_format(" in whole or "quantization_config" in whole:
        return "format"
    if any(re.search(rf"\b{name}\b", test) for name in configs) or "platform" not in whole:
        return "rule"
    return "platform"
