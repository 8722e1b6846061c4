"""Defaults of transformers' config classes, read from its source as text.

Nothing is imported: a config class's default is an annotated assignment in
`transformers/models/<model>/configuration_<model>.py`, and the maps from `model_type` to class and module are
literals in `transformers/models/auto/`.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoport.schema.facts import Fact

_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@functools.cache
def transformers_dir() -> Path | None:
    """Folder of the installed transformers, found without importing it."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent if spec and spec.origin else None


@functools.cache
def config_defaults(model_type: str) -> dict[str, Fact]:
    """Default of every config attribute of `model_type`, with class, version, file and line as its source.

    Empty when transformers is not installed or has no such model type.
    """
    root, place = transformers_dir(), class_place(model_type)
    if root is None or place is None:
        return {}
    facts = defaults_of(str(place[0]), place[1])
    base_theta = _default_theta(root)
    if base_theta is not None:
        facts.setdefault("default_theta", base_theta)
    return facts


def class_place(model_type: str) -> tuple[Path, str] | None:
    """File and name of the config class of `model_type`, or None when transformers has none."""
    root, name = transformers_dir(), _config_classes().get(model_type)
    if root is None or name is None:
        return None
    for owner in (model_type, *(key for key, other in _config_classes().items() if other == name)):
        module = _special_modules().get(owner, owner.replace("-", "_"))
        path = root / "models" / module / f"configuration_{module}.py"
        if path.is_file():
            return path, name
    return None


def class_source(model_type: str) -> str:
    """Text of the file that holds the config class of `model_type`; empty when there is none."""
    place = class_place(model_type)
    return place[0].read_text(encoding="utf-8") if place else ""


def defaults_of(file: str, class_name: str) -> dict[str, Fact]:
    """Defaults of the attributes of one class of `file`, with those of its bases in the same file."""
    path = Path(file)
    classes = {node.name: node for node in parse_file(path).body if isinstance(node, ast.ClassDef)}
    facts: dict[str, Fact] = {}
    while class_name in classes:
        node = classes[class_name]
        for name, value, line in _attributes(node):
            source = f"{class_name} default (transformers {transformers_version()}, {path.name}:{line})"
            facts.setdefault(name, Fact(value, source))
        class_name = next((base.id for base in node.bases if isinstance(base, ast.Name)), "")
    return facts


@functools.cache
def causal_lm_classes() -> dict[str, str]:
    """Class for causal language modelling by `model_type`, as transformers' auto classes map them."""
    return _mapping("models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


@functools.cache
def _config_classes() -> dict[str, str]:
    return {
        **_mapping("models/auto/auto_mappings.py", "CONFIG_MAPPING_NAMES"),
        **_mapping("models/auto/configuration_auto.py", "CONFIG_MAPPING_NAMES"),
    }


@functools.cache
def _special_modules() -> dict[str, str]:
    return {
        **_mapping("models/auto/auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"),
        **_mapping("models/auto/configuration_auto.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"),
    }


@functools.cache
def transformers_version() -> str:
    return importlib.metadata.version("transformers")


@functools.cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def _mapping(file: str, name: str) -> dict[str, str]:
    """String pairs of `name = OrderedDict([...], **{...})` and `name.update({...})` in `file`."""
    root = transformers_dir()
    pairs: dict[str, str] = {}
    for node in parse_file(root / file).body if root else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            call: ast.expr = node.value
        elif isinstance(node, ast.Expr) and ast.unparse(node.value).startswith(f"{name}.update("):
            call = node.value
        else:
            continue
        if isinstance(call, ast.Call):
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                pairs |= _pairs(argument)
    return pairs


def _pairs(node: ast.expr) -> dict[str, str]:
    try:
        return {key: value for key, value in dict(ast.literal_eval(node)).items() if isinstance(value, str)}
    except (ValueError, TypeError):
        return {}


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, Any, int]]:
    """(name, default, line) of each attribute of a config class whose default can be read from the text."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
            name, value = item.target.id, item.value
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name, value = item.targets[0].id, item.value
        else:
            continue
        try:
            yield name, _literal(value), item.lineno
        except ValueError:
            continue


def _literal(node: ast.expr) -> Any:
    """Value of a literal, of arithmetic on numbers, or of the `default=` of a field declaration.

    Raises:
        ValueError: when the text does not say.
    """
    if isinstance(node, ast.Call):
        if ast.unparse(node) in ("set()", "list()"):
            return []
        default = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
        if default is None:
            raise ValueError(ast.unparse(node))
        return _literal(default)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            return _OPERATORS[type(node.op)](left, right)
        raise ValueError(ast.unparse(node))
    return ast.literal_eval(node)


def _default_theta(root: Path) -> Fact | None:
    """The rope_theta that every config class falls back to."""
    path = root / "modeling_rope_utils.py"
    for node in parse_file(path).body:
        if isinstance(node, ast.ClassDef) and node.name == "RotaryEmbeddingConfigMixin":
            for name, value, line in _attributes(node):
                if name == "default_theta":
                    return Fact(
                        value,
                        f"{node.name} default (transformers {transformers_version()}, {path.name}:{line})",
                    )
    return None
