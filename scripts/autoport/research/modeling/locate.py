"""Finding the modeling file: transformers' own, or the one that comes with the checkpoint."""

import ast
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autoport.research.config_defaults import causal_lm_classes, class_place, parse_file
from autoport.research.modeling.lineage import class_definitions, lineage
from autoport.research.source import Source

# The largest of transformers 5.19: 191,474 bytes, 26,616 nodes, 23 levels.
LARGEST_FILE_BYTES = 1024 * 1024
MOST_NODES = 100_000
MOST_CLASSES = 400
DEEPEST = 100  # levels of the syntax tree
LARGEST_BITS = 1000  # of an integer
LONGEST_LINEAGE = 30  # a class and its bases
OWN_CODE = re.compile(r"(?P<module>\w+)\.(?P<name>\w+)")


class ModelingFile(msgspec.Struct, frozen=True):
    """A modeling file as text.

    Attributes:
        name: File name, for findings.
        text: What it says.
        tree: Its syntax tree.
        entries: Classes to start from.
        own: Whether it comes with the checkpoint (remote code) instead of transformers.
    """

    name: str
    text: str
    tree: ast.Module
    entries: tuple[str, ...]
    own: bool


def find_modeling_file(
    source: Source, config: Mapping[str, Any], architecture: str, model_type: str
) -> tuple[ModelingFile | None, str]:
    """The modeling file of `architecture`, and why there is none (or a note about it)."""
    installed = transformers_file(architecture, model_type)
    if installed is not None:
        return installed, ""
    auto_map = config.get("auto_map")
    entry = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, Mapping) else None
    match = OWN_CODE.fullmatch(entry) if isinstance(entry, str) else None
    if match is None:
        where = f"auto_map points to {entry!r}" if entry else "the checkpoint brings none (auto_map)"
        return None, f"no modeling file: transformers has no {architecture}, and {where}"
    file = f"{match['module']}.py"
    size = source.sizes.get(file)
    if size is None or size > LARGEST_FILE_BYTES:
        return None, f"no modeling file: {file} is {'missing' if size is None else f'{size} bytes large'}"
    try:
        text = source.read(file, 0, LARGEST_FILE_BYTES).decode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, f"{file} cannot be parsed: {error}"
    excess = _excess(tree)
    if excess:
        return None, f"{file} is not read: {excess}"
    return ModelingFile(file, text, tree, (match["name"],), own=True), ""


def _excess(tree: ast.Module) -> str:
    """What a syntax tree has more of than a modeling file has, so that reading it is bounded; empty for nothing."""
    level: list[ast.AST] = [tree]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > MOST_NODES or depth > DEEPEST:
            return (
                f"more than {MOST_NODES} nodes"
                if nodes > MOST_NODES
                else f"nested deeper than {DEEPEST} levels"
            )
        if any(_is_huge(node) for node in level):
            return f"an integer of more than {LARGEST_BITS} bits"
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    classes = class_definitions(tree)
    if len(classes) > MOST_CLASSES:
        return f"more than {MOST_CLASSES} classes"
    for node in classes.values():
        if len(lineage(classes, node, LONGEST_LINEAGE + 1)) > LONGEST_LINEAGE:
            return f"{node.name} inherits from {LONGEST_LINEAGE} classes or more"
    return ""


def _is_huge(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int) and value.bit_length() > LARGEST_BITS


def transformers_file(architecture: str, model_type: str) -> ModelingFile | None:
    """The modeling file of the installed transformers that has the class, or None."""
    place = class_place(model_type)
    if place is None:
        return None
    path: Path = place[0].with_name(place[0].name.replace("configuration_", "modeling_", 1))
    tree = parse_file(path)
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    # The same class may be spelled differently in capitals in a checkpoint's config (PhiMoE, Phimoe).
    wanted = {architecture.lower(), causal_lm_classes().get(model_type, architecture).lower()}
    entries = tuple(sorted(name for name in names if name.lower() in wanted))
    text = path.read_text(encoding="utf-8") if entries else ""
    return ModelingFile(path.name, text, tree, entries, own=False) if entries else None
