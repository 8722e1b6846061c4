"""Sections that are left to be written by hand: their text in model.py, and which of them are still unwritten."""

import ast
import textwrap
from collections.abc import Sequence
from typing import Any

from autoport.port_state import Port
from autoport.schema.plan import Gap

MARK = "to be written: "
WIDTH = 80


def gap_context(gaps: Sequence[Gap]) -> dict[str, Any]:
    """For the templates: by section, the lines of the message and the parameters."""
    return {
        "gaps": {
            gap.section: {"lines": _lines(gap), "parameters": [_declared(item) for item in gap.parameters]}
            for gap in gaps
        }
    }


def _lines(gap: Gap) -> list[str]:
    text = f"{MARK}{gap.section}. {'; '.join(gap.found)}. Read {gap.where}."
    if gap.operators:
        text += f" Nearest operators: {', '.join(gap.operators)}."
    lines = textwrap.wrap(text, WIDTH, break_long_words=False)
    return [f"{line} " for line in lines[:-1]] + lines[-1:]


def _declared(parameter: Any) -> tuple[str, list[str]]:
    return parameter.name.rpartition(".")[2], parameter.sizes


def unwritten(port: Port) -> list[str]:
    """Sections of model.py that still raise, as it is now."""
    file = port.workspace.model_dir(port.name) / "model.py"
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    return [text.removeprefix(MARK).partition(".")[0] for _, text in stubs(tree)]


def stubs(tree: ast.AST) -> list[tuple[ast.Raise, str]]:
    """The statements that stand for a section, each with its message."""
    return [
        (node, text)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and (text := _message(node.exc)).startswith(MARK)
    ]


def _message(node: ast.expr | None) -> str:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "NotImplementedError" and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return first.value
    return ""
