"""The cases of a variant's generated tests: configs, and the module that they select or the words of the refusal."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from autoport.variants import FORMATS, Condition, Variant

PLATFORMS = ("trn2", "trn3")


class Case(msgspec.Struct, frozen=True):
    """One call of the factory.

    Attributes:
        title: Name of the case.
        platform: What `get_platform_target` returns.
        neuron_config: Attributes of the plugin's configuration, None for none.
        hf_config: Attributes of the Hugging Face config.
        module: Module that has to be selected, if the configs are to be accepted.
        refusal: Regular expression over the message, if they are not.
    """

    title: str
    platform: str
    neuron_config: dict[str, Any] | None
    hf_config: dict[str, Any]
    module: str | None = None
    refusal: str | None = None


def selection_cases(variant: Variant, declared: Sequence[Variant]) -> list[Case]:
    """Every path to the variant, and every refusal that it brings."""
    return [
        *_by_name(variant),
        *_by_format(variant, declared),
        *_by_rule(variant, declared),
        *_by_platform(variant),
    ]


def _by_name(variant: Variant) -> Iterator[Case]:
    hf_config, neuron_config = _satisfying(variant.require)
    for key in variant.quantization:
        for platform in PLATFORMS:
            asked = {**neuron_config, "quantization": key}
            if platform in (variant.platforms or PLATFORMS):
                yield Case(f"{key} is asked for on {platform}", platform, asked, hf_config, variant.module)
            else:
                refusal = f"quantization {re.escape(repr(key))} on {platform} .*runs on"
                yield Case(f"{key} does not run on {platform}", platform, asked, hf_config, refusal=refusal)
        for condition in variant.require:
            others, settings = _satisfying([item for item in variant.require if item is not condition])
            words = re.escape(f"{variant.name} without {condition}")
            yield Case(
                f"{key} needs {condition}",
                _home(variant),
                {**settings, "quantization": key},
                others if condition.op not in ("!=", "not in") else _merge(others, _broken(condition)),
                refusal=words,
            )


def _by_format(variant: Variant, declared: Sequence[Variant]) -> Iterator[Case]:
    needed, settings = _satisfying(variant.require)
    for name in variant.formats:
        hf_config = needed | {"quantization_config": FORMATS[variant.name][name]}
        for platform in PLATFORMS:
            if platform in (variant.platforms or PLATFORMS):
                yield Case(
                    f"the checkpoint is {name}, on {platform}",
                    platform,
                    settings or None,
                    hf_config,
                    variant.module,
                )
            else:
                refusal = f"quantization_config {re.escape(repr(name))} on {platform}"
                yield Case(
                    f"{name} is not loaded on {platform}",
                    platform,
                    settings or None,
                    hf_config,
                    refusal=refusal,
                )
        for other in declared:
            for key in other.quantization:
                if other != variant and _home(variant) in (other.platforms or PLATFORMS):
                    refusal = f"quantization {re.escape(repr(key))} for a checkpoint with"
                    asked = {**settings, "quantization": key}
                    yield Case(
                        f"{key} does not load {name}", _home(variant), asked, hf_config, refusal=refusal
                    )


def _by_rule(variant: Variant, declared: Sequence[Variant]) -> Iterator[Case]:
    if not variant.when:
        return
    hf_config, neuron_config = _satisfying([*variant.when, *variant.require])
    before = declared[: list(declared).index(variant)]
    if any(other.when for other in before):
        return  # an earlier rule may hold as well, and would win
    for platform in variant.platforms or PLATFORMS:
        title = f"{' and '.join(map(str, variant.when))}, on {platform}"
        yield Case(title, platform, neuron_config or None, hf_config, variant.module)


def _by_platform(variant: Variant) -> Iterator[Case]:
    hf_config, neuron_config = _satisfying(variant.require)
    for platform in PLATFORMS:
        if platform in variant.default_on:
            yield Case(
                f"the default on {platform}", platform, neuron_config or None, hf_config, variant.module
            )


def _home(variant: Variant) -> str:
    return variant.platforms[0] if variant.platforms else PLATFORMS[0]


def _satisfying(conditions: Sequence[Condition]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes of the Hugging Face config and of the plugin's configuration with which all conditions hold."""
    hf_config: dict[str, Any] = {}
    neuron_config: dict[str, Any] = {}
    for condition in conditions:
        first, _, rest = condition.field.partition(".")
        target, field = (
            (neuron_config, rest) if first == "neuron_config" and rest else (hf_config, condition.field)
        )
        target.update(_merge(target, _nested(field, _value(condition))))
    return hf_config, neuron_config


def _value(condition: Condition) -> Any:
    """A value for which the condition holds."""
    value = condition.value
    if condition.op in ("==", "<=", ">="):
        return value
    if condition.op == "in":
        return value[0]
    if condition.op in ("<", ">"):
        return value - 1 if condition.op == "<" else value + 1
    return "another" if value is not None else 1


def _broken(condition: Condition) -> dict[str, Any]:
    value = condition.value if condition.op == "!=" else condition.value[0]
    return _nested(condition.field, value)


def _nested(field: str, value: Any) -> dict[str, Any]:
    for key in reversed(field.split(".")):
        value = {key: value}
    return dict(value)


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merge(old[key], item)
        for key, item in new.items()
        if isinstance(item, dict) and isinstance(old.get(key), dict)
    }
    return old | new | both
