"""Finding the modeling file: transformers' own, or the one that comes with the checkpoint."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autoport.research.config_defaults import causal_lm_classes, class_place, parse_file
from autoport.research.source import Source

LARGEST_FILE_BYTES = 4 * 1024 * 1024
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
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, f"{file} cannot be parsed: {error}"
    return ModelingFile(file, text, tree, (match["name"],), own=True), ""


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
