"""The types that a config class declares, and the values of config.json that do not have them.

transformers' config classes check their fields when they are made; a config that fails there cannot be loaded. The
annotations are read from the text of the class; the check is that of `huggingface_hub.dataclasses.strict`.
"""

import ast
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from autoport.research.config_defaults import (
    class_place,
    config_defaults,
    parse_file,
    transformers_version,
)

NAMES: dict[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "tuple": tuple,
    "RopeParameters": dict, "Optional": typing.Optional, "Union": typing.Union, "List": list, "Dict": dict,
}  # fmt: skip


class _Unreadable(Exception):
    pass


def type_conflicts(model_type: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key whose value the config class of `model_type` rejects, and why."""
    declared = declared_types(model_type)
    if not declared:
        return
    renamed = config_defaults(model_type).get("attribute_map")
    for key, value in config.items():
        own = renamed.value.get(key, key) if renamed else key
        if own not in declared:
            continue
        text, kind, source = declared[own]
        if not _fits(value, kind):
            yield key, f"the class takes {text} ({source})"


def declared_types(model_type: str) -> dict[str, tuple[str, Any, str]]:
    """Annotation as text and as a type, and where it is, of each annotated field of the config class."""
    place = class_place(model_type)
    found: dict[str, tuple[str, Any, str]] = {}
    if place is None:
        return found
    path, name = place
    classes = {node.name: node for node in parse_file(path).body if isinstance(node, ast.ClassDef)}
    while name in classes:
        for item in classes[name].body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                try:
                    kind = _type(item.annotation)
                except _Unreadable:
                    continue
                where = f"{name}, transformers {transformers_version()}, {path.name}:{item.lineno}"
                found.setdefault(item.target.id, (ast.unparse(item.annotation), kind, where))
        name = next((base.id for base in classes[name].bases if isinstance(base, ast.Name)), "")
    return found


def _fits(value: Any, kind: Any) -> bool:
    """Whether `value` is of the type, as strict dataclasses see it: True is no int, and 1 is no float."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is float and isinstance(value, Mapping) and set(value) == {"__float__"}:
        return True  # infinity, as transformers 5 writes it
    if origin is typing.Union:
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, parts[0]) and _fits(item, parts[1]) for key, item in value.items()
        )
    if origin is list:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    return isinstance(value, origin or kind) and not (kind is int and isinstance(value, bool))


def _type(node: ast.expr) -> Any:
    """The type that an annotation of built-in names stands for."""
    match node:
        case ast.Constant(value=None):
            return types.NoneType
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.BinOp(op=ast.BitOr()):
            return typing.Union[_type(node.left), _type(node.right)]  # noqa: UP007
        case ast.Subscript(value=ast.Name(id="Literal")):
            return typing.Literal[ast.literal_eval(node.slice)]
        case ast.Subscript():
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return _type(node.value)[tuple(... if _is_dots(part) else _type(part) for part in parts)]
    raise _Unreadable(ast.unparse(node))


def _is_dots(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...
