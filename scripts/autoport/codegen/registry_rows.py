"""Rows of `registry.py`: taking a model's rows out, and finding rows whose class is not there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autoport.codegen.registry_edit import drop_unused_imports
from autoport.errors import refuse
from autoport.files import write_atomic
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.registry import REGISTRY, read_registry, row_list
from autoport.workspace import Workspace


class BrokenRow(msgspec.Struct, frozen=True):
    """A row of the registry, where its class comes from, and what is wrong with it."""

    architecture: str
    origin: str
    found: str


# --- Taking rows out ----------------------------------------------------------------------------------------


def unregister(port: Port) -> list[str]:
    """Remove every row whose class comes from the model's package, and the import that is unused then.

    Returns:
        The architectures whose rows were removed; empty when there was none.

    Raises:
        Refusal: REG-NONE where there is nothing of that name; REG-MISSING, REG-SYNTAX, REG-LAYOUT; REG-CHANGED when
            the file changes meanwhile.
    """
    path = port.workspace.registry_path
    if isinstance(port.workspace, PackageWorkspace):
        raise refuse(
            "REG-NONE",
            f"{port.name} is a package of its own, and has no row in the plugin's registry",
            port.workspace.root,
            f"uninstall it: python -m pip uninstall {port.workspace.distribution}",
        )
    with port.workspace.lock("registry"):
        before = read_registry(path)
        removed = [name for name, origin in row_list(before) if origin.startswith(f".{port.name}:")]
        if not (removed or port.exists or port.workspace.model_dir(port.name).is_dir()):
            there = sorted(
                {origin[1:].partition(":")[0] for _, origin in row_list(before) if origin.startswith(".")}
            )
            raise refuse(
                "REG-NONE",
                f"there is no model {port.name!r}, and no row of it",
                path,
                f"name one that has rows: {', '.join(there) or 'there is none'}",
            )
        if removed:
            after = remove_rows(before, port.name)
            if read_registry(path) != before:
                raise refuse(
                    "REG-CHANGED", "changed while it was being edited", path, "run the command again"
                )
            write_atomic(path, after.encode())
    if port.has_state("port.json"):
        port.manifest.unregistered = True
        port.save()
    return removed


def remove_rows(source: str, module: str) -> str:
    """The registry's text without the rows of package `module`; comments and other rows stay as they are.

    Raises:
        Refusal: REG-SYNTAX; REG-LAYOUT when a row cannot be taken out alone.
    """
    rows = row_list(source)
    kept = [(name, origin) for name, origin in rows if not origin.startswith(f".{module}:")]
    gone = {name for name, origin in rows if origin.startswith(f".{module}:")}
    text = source
    for name in sorted(gone):
        text = _without(text, name)
    try:
        ast.parse(text)
        text = drop_unused_imports(text, module)
        left: list[tuple[str, str]] | None = row_list(text)
    except SyntaxError:
        left = None
    if left != kept:
        raise refuse(
            "REG-LAYOUT", f"the rows of {module} cannot be taken out alone", REGISTRY, "remove them by hand"
        )
    return text


def _without(source: str, architecture: str) -> str:
    """The text without the row's lines, or the row's part of a line that has more."""
    lines = source.splitlines(keepends=True)
    node = next(node for node in _tuples(ast.parse(source)) if node.elts[0].value == architecture)  # type: ignore[attr-defined]
    statement = _append_of(ast.parse(source), node)
    first, last = (statement or node).lineno - 1, (statement or node).end_lineno or 0
    start = len(lines[first].encode()[: (statement or node).col_offset].decode())
    end = len(lines[last - 1].encode()[: (statement or node).end_col_offset or 0].decode())
    before, after = lines[first][:start], lines[last - 1][end:]
    rest = after.lstrip().removeprefix(",").strip()
    if not before.strip() and (not rest or rest.startswith("#")):
        return "".join([*lines[:first], *lines[last:]])
    follows = after.lstrip().startswith(",")
    joined = (
        before + after.lstrip().removeprefix(",").lstrip(" ")
        if follows
        else before.rstrip().removesuffix(",") + after
    )
    return "".join([*lines[:first], joined, *lines[last:]])


def _append_of(tree: ast.Module, row: ast.Tuple) -> ast.stmt | None:
    """The ``models.append((...))`` that a row is the argument of."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append"), args=[ast.Tuple() as argument])):
                if argument.lineno == row.lineno and argument.col_offset == row.col_offset:
                    return node
    return None


def _tuples(tree: ast.Module) -> Iterator[ast.Tuple]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant):
            yield node


# --- Checking -----------------------------------------------------------------------------------------------


def broken_rows(workspace: Workspace) -> list[BrokenRow]:
    """Rows whose package or class does not exist, and architectures with several rows; nothing is imported.

    Raises:
        Refusal: REG-MISSING, REG-SYNTAX, REG-LAYOUT.
    """
    path = workspace.registry_path
    text = read_registry(path)
    rows = row_list(text)
    functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    if "get_models" not in functions:
        raise refuse("REG-LAYOUT", "there is no get_models()", path, "restore the plugin's registry.py")
    names = [name for name, _ in rows]
    broken = []
    for position, (name, origin) in enumerate(rows):
        if name in names[:position]:
            broken.append(BrokenRow(name, origin, "another row has this architecture"))
        module, _, class_name = origin.rpartition(":")
        if not module.startswith(".") or module.startswith(".."):
            continue  # of another package
        found = _missing(workspace.registry_path.parent, module[1:], class_name)
        if found:
            broken.append(BrokenRow(name, origin, found))
    return broken


def _missing(models: Path, module: str, class_name: str) -> str:
    path = models.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return f"there is no package {module}"
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return f"{file.name} of {module} is not valid Python: {error.msg}"
    names = set(_bound(tree))
    return "" if names & {class_name, "*", "__getattr__"} else f"{module} exports no {class_name}"


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
