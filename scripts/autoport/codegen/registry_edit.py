"""Editing `registry.py`: a row and its import, with everything else in the file left as it is."""

import ast
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m
import msgspec

from autoport.errors import Refusal, refuse
from autoport.registry import REGISTRY, FoundRow, imports_of, parse_registry, rows_of

PENDING = "_class_of_the_replaced_row"


class Row(msgspec.Struct, frozen=True):
    """A row to add.

    Attributes:
        architecture: The exact string of `architectures`, or another spelling of it.
        module: Package below ``model`` that exports the class, e.g. ``"yi"``.
        alias: Name for the class in this file in case its own is taken.
        exported: The class's name, if it is not the architecture's.
    """

    architecture: str
    module: str
    alias: str
    exported: str = ""

    @property
    def class_name(self) -> str:
        return self.exported or self.architecture

    @property
    def origin(self) -> str:
        return f".{self.module}:{self.class_name}"


def add_row(source: str, row: Row, replace: bool = False) -> str:
    """Return `source` with `row` in `get_models()`; equal to `source` when it is there already.

    Args:
        replace: Replace a row of the same architecture that comes from another package.

    Raises:
        Refusal: REG-SYNTAX; REG-LAYOUT when `get_models()` is not understood; REG-CONFLICT when another
            package has the architecture; REG-DUPLICATE when several rows have it.
    """
    module, imports = parse_registry(source)
    rows = rows_of(module, imports)
    same = [found for found in rows if found.architecture == row.architecture]
    if len(same) > 1:
        raise refuse(
            "REG-DUPLICATE",
            f"{len(same)} rows for {row.architecture!r}",
            REGISTRY,
            "keep one of them and run again",
        )
    if same and same[0].origin == row.origin:
        return source
    if same and not replace:
        raise refuse(
            "REG-CONFLICT",
            f"{row.architecture!r} is registered from {same[0].origin}: the plugin serves it without a port",
            REGISTRY,
            "use that model; to go on all the same, 'autoport port' takes --no-register (the row stays), and "
            "--replace-row takes its place",
        )
    if same:
        module = _replace_class(module, same[0].node, PENDING)
        module = _drop_unused_import(module, same[0])
        imports = imports_of(module)
    name = _local_name(module, imports, row)
    if same:
        module = cst.ensure_type(m.replace(module, m.Name(PENDING), cst.Name(name)), cst.Module)
    else:
        module = _append_row(module, row.architecture, name, _quote(rows))
    if name not in imports:
        module = _add_import(module, row, name)
    _verify(source, module.code, row)
    return module.code


def drop_unused_imports(source: str, package: str) -> str:
    """The text without the imports from package `package` whose names nothing uses; comments above them stay."""
    module, imports = parse_registry(source)
    for name, origin in imports.items():
        if origin.startswith(f".{package}:"):
            module = _drop_unused(module, name)
    return module.code


def _quote(rows: list[FoundRow]) -> str:
    strings = [cst.ensure_type(row.node.elements[0].value, cst.SimpleString).quote for row in rows]
    return strings[0] if strings and strings[0] in ("'", '"') else '"'


def _local_name(module: cst.Module, imports: dict[str, str], row: Row) -> str:
    """The name of the row's class here: as imported already, the architecture's, or an alias if taken."""
    for name, origin in imports.items():
        if origin == row.origin:
            return name
    taken = {cst.ensure_type(name, cst.Name).value for name in m.findall(module, m.Name())}
    name, number = row.class_name, 1
    while name in taken:
        name = row.alias if number == 1 else f"{row.alias}{number}"
        number += 1
    return name


# --- Changing -----------------------------------------------------------------------------------------------


def _replace_class(module: cst.Module, row: cst.Tuple, name: str) -> cst.Module:
    architecture, value = row.elements
    changed = row.with_changes(elements=[architecture, value.with_changes(value=cst.Name(name))])
    return cst.ensure_type(module.deep_replace(row, changed), cst.Module)


def _append_row(module: cst.Module, architecture: str, name: str, quote: str) -> cst.Module:
    row = cst.Tuple(
        [cst.Element(cst.SimpleString(f"{quote}{architecture}{quote}")), cst.Element(cst.Name(name))]
    )
    function = _get_models(module)
    rows = _list_of(module, function)
    body = cst.ensure_type(function.body, cst.IndentedBlock)
    returned = cst.ensure_type(m.findall(function, m.Return())[0], cst.Return).value
    name_of_list = returned.value if isinstance(returned, cst.Name) else ""
    additions = [line for line in body.body if _adds_to(line, name_of_list)]
    if rows.elements or not additions:
        return cst.ensure_type(module.deep_replace(rows, _extended(rows, row)), cst.Module)
    last = cst.ensure_type(additions[-1], cst.SimpleStatementLine)
    lists = m.findall(last, m.List())
    if lists:
        rows = cst.ensure_type(lists[0], cst.List)
        return cst.ensure_type(module.deep_replace(rows, _extended(rows, row)), cst.Module)
    return _append_after(module, body, last, row)


def _adds_to(line: cst.CSTNode, name: str) -> bool:
    """Whether a statement is ``name.append((...))``, ``name.extend([...])`` or ``name += [...]``."""

    def call(method: str, argument: m.BaseMatcherNode) -> m.Expr:
        attribute = m.Attribute(value=m.Name(name), attr=m.Name(method))
        return m.Expr(m.Call(func=attribute, args=[m.Arg(argument)]))  # type: ignore[arg-type]

    added = m.AugAssign(target=m.Name(name), operator=m.AddAssign(), value=m.List())
    return bool(name) and m.matches(
        line, m.SimpleStatementLine([call("append", m.Tuple()) | call("extend", m.List()) | added])
    )


def _append_after(
    module: cst.Module, body: cst.IndentedBlock, line: cst.SimpleStatementLine, row: cst.Tuple
) -> cst.Module:
    """The block with one more ``models.append(...)`` after `line`."""
    call = cst.ensure_type(cst.ensure_type(line.body[0], cst.Expr).value, cst.Call)
    added = cst.SimpleStatementLine([cst.Expr(cst.Call(func=call.func, args=[cst.Arg(row)]))])
    index = next(i for i, old in enumerate(body.body) if old is line)
    lines = [*body.body[: index + 1], added, *body.body[index + 1 :]]
    return cst.ensure_type(module.deep_replace(body, body.with_changes(body=lines)), cst.Module)


def _extended(rows: cst.List, row: cst.Tuple) -> cst.List:
    """The list with one more element, on a line of its own unless the list is on one line."""
    closing = rows.rbracket.whitespace_before
    if not rows.elements:
        indented = cst.SimpleWhitespace("    ")
        inside = (rows.lbracket.whitespace_after, closing)
        comments = next(
            (space for space in inside if isinstance(space, cst.ParenthesizedWhitespace)),
            cst.ParenthesizedWhitespace(),
        )
        return rows.with_changes(
            elements=[cst.Element(row, cst.Comma())],
            lbracket=cst.LeftSquareBracket(comments.with_changes(indent=True, last_line=indented)),
            rbracket=cst.RightSquareBracket(cst.ParenthesizedWhitespace(indent=True)),
        )
    if not isinstance(closing, cst.ParenthesizedWhitespace):
        separator = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        elements = [*rows.elements[:-1], rows.elements[-1].with_changes(comma=separator), cst.Element(row)]
        return rows.with_changes(elements=elements)
    opening = rows.lbracket.whitespace_after
    column = (
        opening.last_line
        if isinstance(opening, cst.ParenthesizedWhitespace)
        else cst.SimpleWhitespace("    ")
    )
    separator = cst.Comma(whitespace_after=closing.with_changes(last_line=column))
    last = rows.elements[-1].with_changes(comma=separator)
    return rows.with_changes(
        elements=[*rows.elements[:-1], last, cst.Element(row, cst.Comma())],
        rbracket=cst.RightSquareBracket(
            cst.ParenthesizedWhitespace(indent=closing.indent, last_line=closing.last_line)
        ),
    )


def _get_models(module: cst.Module) -> cst.FunctionDef:
    functions = [line for line in module.body if m.matches(line, m.FunctionDef(name=m.Name("get_models")))]
    if len(functions) != 1 or not isinstance(
        cst.ensure_type(functions[0], cst.FunctionDef).body, cst.IndentedBlock
    ):
        raise _layout(f"{len(functions)} functions get_models() at the top level")
    return cst.ensure_type(functions[0], cst.FunctionDef)


def _list_of(module: cst.Module, function: cst.FunctionDef) -> cst.List:
    """The list literal that `get_models()` returns, directly or through a variable."""
    returns = m.findall(function, m.Return())
    if len(returns) != 1:
        raise _layout(f"get_models() has {len(returns)} return statements")
    value = cst.ensure_type(returns[0], cst.Return).value
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add):
        value = value.right
    if isinstance(value, cst.List):
        return value
    if isinstance(value, cst.Name):
        for scope in (function, module):
            lists = _lists_assigned_to(scope, value.value)
            if len(lists) == 1:
                return lists[0]
    raise _layout("get_models() does not return a list literal, nor a variable that one is assigned to once")


def _lists_assigned_to(scope: cst.CSTNode, name: str) -> list[cst.List]:
    target = m.Name(name)
    assignments = m.findall(
        scope,
        m.Assign(targets=[m.AssignTarget(target=target)], value=m.List())
        | m.AnnAssign(target=target, value=m.List()),
    )
    return [
        cst.ensure_type(node.value, cst.List)
        for node in assignments
        if isinstance(node, (cst.Assign, cst.AnnAssign))
    ]


def _add_import(module: cst.Module, row: Row, name: str) -> cst.Module:
    alias = cst.AsName(cst.Name(name)) if name != row.class_name else None
    statement = cst.ImportFrom(
        module=cst.Name(row.module),
        names=[cst.ImportAlias(cst.Name(row.class_name), asname=alias)],
        relative=[cst.Dot()],
    )
    line = cst.SimpleStatementLine([statement])
    imports = [
        index
        for index, old in enumerate(module.body)
        if m.matches(old, m.SimpleStatementLine([m.ImportFrom() | m.Import()]))
    ]
    relative = [index for index in imports if _is_relative(module.body[index])]
    if relative:
        return _inserted(module, relative[-1] + 1, line)
    blank = line.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    if imports:
        return _inserted(module, imports[-1] + 1, blank)
    has_docstring = module.get_docstring() is not None
    return _inserted(module, 1, blank) if has_docstring else _inserted(module, 0, line)


def _is_relative(line: cst.BaseStatement) -> bool:
    return m.matches(line, m.SimpleStatementLine([m.ImportFrom(relative=[m.AtLeastN(m.Dot(), n=1)])]))


def _inserted(module: cst.Module, index: int, line: cst.SimpleStatementLine) -> cst.Module:
    return module.with_changes(body=[*module.body[:index], line, *module.body[index:]])


def _drop_unused_import(module: cst.Module, old: FoundRow) -> cst.Module:
    """Remove the import of the class of a replaced row when nothing else uses it; comments above it stay."""
    value = old.node.elements[1].value
    return _drop_unused(module, value.value) if isinstance(value, cst.Name) else module


def _drop_unused(module: cst.Module, name: str) -> cst.Module:
    outside = module.with_changes(body=[line for line in module.body if not _imports_name(line, name)])
    if m.findall(outside, m.Name(name)):
        return module
    body: list[cst.CSTNode] = []
    left_over: list[cst.EmptyLine] = []
    for line in module.body:
        if not _imports_name(line, name):
            if not m.matches(line, m.SimpleStatementLine([m.ImportFrom() | m.Import()])):
                left_over = [empty for empty in left_over if empty.comment]
            body.append(
                line.with_changes(leading_lines=[*left_over, *line.leading_lines]) if left_over else line
            )
            left_over = []
            continue
        statement = cst.ensure_type(cst.ensure_type(line, cst.SimpleStatementLine).body[0], cst.ImportFrom)
        kept = [alias for alias in _aliases(statement) if _bound(alias) != name]
        if kept:
            kept[-1] = kept[-1].with_changes(comma=_aliases(statement)[-1].comma)
            body.append(line.with_changes(body=[statement.with_changes(names=kept)]))
        else:
            left_over += line.leading_lines
    return module.with_changes(body=body)


def _imports_name(line: cst.BaseStatement | cst.BaseSmallStatement, name: str) -> bool:
    if not m.matches(line, m.SimpleStatementLine([m.ImportFrom()])):
        return False
    statement = cst.ensure_type(cst.ensure_type(line, cst.SimpleStatementLine).body[0], cst.ImportFrom)
    return any(_bound(alias) == name for alias in _aliases(statement))


def _aliases(statement: cst.ImportFrom) -> list[cst.ImportAlias]:
    return list(statement.names) if isinstance(statement.names, Sequence) else []


def _bound(alias: cst.ImportAlias) -> str:
    return alias.evaluated_alias or alias.evaluated_name


# --- Checking -----------------------------------------------------------------------------------------------


def _verify(before: str, after: str, row: Row) -> None:
    """Parse the result anew: the row is there once, from the port's package, and no other row changed."""
    ast.parse(after)
    old = rows_of(*parse_registry(before))
    new = rows_of(*parse_registry(after))
    ours = [found.origin for found in new if found.architecture == row.architecture]
    others = [
        [(found.architecture, found.origin) for found in rows if found.architecture != row.architecture]
        for rows in (old, new)
    ]
    if ours != [row.origin] or others[0] != others[1]:
        raise _layout("the edit would change other rows")


def _layout(found: str) -> Refusal:
    return refuse(
        "REG-LAYOUT",
        found,
        REGISTRY,
        "add the row by hand: an import and a (architecture, class) tuple in get_models()",
    )
