"""Adding a variant to a factory: an edit of its syntax tree that leaves everything else as it is."""

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m
import msgspec

from autoport.codegen.factory import KINDS, Branch, branches, format_rows, platform_rows, requirement_rows
from autoport.codegen.render import format_python, identifier, py, render
from autoport.errors import Refusal, refuse
from autoport.variants import Variant

SELECTION = "_select_implementation"
VALIDATION = "_variant_problems"

# Formats what is added; nothing to do where the whole file is formatted afterwards.
Style = Callable[[str], str]


class Implementation(msgspec.Struct, frozen=True):
    """What a factory falls back to: the module in the model's package, and its class."""

    module: str
    class_name: str


def fallback(source: str, architecture: str, where: object) -> Implementation:
    """Read the factory's fallback.

    Raises:
        Refusal: VAR-SYNTAX, VAR-LAYOUT.
    """
    factory = _class(_parse(source, where), architecture, where)
    imported = _fallback_import(_method(factory, SELECTION, where), where)
    module = cst.Module([]).code_for_node(imported.module) if imported.module else ""
    [alias] = imported.names if isinstance(imported.names, Sequence) else [None]
    if alias is None or not module:
        raise _layout(f"the fallback of {SELECTION} imports no single class", where)
    return Implementation(str(identifier(module)), str(identifier(alias.evaluated_name)))


def add_variant(source: str, architecture: str, variant: Variant, where: object) -> str:
    """Return the factory's text with the variant's branches and checks; what is there already is not repeated.

    Args:
        architecture: Name of the factory's class.
        where: The file, for messages.

    Raises:
        Refusal: VAR-SYNTAX; VAR-LAYOUT when the factory's methods are not understood.
    """
    module = _parse(source, where)
    is_formatted = format_python(source) == source
    style = _as_it_is if is_formatted else format_python
    factory = _class(module, architecture, where)
    base = fallback(source, architecture, where)
    selection, validation = _method(factory, SELECTION, where), _method(factory, VALIDATION, where)
    changed = selection
    for branch in branches(variant):
        changed = _with_branch(changed, branch, base.class_name, style, where)
    checked = _with_rows(validation, "platforms", platform_rows([variant]), style, where)
    checked = _with_rows(checked, "formats", format_rows([variant]), style, where)
    for broken, words in requirement_rows(variant):
        checked = _with_requirement(checked, broken, words, style, where)
    methods = [
        {id(selection): changed, id(validation): checked}.get(id(line), line) for line in factory.body.body
    ]
    edited = factory.with_changes(body=factory.body.with_changes(body=methods))
    after = module.with_changes(body=[edited if line is factory else line for line in module.body]).code
    if is_formatted:
        after = format_python(after)
    ast.parse(after)
    return after


# --- Reading ------------------------------------------------------------------------------------------------


def _parse(source: str, where: object) -> cst.Module:
    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise refuse("VAR-SYNTAX", f"not valid Python: {error.message}", where, "correct the file") from error


def _class(module: cst.Module, name: str, where: object) -> cst.ClassDef:
    found = [line for line in module.body if isinstance(line, cst.ClassDef) and line.name.value == name]
    if len(found) != 1:
        raise _layout(f"{len(found)} classes {name}", where)
    return found[0]


def _method(factory: cst.ClassDef, name: str, where: object) -> cst.FunctionDef:
    found = [
        line for line in factory.body.body if isinstance(line, cst.FunctionDef) and line.name.value == name
    ]
    if len(found) != 1 or not isinstance(found[0].body, cst.IndentedBlock):
        raise _layout(f"{factory.name.value} has {len(found)} methods {name}", where)
    return found[0]


def _fallback_index(method: cst.FunctionDef, where: object) -> int:
    lines = method.body.body
    imports = [i for i, line in enumerate(lines) if m.matches(line, m.SimpleStatementLine([m.ImportFrom()]))]
    if not imports:
        raise _layout(f"{method.name.value} does not end with the import of the fallback", where)
    return imports[-1]


def _fallback_import(method: cst.FunctionDef, where: object) -> cst.ImportFrom:
    line = cst.ensure_type(method.body.body[_fallback_index(method, where)], cst.SimpleStatementLine)
    return cst.ensure_type(line.body[0], cst.ImportFrom)


def _kind(line: cst.CSTNode) -> str | None:
    """The kind of a branch by what its test reads; None for any other statement."""
    if not isinstance(line, cst.If):
        return None
    test = cst.Module([]).code_for_node(line.test)
    if re.search(r"(?<![\w.])quantization\b", test):
        return "user"
    if "checkpoint_format(" in test:
        return "format"
    return "rule" if "_config" in test else "platform"


def _code(node: cst.CSTNode) -> str:
    return ast.dump(ast.parse(cst.Module([]).code_for_node(node).strip()))


# --- Changing -----------------------------------------------------------------------------------------------


def _with_branch(
    method: cst.FunctionDef, branch: Branch, class_name: str, style: Style, where: object
) -> cst.FunctionDef:
    """The method with one more ``if``, after the others of its kind, or of the kinds before it."""
    text = render("boilerplate/factory/branch.j2", branch=branch, class_name=class_name)
    added = cst.ensure_type(cst.parse_statement(style(_dedent(text))), cst.If)
    lines = list(method.body.body)
    if any(isinstance(line, cst.If) and _code(line) == _code(added) for line in lines):
        return method
    order = list(KINDS)
    kinds = [_kind(line) for line in lines]
    before = [i for i, kind in enumerate(kinds) if kind and order.index(kind) <= order.index(branch.kind)]
    index = before[-1] + 1 if before else _fallback_index(method, where)
    leading = [cst.EmptyLine(indent=False)]
    if branch.kind not in kinds:
        leading.append(cst.EmptyLine(comment=cst.Comment(f"# {KINDS[branch.kind]}")))
    lines.insert(index, added.with_changes(leading_lines=leading))
    return method.with_changes(body=method.body.with_changes(body=lines))


def _with_rows(
    method: cst.FunctionDef, name: str, rows: Sequence[tuple[str, Any]], style: Style, where: object
) -> cst.FunctionDef:
    """The method with more entries in the dict that is assigned to `name`."""
    target = m.Name(name)
    found = m.findall(
        method,
        m.Assign(targets=[m.AssignTarget(target=target)], value=m.Dict())
        | m.AnnAssign(target=target, value=m.Dict()),
    )
    if len(found) != 1:
        raise _layout(f"{method.name.value} has {len(found)} dicts {name}", where)
    assignment = found[0]
    assert isinstance(assignment, (cst.Assign, cst.AnnAssign))
    old = cst.ensure_type(assignment.value, cst.Dict)
    keys = {_code(item.key) for item in old.elements if isinstance(item, cst.DictElement)}
    new = [
        cst.DictElement(_literal(key, style), _literal(value, style))
        for key, value in rows
        if _code(_literal(key, _as_it_is)) not in keys
    ]
    if not new:
        return method
    elements = [*old.elements, *new]
    space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = old.elements[-1].comma if old.elements else cst.MaybeSentinel.DEFAULT
    if isinstance(last, cst.Comma):  # one entry per line: the separator is that of the entries before
        between = (
            old.elements[-2].comma
            if len(old.elements) > 1
            else cst.Comma(whitespace_after=old.lbrace.whitespace_after)
        )
        separated = [item.with_changes(comma=between) for item in elements[:-1]]
        elements = [*separated, elements[-1].with_changes(comma=last)]
    else:
        elements = [*(item.with_changes(comma=space) for item in elements[:-1]), elements[-1]]
    return cst.ensure_type(method.deep_replace(old, old.with_changes(elements=elements)), cst.FunctionDef)


def _with_requirement(
    method: cst.FunctionDef, broken: str, words: str, style: Style, where: object
) -> cst.FunctionDef:
    """The method with one more check before ``return problems``."""
    added = cst.parse_statement(style(f"if {broken}:\n    problems.append({py(words)})\n"))
    lines = list(method.body.body)
    if any(isinstance(line, cst.If) and _code(line) == _code(added) for line in lines):
        return method
    if not m.matches(lines[-1], m.SimpleStatementLine([m.Return(m.Name("problems"))])):
        raise _layout(f"{method.name.value} does not end with 'return problems'", where)
    return method.with_changes(body=method.body.with_changes(body=[*lines[:-1], added, lines[-1]]))


def _literal(value: Any, style: Style) -> cst.BaseExpression:
    return cst.parse_expression(style(py(value)).strip())


def _as_it_is(text: str) -> str:
    return text


def _dedent(text: str) -> str:
    return re.sub(r"^ {8}", "", text, flags=re.M)


def _layout(found: str, where: object) -> Refusal:
    return refuse(
        "VAR-LAYOUT",
        found,
        where,
        "add the branch by hand: an import of the implementation in an 'if' of the factory",
    )
