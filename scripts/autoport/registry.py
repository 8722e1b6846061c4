"""The rows of the plugin's `registry.py`, read from its text."""

from collections.abc import Sequence
from pathlib import Path

import libcst as cst
import libcst.matchers as m
import msgspec

from autoport.errors import refuse

REGISTRY = "registry.py"


class FoundRow(msgspec.Struct, frozen=True):
    """A row in the file: its node, and where its class comes from (``".llama3:LlamaForCausalLM"``)."""

    node: cst.Tuple
    architecture: str
    origin: str


def read_registry(path: Path) -> str:
    """The registry's text, its line ends as they are.

    Raises:
        Refusal: REG-MISSING; REG-SYNTAX when it is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise refuse(
            "REG-MISSING", f"cannot be read: {error.strerror}", path, "restore the plugin's registry.py"
        ) from error
    except UnicodeDecodeError as error:
        raise refuse("REG-SYNTAX", f"not UTF-8: {error}", path, "correct the file") from error


def row_origins(source: str) -> dict[str, str]:
    """Where the class of each architecture's row comes from: ``{"LlamaForCausalLM": ".llama3:LlamaForCausalLM"}``.

    Raises:
        Refusal: REG-SYNTAX.
    """
    return {found.architecture: found.origin for found in rows_of(*parse_registry(source))}


def row_list(source: str) -> list[tuple[str, str]]:
    """Every row, in the order of the text: its architecture and where the class comes from, see `row_origins`.

    Raises:
        Refusal: REG-SYNTAX.
    """
    return [(found.architecture, found.origin) for found in rows_of(*parse_registry(source))]


def parse_registry(source: str) -> tuple[cst.Module, dict[str, str]]:
    """The text's syntax tree and what it imports, see `imports_of`.

    Raises:
        Refusal: REG-SYNTAX.
    """
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise refuse(
            "REG-SYNTAX", f"not valid Python: {error.message}", REGISTRY, "correct the file"
        ) from error
    return module, imports_of(module)


def imports_of(module: cst.Module) -> dict[str, str]:
    """What each name imported at the top of the file stands for: ``".llama3:LlamaForCausalLM"``."""
    names = {}
    for statement in _import_statements(module):
        origin = _module_name(statement)
        for alias in statement.names if isinstance(statement.names, Sequence) else ():
            imported = cst.ensure_type(alias.name, cst.Name).value
            names[alias.evaluated_alias or imported] = f"{origin}:{imported}"
    return names


def _import_statements(module: cst.Module) -> list[cst.ImportFrom]:
    lines = [line for line in module.body if isinstance(line, cst.SimpleStatementLine)]
    return [small for line in lines for small in line.body if isinstance(small, cst.ImportFrom)]


def _module_name(statement: cst.ImportFrom) -> str:
    name = cst.Module([]).code_for_node(statement.module) if statement.module else ""
    if not statement.relative:
        for package in ("vllm_neuron.model", "private_vllm_neuron.model"):
            if name == package or name.startswith(f"{package}."):
                return "." + name[len(package) :].lstrip(".")
    return "." * len(statement.relative) + name


def rows_of(module: cst.Module, imports: dict[str, str]) -> list[FoundRow]:
    """Every (string, class) pair outside classes and other functions than `get_models`, in the order of the text."""
    rows = []
    row = m.Tuple(elements=[m.Element(value=m.SimpleString()), m.Element()])
    other = m.ClassDef() | m.FunctionDef(name=m.DoesNotMatch(m.Name("get_models")))
    for node in (node for line in module.body if not m.matches(line, other) for node in m.findall(line, row)):
        architecture, value = (element.value for element in cst.ensure_type(node, cst.Tuple).elements)
        text = cst.Module([]).code_for_node(value)
        package, _, attribute = text.rpartition(".")
        origin = (
            imports.get(package, package).replace(":", "") + ":" + attribute
            if package
            else imports.get(text, text)
        )
        name = cst.ensure_type(architecture, cst.SimpleString).evaluated_value
        rows.append(FoundRow(cst.ensure_type(node, cst.Tuple), str(name), origin))
    return rows
