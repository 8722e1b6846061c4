"""The row in the plugin's registry.py."""

import ast
from typing import NamedTuple

from autoport.package_workspace import PLUGIN_GROUP, PackageWorkspace
from autoport.review.finding import Finding, NotApplicable, NotChecked, Subject, check, failed, passed
from autoport.review.source import SourceFile


class Row(NamedTuple):
    """A row (architecture string, class) of the registry. `imported_from` is where the class comes from."""

    node: ast.AST
    architecture: str
    class_name: str
    imported_from: str


def rows(registry: SourceFile) -> list[Row]:
    found = []
    for node in ast.walk(registry.tree):
        if not (isinstance(node, ast.Tuple) and len(node.elts) == 2):
            continue
        architecture, cls = node.elts
        if (
            isinstance(architecture, ast.Constant)
            and isinstance(architecture.value, str)
            and isinstance(cls, ast.Name)
        ):
            found.append(Row(node, architecture.value, cls.id, registry.imports.get(cls.id, "")))
    return found


def _rows_of_port(subject: Subject) -> tuple[SourceFile, list[Row]]:
    if isinstance(subject.workspace, PackageWorkspace):
        raise NotApplicable("the port is a package of its own, which registers itself")
    if subject.unregistered:
        raise NotApplicable("the port was left out of the registry with --no-register")
    if subject.registry is None:
        raise NotChecked(f"{subject.workspace.registry_path} cannot be parsed")
    package = f".{subject.name}"
    return subject.registry, [
        row for row in rows(subject.registry) if package in f".{row.imported_from}".rpartition(".")[0]
    ]


@check
def registry_row(subject: Subject) -> list[Finding]:
    """A row of the registry names a class that this port's package exports."""
    registry, found = _rows_of_port(subject)
    exported = {
        name
        for file in subject.source.files
        if file.path.name == "__init__.py"
        for name in (*file.imports, *file.classes, *file.functions)
    }
    findings = []
    for row in found:
        original = row.imported_from.rpartition(".")[2]
        text = f'("{row.architecture}", {row.class_name}) from {row.imported_from}'
        direct = row.imported_from.rpartition(".")[0].endswith(f".{subject.name}")
        if direct and original not in exported:
            findings.append(failed(registry.at(row.node), f"{text}: the package does not export {original}"))
        else:
            findings.append(passed(registry.at(row.node), text))
    return findings or [failed(registry.at(registry.tree), f"no row names a class of {subject.name}")]


@check
def registry_architecture(subject: Subject) -> list[Finding]:
    """The row's string is config.json's architecture, byte for byte, and no other row has it."""
    architecture = subject.architecture
    registry, found = _rows_of_port(subject)
    findings = []
    for row in found:
        text = f'"{row.architecture}"'
        if row.architecture == architecture:
            findings.append(passed(registry.at(row.node), f"{text} is the architecture of config.json"))
        elif row.architecture.casefold() == architecture.casefold():
            findings.append(
                failed(registry.at(row.node), f'{text} differs from config.json\'s "{architecture}" in case')
            )
    same = [row for row in rows(registry) if row.architecture == architecture]
    if not same:
        findings.append(failed(registry.at(registry.tree), f'no row for "{architecture}"'))
    elif len(same) > 1:
        places = ", ".join(registry.at(row.node) for row in same)
        findings.append(
            failed(registry.at(same[-1].node), f'"{architecture}" has {len(same)} rows: {places}')
        )
    elif same[0] not in found:
        findings.append(
            failed(registry.at(same[0].node), f'"{architecture}" is registered with another model\'s class')
        )
    return findings


@check
def package_registration(subject: Subject) -> list[Finding]:
    """A package out of tree has an entry point for vLLM, and registers its factory as config.json's architecture."""
    workspace = subject.workspace
    if not isinstance(workspace, PackageWorkspace):
        raise NotApplicable("the port is in the plugin's checkout")
    findings = []
    path = workspace.registration_path
    line = f'{workspace.module} = "{workspace.module}:register"'
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if f'[project.entry-points."{PLUGIN_GROUP}"]' in text and line in text:
        findings.append(passed(f"{path.name}:1", f"{PLUGIN_GROUP}: {line}"))
    else:
        findings.append(failed(f"{path.name}:1", f"no entry point {line} in the group {PLUGIN_GROUP}"))
    file = next((file for file in subject.source.files if file.path.name == "__init__.py"), None)
    if file is None:
        return [*findings, failed(f"{workspace.module}/__init__.py:1", "is missing")]
    strings = {node.value for node in ast.walk(file.tree) if isinstance(node, ast.Constant)}
    for wanted in (subject.architecture, f"{workspace.module}.factory:{subject.architecture}"):
        if wanted in strings:
            findings.append(passed(file.at(file.tree), f'registers "{wanted}"'))
        else:
            findings.append(failed(file.at(file.tree), f'"{wanted}" is not registered'))
    return findings
