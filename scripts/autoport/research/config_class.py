"""A config as transformers' config class would hold it, computed from the text of the class.

`class_attributes` answers what `AutoConfig.from_pretrained(folder).<attribute>` would be, with the source of each
value, without importing transformers or running anything of it.
"""

import ast
import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autoport.research.class_runner import Runner
from autoport.research.class_text import ClassText, Instance, Rejected, Unfollowed, same
from autoport.research.config_defaults import (
    class_place,
    config_defaults,
    defaults_of,
    parse_file,
    transformers_dir,
)
from autoport.research.config_defaults import transformers_version as version
from autoport.schema.facts import Fact

# transformers' configuration_utils.remap_legacy_layer_types
LEGACY_LAYER_TYPES = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
NOT_ATTRIBUTES = {
    "attribute_map",
    "sub_configs",
    "base_model_tp_plan",
    "base_model_pp_plan",
    "base_model_ep_plan",
}


class ClassAttributes(msgspec.Struct):
    """Attributes of the config object.

    Attributes:
        facts: By attribute name; a value that the class did not change has the source of config.json.
        unfollowed: Why the text of the class could not be followed; `facts` is then empty.
        rejected: The condition on which the class raises an error for this config; empty when it takes it.
    """

    facts: dict[str, Fact] = {}
    unfollowed: str = ""
    rejected: str = ""


def class_attributes(model_type: str, config: Mapping[str, Any], path: str = "") -> ClassAttributes:
    """Compute the attributes of the config class of `model_type` for `config`.

    Args:
        path: Where `config` stands in config.json, e.g. ``"text_config."``.

    Returns:
        No facts when transformers has no such class or its text cannot be followed on this config.
    """
    place = class_place(model_type)
    if place is None:
        return ClassAttributes()
    texts = class_texts(str(place[0]))
    if place[1] not in texts:
        return ClassAttributes()
    try:
        instance, refused = _build(texts, place[1], dict(config), config_defaults(model_type), path)
    except Rejected as rejected:
        return ClassAttributes(rejected=str(rejected))
    except (Unfollowed, TypeError, AttributeError, ValueError, LookupError, RecursionError) as error:
        return ClassAttributes(unfollowed=f"{place[1]} ({place[0].name}): {error}")
    facts = {
        name: Fact(_plain(value), instance.sources.get(name, ""))
        for name, value in instance.attributes.items()
    }
    found = {name: fact for name, fact in facts.items() if fact.source}
    return ClassAttributes(found, rejected=refused)


@functools.cache
def class_texts(file: str) -> dict[str, ClassText]:
    """The classes of a file, by name, with the RoPE mixin that all config classes inherit from."""
    root = transformers_dir()
    texts: dict[str, ClassText] = {}
    for path in ((root / "modeling_rope_utils.py") if root else None, Path(file)):
        for node in parse_file(path).body if path else []:
            if isinstance(node, ast.ClassDef):
                methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
                bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
                texts[node.name] = ClassText(node.name, path or Path(), bases, methods)
    return texts


def _build(
    texts: Mapping[str, ClassText],
    name: str,
    config: dict[str, Any],
    defaults: Mapping[str, Fact],
    path: str,
) -> tuple[Instance, str]:
    """The config object, and what `validate_architecture` rejects."""
    mro: list[ClassText] = []
    current = name
    while current in texts and texts[current] not in mro:
        mro.append(texts[current])
        current = next(iter(texts[current].bases), "")
    mixin = texts.get("RotaryEmbeddingConfigMixin")
    if mixin:
        mro.append(mixin)
    renamed = defaults["attribute_map"].value if "attribute_map" in defaults else {}
    instance = Instance(mro, renamed)
    inherited = defaults_of(str(mixin.path), mixin.name) if mixin else {}
    for key, fact in (dict(inherited) | dict(defaults)).items():
        if key not in NOT_ATTRIBUTES:
            instance.set(key, copy.deepcopy(fact.value), fact.source)
    given: dict[str, tuple[str, Any]] = {}
    kwargs: dict[str, Any] = {}
    for key, value in config.items():
        own = renamed.get(key, key)
        source = f"config.json: {path}{key}"
        given[own] = (source, value)
        if own in instance.attributes or own == "dtype":
            instance.attributes[own] = copy.deepcopy(value)
            instance.sources[own] = source
        else:
            kwargs[key] = copy.deepcopy(value)

    def build(other: str, arguments: dict[str, Any]) -> Instance | None:
        if other not in texts:
            return None
        defaults = defaults_of(str(texts[other].path), other)
        return _build(texts, other, arguments, defaults, f"{path}{other}.")[0]

    runner = Runner(build, functools.partial(_base_method, given), _line)
    runner.call(instance, "__post_init__", kwargs)
    for own, (source, value) in given.items():
        changed = own in instance.attributes and not same(_plain(instance.attributes[own]), value)
        if changed and instance.sources.get(own) == source:
            instance.sources[own] = f"{source}, completed by {name} (transformers {version()})"
    return instance, runner.check(instance)


def _base_method(
    given: Mapping[str, tuple[str, Any]],
    runner: Runner,
    instance: Instance,
    name: str,
    kwargs: dict[str, Any],
) -> Any:
    """What the classes inherit from PreTrainedConfig."""
    if name != "__post_init__":
        raise Unfollowed(f"{name} is not known")
    old = kwargs.pop("torch_dtype", None)
    if old is not None and instance.attributes.get("dtype") is None:
        instance.set("dtype", old, given["torch_dtype"][0] if "torch_dtype" in given else "")
    if instance.has("rope_parameters") or (kwargs.get("rope_scaling") and kwargs.get("rope_theta")):
        if not instance.has("rope_parameters"):
            instance.set("rope_parameters", None, "")
        kwargs = runner.call(instance, "convert_rope_params_to_dict", kwargs) or {}
    for key, value in kwargs.items():
        source = instance.sources.get(f"kwargs.{key}") or given.get(key, ("", None))[0]
        instance.set(key, value, source)
    kinds = instance.attributes.get("layer_types")
    if isinstance(kinds, list):
        instance.attributes["layer_types"] = [
            LEGACY_LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds
        ]
    return None


def _line(owner: ClassText, line: int) -> str:
    return f"transformers {version()}, {owner.path.name}:{line}"


def _plain(value: Any) -> Any:
    """Sub-configs as dicts, tuples and sets as lists."""
    if isinstance(value, Instance):
        return {name: _plain(item) for name, item in value.attributes.items()}
    if isinstance(value, (tuple, set, range)):
        return [_plain(item) for item in value]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
