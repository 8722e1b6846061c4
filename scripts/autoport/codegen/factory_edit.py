"""Adding a variant to a factory: an edit of its syntax tree that leaves everything else as it is."""

import ast
import re
import sys
from collections.abc import Callable

import libcst as cst
import libcst.matchers as m
import msgspec

from autoport.codegen.factory import KINDS, PLATFORM, Branch, branches
from autoport.codegen.factory_layout import (
    Found,
    Selection,
    code,
    parse,
    read_selection,
    reads_quantization,
)
from autoport.codegen.factory_validation import edit_validation
from autoport.codegen.render import format_python, render
from autoport.errors import refuse
from autoport.variants import Variant

FORMAT_READER = "checkpoint_format"
TARGET = "get_platform_target"
TARGET_IMPORT = f"from libtorch_neuronx_lite.compile.platform import {TARGET}\n"

# Formats what is added; nothing to do where the whole file is formatted afterwards.
Style = Callable[[str], str]


class Edited(msgspec.Struct, frozen=True):
    """A factory's text with a variant, and what is left to do by hand, each with its line."""

    text: str
    notes: list[str]


def add_variant(
    source: str, architecture: str, variant: Variant, where: object, format_home: str = "config"
) -> Edited:
    """Return the factory's text with the variant's branches and checks; what is there already is not repeated.

    Args:
        architecture: Name of the factory's class.
        where: The file, for messages.
        format_home: Module of the model's package that has `checkpoint_format`.

    Raises:
        Refusal: VAR-SYNTAX; VAR-LAYOUT when the factory's methods are not understood; VAR-DECLARATION when the
            factory selects another implementation for what would select this one.
    """
    module = parse(source, where)
    is_formatted = format_python(source) == source
    style = _as_it_is if is_formatted else format_python
    selection = read_selection(module, architecture, where)
    for branch in branches(variant):
        module, selection = _with_branch(module, selection, architecture, branch, variant, style, where)
    module, notes = edit_validation(module, architecture, selection, variant, style, where)
    if _calls(module, PLATFORM) and not any(
        m.matches(line, m.FunctionDef(m.Name(PLATFORM))) for line in module.body
    ):
        module = _with_platform_target(module, architecture)
    if _calls(module, TARGET) and not _imports(module, TARGET):
        module = _with_import(module, TARGET_IMPORT)
    if _calls(module, FORMAT_READER) and not _imports(module, FORMAT_READER):
        module = _with_import(module, f"from .{format_home} import {FORMAT_READER}\n")
    after = format_python(module.code) if is_formatted else module.code
    ast.parse(after)
    return Edited(after, notes(after))


# --- The selection ------------------------------------------------------------------------------------------


def _with_branch(
    module: cst.Module,
    selection: Selection,
    architecture: str,
    branch: Branch,
    variant: Variant,
    style: Style,
    where: object,
) -> tuple[cst.Module, Selection]:
    """The module with one more branch, after the others of its kind or of the kinds before it."""
    written = cst.ensure_type(cst.parse_statement(style(f"if {branch.test}:\n    pass\n")), cst.If)
    test = in_words_of(selection, written.test)
    if any(_same(item.node.test, test) and _imported(item.node) == branch.module for item in selection.found):
        return module, selection
    _check_free(selection, branch, variant, where)
    order = list(KINDS)
    before = [item for item in selection.found if order.index(item.kind) <= order.index(branch.kind)]
    is_first = branch.kind not in {item.kind for item in selection.found}
    lines = list(selection.method.body.body)
    last = before[-1] if before else None
    if last is not None and _is_chain(lines[last.statement]):
        body = _body(
            selection, branch, inside=selection.ending.is_chain and last.statement == selection.ending.index
        )
        lines[last.statement] = _after_link(lines[last.statement], last.link, test, body)
    else:
        leading = [cst.EmptyLine(indent=False)]
        if is_first:
            leading.append(cst.EmptyLine(comment=cst.Comment(f"# {KINDS[branch.kind]}")))
        added = cst.If(test, _body(selection, branch, inside=False), leading_lines=leading)
        lines.insert(_index(selection, last), added)
    changed = selection.method.with_changes(body=selection.method.body.with_changes(body=lines))
    module = cst.ensure_type(module.deep_replace(selection.method, changed), cst.Module)
    return module, read_selection(module, architecture, where)


def _index(selection: Selection, last: Found | None) -> int:
    if last is not None:
        return last.statement + 1
    return selection.found[0].statement if selection.found else selection.ending.index


def in_words_of(selection: Selection, test: cst.BaseExpression) -> cst.BaseExpression:
    """A branch's test with the names that the method has for the configs, the quantization and the platform."""
    hf_config, neuron_config = selection.configs
    names = {"quantization": f'getattr({neuron_config}, "quantization", None)'}
    platform = f"{PLATFORM if selection.is_generated else TARGET}()"
    for name, value in selection.locals.items():
        if reads_quantization(value, neuron_config):
            names["quantization"] = name
        elif code(value) == f"{TARGET}()":
            platform = name
    replaced: cst.CSTNode = _replace(test, m.Call(m.Name(PLATFORM)), cst.parse_expression(platform))
    for old, new in (names | {"hf_config": hf_config, "neuron_config": neuron_config}).items():
        if old != new:
            replaced = _replace(replaced, m.Name(old), cst.parse_expression(new))
    assert isinstance(replaced, cst.BaseExpression)
    return replaced


def _replace(node: cst.CSTNode, what: m.BaseMatcherNode, new: cst.BaseExpression) -> cst.CSTNode:
    replaced = m.replace(node, what, new)
    assert isinstance(replaced, cst.CSTNode)
    return replaced


def _body(selection: Selection, branch: Branch, inside: bool) -> cst.IndentedBlock:
    """The fallback's statements with the branch's module instead; `inside` the ``if`` that ends with it."""
    lines = [*selection.ending.tail, *([] if inside else selection.ending.after)]
    body = []
    for line in lines:
        if m.matches(line, m.SimpleStatementLine([m.ImportFrom()])):
            statement = cst.ensure_type(
                cst.ensure_type(line, cst.SimpleStatementLine).body[0], cst.ImportFrom
            )
            text = code(statement.module) if statement.module else ""
            if text.rpartition(".")[2] == selection.ending.implementation.module:
                named = cst.parse_expression(
                    text[: -len(selection.ending.implementation.module)] + branch.module
                )
                line = cst.SimpleStatementLine([statement.with_changes(module=named)])
        body.append(line)
    return cst.IndentedBlock(body)


def _is_chain(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.If) and line.orelse is not None


def _after_link(node: cst.CSTNode, link: int, test: cst.BaseExpression, body: cst.IndentedBlock) -> cst.If:
    """The chain with one more ``elif`` behind its link number `link`."""
    chain = cst.ensure_type(node, cst.If)
    if link:
        assert isinstance(chain.orelse, cst.If)
        return chain.with_changes(orelse=_after_link(chain.orelse, link - 1, test, body))
    return chain.with_changes(orelse=cst.If(test, body, orelse=chain.orelse))


def _check_free(selection: Selection, branch: Branch, variant: Variant, where: object) -> None:
    """Check that no branch of the factory's own takes what would select the variant.

    Raises:
        Refusal: VAR-DECLARATION.
    """
    asked = {"user": variant.quantization, "platform": variant.default_on}.get(branch.kind, ())
    for item in selection.found:
        if item.kind != branch.kind or (branch.kind == "platform" and " and " in item.test):
            continue
        for value in asked:
            if re.search(rf"(['\"]){re.escape(value)}\1", item.test):
                raise refuse(
                    "VAR-DECLARATION",
                    f"the factory selects {_imported(item.node) or 'another implementation'} already: "
                    f"if {code(item.node.test)}",
                    where,
                    "choose another name or platform, or take that branch out",
                )


def _imported(node: cst.If) -> str:
    """The module that a branch imports; empty for none or several."""
    found = m.findall(node.body, m.ImportFrom())
    modules = {
        code(item.module).rpartition(".")[2]
        for item in found
        if isinstance(item, cst.ImportFrom) and item.module
    }
    return modules.pop() if len(modules) == 1 else ""


def _same(one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    return ast.dump(ast.parse(f"({code(one)})")) == ast.dump(ast.parse(f"({code(other)})"))


# --- Imports ------------------------------------------------------------------------------------------------


def _imports(module: cst.Module, name: str) -> bool:
    """Whether the file imports `name`, at its top or in a method."""
    nodes = ast.walk(ast.parse(module.code))
    aliases = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return name in [alias.asname or alias.name for alias in aliases]


def _calls(module: cst.Module, name: str) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(module.code)) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == name for called in calls)


def _with_platform_target(module: cst.Module, architecture: str) -> cst.Module:
    """The module with the function `platform_target`, above the factory."""
    lines = list(module.body)
    written = cst.parse_statement(render("boilerplate/factory/platform.j2"))
    blank = [cst.EmptyLine(indent=False)] * 2
    factory = next(line for line in lines if m.matches(line, m.ClassDef(name=m.Name(architecture))))
    lines.insert(lines.index(factory), written.with_changes(leading_lines=blank))
    return module.with_changes(body=lines)


def _with_import(module: cst.Module, statement: str) -> cst.Module:
    """The module with an import at its top.

    One of the package itself comes last, another before the first that is not of Python's own library.
    """
    lines = list(module.body)
    line = m.SimpleStatementLine([m.ImportFrom() | m.Import()])
    imports = [index for index, item in enumerate(lines) if m.matches(item, line)]
    others = [] if " ." in statement else [index for index in imports if not _is_builtin(lines[index])]
    added = cst.ensure_type(cst.parse_statement(statement), cst.SimpleStatementLine)
    if others:
        below = cst.ensure_type(lines[others[0]], cst.SimpleStatementLine)
        lines[others[0]] = below.with_changes(leading_lines=[])
        lines.insert(others[0], added.with_changes(leading_lines=below.leading_lines))
    else:
        docstring = 1 if module.get_docstring() is not None else 0
        lines.insert(imports[-1] + 1 if imports else docstring, added)
    return module.with_changes(body=lines)


def _is_builtin(line: cst.CSTNode) -> bool:
    [module] = ast.parse(code(line).strip()).body
    names = [module.module or ""] if isinstance(module, ast.ImportFrom) and not module.level else []
    names += [alias.name for alias in module.names] if isinstance(module, ast.Import) else []
    return bool(names) and all(name.split(".")[0] in sys.stdlib_module_names for name in names)


def _as_it_is(text: str) -> str:
    return text
