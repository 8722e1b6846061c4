"""Registers the simulator's models, and those of a workspace, with vLLM."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import vllm_neuron
from vllm_neuron.simulator.overlay import alias_package, current_overlay, overlay, remove_overlay

WORKSPACE = "VLLM_NEURON_SIM_WORKSPACE"
PACKAGE = "VLLM_NEURON_SIM_PACKAGE"


class Row(NamedTuple):
    """A row of ``get_models()``, with the class by name."""

    architecture: str
    module: str
    class_name: str


def register_models() -> None:
    """Lay the workspace that the environment names over the simulator, and register its rows with vLLM.

    Entry point of the group ``vllm.general_plugins``, so that it runs in every process of the engine. Does
    nothing on another platform. Rows of the workspace replace the simulator's of the same architecture.

    Raises:
        ValueError: The workspace's registry cannot be read, see `read_rows`.
    """
    from vllm.platforms import current_platform

    from vllm_neuron.vllm.internals import register_contract_model
    from vllm_neuron.vllm.platform import NeuronPlatform

    if not isinstance(current_platform, NeuronPlatform):
        return
    rows = read_rows(Path(vllm_neuron.__file__).parent / "model" / "registry.py", "vllm_neuron")
    workspace, package = os.environ.get(WORKSPACE), os.environ.get(PACKAGE, "vllm_neuron")
    if workspace:
        if current_overlay() != (Path(workspace).resolve(), package):
            overlay(workspace, package)
        rows += read_rows(Path(workspace) / package / "model" / "registry.py", package)
    else:
        remove_overlay()
        alias_package(package)
    for row in rows:
        register_contract_model(*row)


def read_rows(registry: Path, package: str) -> list[Row]:
    """Read the rows of a registry.py without running it.

    Running it would import every model that it names, also those that use what the simulator does not have.

    Args:
        package: Package that the file's ``model`` package belongs to.

    Raises:
        ValueError: The file is missing or no Python, has no `get_models()`, or a row's class is not imported
            by name.
    """
    try:
        tree = ast.parse(registry.read_bytes())
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{registry}: {error}") from error
    functions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_models"
    ]
    if len(functions) != 1:
        raise ValueError(f"{registry}: {len(functions)} functions get_models()")
    imported = dict(_imports(tree, f"{package}.model"))
    rows = []
    for node in ast.walk(functions[0]):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(architecture)), ast.Name(id=name)]) if (
                name in imported
            ):
                rows.append(Row(architecture, *imported[name]))
            case ast.Tuple(elts=[ast.Constant(value=str(architecture)), _]):
                where = f"{registry}:{node.lineno}"
                raise ValueError(f"{where}: the class of {architecture!r} is not imported by name")
    return rows


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names bound by ``from module import name``, with (absolute module, name)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = package.split(".")
        parent = parts[: len(parts) + 1 - node.level] if node.level else []
        module = ".".join([*parent, *([node.module] if node.module else [])])
        for alias in node.names:
            yield alias.asname or alias.name, (module, alias.name)
