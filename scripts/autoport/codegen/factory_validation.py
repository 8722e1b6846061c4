"""Adding a variant to what a factory accepts: in the dicts of a generated one, or in a check that a person wrote."""

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from autoport.codegen.factory import as_code, format_rows, platform_rows, requirement_rows
from autoport.codegen.factory_layout import (
    GENERATED,
    Selection,
    code,
    find_class,
    find_method,
    layout,
    reads_quantization,
)
from autoport.codegen.render import LINE_LENGTH, py
from autoport.variants import Variant

BY_HAND = "_validate_config"
# Characters of a dict in one line: the indentation and the annotated name stand before it.
LONGEST_DICT = LINE_LENGTH - 48
NEW_LINE = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace("    "))

Style = Callable[[str], str]
Notes = Callable[[str], list[str]]  # from the file's text after the edit
Container = cst.Set | cst.Tuple | cst.List


def edit_validation(
    module: cst.Module, architecture: str, selection: Selection, variant: Variant, style: Style, where: object
) -> tuple[cst.Module, Notes]:
    """The module whose factory accepts the variant, and what a person has to add.

    Raises:
        Refusal: VAR-LAYOUT when a generated check was changed beyond recognition.
    """
    factory = find_class(module, architecture, where)
    method = find_method(factory, GENERATED, where)
    if method is not None:
        changed = _with_rows(method, "formats", format_rows([variant]), style, where)
        known = _assigned(changed.body.body).get("quantizations")
        if not isinstance(known, Container):
            raise layout(f"{GENERATED} has no list quantizations", where)
        if new := [key for key in variant.quantization if not _has(known, key)]:
            changed = cst.ensure_type(changed.deep_replace(known, _with_strings(known, new)), cst.FunctionDef)
        for broken, words in (*platform_rows(variant), *requirement_rows(variant)):
            changed = _with_requirement(changed, broken, words, style, where)
        return cst.ensure_type(module.deep_replace(method, changed), cst.Module), lambda after: []
    return _by_hand(module, factory, selection, variant, where)


# --- A generated factory ------------------------------------------------------------------------------------


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
        raise layout(f"{method.name.value} has {len(found)} dicts {name}", where)
    assignment = found[0]
    assert isinstance(assignment, (cst.Assign, cst.AnnAssign))
    old = cst.ensure_type(assignment.value, cst.Dict)
    keys = {_dump(item.key) for item in old.elements if isinstance(item, cst.DictElement)}
    new = [
        cst.DictElement(_literal(key, style), _literal(value, style))
        for key, value in rows
        if _dump(_literal(key, str)) not in keys
    ]
    if not new:
        return method
    return cst.ensure_type(method.deep_replace(old, _with_entries(old, new)), cst.FunctionDef)


def _with_entries(old: cst.Dict, new: Sequence[cst.DictElement]) -> cst.Dict:
    """The dict with more entries: in one line, or one a line where the old ones are so or the line is too long."""
    closing = old.rbrace.whitespace_before
    if old.elements and isinstance(closing, cst.ParenthesizedWhitespace):
        return _with_lines(old, closing, new)
    elements: list[cst.BaseDictElement] = [*old.elements, *new]
    *others, last = elements
    space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    changed = old.with_changes(elements=[*(item.with_changes(comma=space) for item in others), last])
    if len(code(changed)) <= LONGEST_DICT:
        return changed
    line = cst.Comma(whitespace_after=NEW_LINE)
    return old.with_changes(
        lbrace=cst.LeftCurlyBrace(NEW_LINE),
        elements=[*(item.with_changes(comma=line) for item in others), last.with_changes(comma=cst.Comma())],
        rbrace=cst.RightCurlyBrace(cst.ParenthesizedWhitespace(indent=True)),
    )


def _with_lines(
    old: cst.Dict, closing: cst.ParenthesizedWhitespace, new: Sequence[cst.DictElement]
) -> cst.Dict:
    """A dict of several lines with more of them; a comment behind the last one stays there."""
    opening = old.lbrace.whitespace_after
    line = (
        NEW_LINE.with_changes(last_line=opening.last_line)
        if isinstance(opening, cst.ParenthesizedWhitespace)
        else NEW_LINE
    )
    between = cst.Comma(whitespace_after=line)
    *others, last = old.elements
    behind = cst.Comma(whitespace_after=closing.with_changes(indent=True, last_line=line.last_line))
    added = [*(item.with_changes(comma=between) for item in new[:-1]), new[-1].with_changes(comma=last.comma)]
    return old.with_changes(
        elements=[*others, last.with_changes(comma=behind), *added],
        rbrace=cst.RightCurlyBrace(
            cst.ParenthesizedWhitespace(indent=closing.indent, last_line=closing.last_line)
        ),
    )


def _with_requirement(
    method: cst.FunctionDef, broken: str, words: str, style: Style, where: object
) -> cst.FunctionDef:
    """The method with one more check before ``return problems``."""
    added = cst.parse_statement(style(f"if {broken}:\n    problems.append({words})\n"))
    lines = list(method.body.body)
    if any(isinstance(line, cst.If) and _dump(line) == _dump(added) for line in lines):
        return method
    if not m.matches(lines[-1], m.SimpleStatementLine([m.Return(m.Name("problems"))])):
        raise layout(f"{method.name.value} does not end with 'return problems'", where)
    return method.with_changes(body=method.body.with_changes(body=[*lines[:-1], added, lines[-1]]))


def _literal(value: Any, style: Style) -> cst.BaseExpression:
    return cst.parse_expression(style(py(value)).strip())


def _dump(node: cst.CSTNode) -> str:
    return ast.dump(ast.parse(code(node).strip()))


# --- A factory that a person wrote --------------------------------------------------------------------------


def _by_hand(
    module: cst.Module, factory: cst.ClassDef, selection: Selection, variant: Variant, where: object
) -> tuple[cst.Module, Notes]:
    """The module with the variant's names in the lists of quantizations that the factory checks."""
    method = find_method(factory, BY_HAND, where)
    checked = method or selection.method
    lists = [
        values
        for node in m.findall(checked, m.Comparison(comparisons=[m.ComparisonTarget()]))
        if (
            values := _quantizations(
                module, factory, checked, cst.ensure_type(node, cst.Comparison), selection
            )
        )
    ]
    new = {values: [key for key in variant.quantization if not _has(values, key)] for values in lists}
    replaced = module.visit(
        _Replacement({old: _with_strings(old, keys) for old, keys in new.items() if keys})
    )

    def notes(after: str) -> list[str]:
        return _notes(after, factory.name.value, BY_HAND if method else "", variant, bool(lists), where)

    return replaced, notes


class _Replacement(cst.CSTTransformer):
    def __init__(self, nodes: dict[Container, Container]):
        super().__init__()
        self.nodes = nodes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        return self.nodes.get(original_node, updated_node)


def _quantizations(
    module: cst.Module,
    factory: cst.ClassDef,
    method: cst.FunctionDef,
    comparison: cst.Comparison,
    selection: Selection,
) -> Container | None:
    """The list of strings with which a comparison looks for the user's quantization."""
    [target] = comparison.comparisons
    if not isinstance(target.operator, (cst.In, cst.NotIn)):
        return None
    variables = _assigned(method.body.body)
    left = comparison.left
    if isinstance(left, cst.Name):
        left = variables.get(left.value, left)
    if not reads_quantization(left, selection.configs[1]):
        return None
    values = target.comparator
    names = {"": _assigned(module.body) | variables, "cls.": _assigned(factory.body.body)}
    names[f"{factory.name.value}."] = names["self."] = names["cls."]
    for prefix, assigned in names.items():
        name = code(values)
        if name.startswith(prefix) and name[len(prefix) :] in assigned:
            values = assigned[name[len(prefix) :]]
            break
    if isinstance(values, cst.Call) and code(values.func) in ("frozenset", "set", "tuple") and values.args:
        values = values.args[0].value
    if not isinstance(values, (cst.Set, cst.Tuple, cst.List)):
        return None
    strings = [m.matches(item.value, m.SimpleString() | m.Name("None")) for item in values.elements]
    return values if strings and all(strings) else None


def _assigned(lines: Sequence[cst.CSTNode]) -> dict[str, cst.BaseExpression]:
    found: dict[str, cst.BaseExpression] = {}
    for line in lines:
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(statement, cst.Assign) and isinstance(statement.targets[0].target, cst.Name):
                found[statement.targets[0].target.value] = statement.value
            elif isinstance(statement, cst.AnnAssign) and statement.value is not None:
                found[code(statement.target)] = statement.value
    return found


def _has(values: Container, key: str) -> bool:
    return any(
        isinstance(item.value, cst.SimpleString) and item.value.evaluated_value == key
        for item in values.elements
    )


def _with_strings(values: Container, keys: Sequence[str]) -> Container:
    """The list with more strings, quoted and separated as those that are there."""
    strings = [item.value for item in values.elements if isinstance(item.value, cst.SimpleString)]
    quote = strings[0].quote if strings else '"'
    elements = list(values.elements)
    last = elements[-1]
    commas = [item.comma for item in elements[:-1] if isinstance(item.comma, cst.Comma)]
    between = commas[-1] if commas else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    new = [cst.Element(cst.SimpleString(f"{quote}{key}{quote}"), comma=between) for key in keys]
    ends_with_comma = isinstance(last.comma, cst.Comma) and len(elements) > 1
    end = last.comma if ends_with_comma else cst.MaybeSentinel.DEFAULT
    return values.with_changes(
        elements=[
            *elements[:-1],
            last.with_changes(comma=between),
            *new[:-1],
            new[-1].with_changes(comma=end),
        ]
    )


def _notes(
    after: str, factory: str, name: str, variant: Variant, is_extended: bool, where: object
) -> list[str]:
    """What the checks of a factory's own do not say of the variant, with the line of each."""
    body = ast.parse(after).body
    [cls] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == factory]
    methods = [
        node for node in cls.body if isinstance(node, ast.FunctionDef) and (not name or node.name == name)
    ]
    notes = []
    for node in ast.walk(ast.Module(list[ast.stmt](methods), [])) if variant.quantization else ():
        if not isinstance(node, ast.If):
            continue
        test = ast.unparse(node.test)
        if "quant" not in test or not any(isinstance(item, ast.Raise) for item in ast.walk(node)):
            continue
        said = (
            f"{variant.name} is accepted; see that the message names it"
            if is_extended and re.search(r"\bin\b", test) and "==" not in test
            else f"left as it is; see that it lets {variant.name} pass"
        )
        notes.append(f"{where}:{node.lineno}: {said}: if {test}")
    for node in ast.walk(ast.Module(list[ast.stmt](methods), [])) if name and variant.formats else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "quant" in ast.unparse(node):
            notes.append(
                f"{where}:{node.lineno}: left as it is; see that it lets a checkpoint of {variant.name} pass: "
                f"{ast.unparse(node)}"
            )
    place = f"{where}:{methods[0].lineno if name else cls.lineno}"
    ways = [f"quantization in {py(variant.quantization)}"] if variant.quantization else []
    ways += [f"checkpoint_format(hf_config) in {py(variant.formats)}"] if variant.formats else []
    asked = f"({' or '.join(ways)})" if len(ways) > 1 else "".join(ways) or "it is selected"
    if variant.platforms:
        notes.append(
            f"{place}: nothing checks where {variant.name} runs; raise when {asked} and "
            f"get_platform_target() not in {py(variant.platforms)}"
        )
    notes += [
        f"{place}: nothing checks what {variant.name} requires; raise when {asked} and not ({as_code(condition)})"
        for condition in variant.require
    ]
    return notes
