"""The cases of a variant's generated tests: configs, and the module that they select or the words of the refusal."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from autoport.codegen.render import Checked, py
from autoport.variants import FORMATS, Condition, Variant, checkpoint_format

PLATFORMS = ("trn2", "trn3")
UNKNOWN = "the platform is not known"
QUANTIZED = "quantization_config"  # attribute of the Hugging Face config

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, values: value in values,
    "not in": lambda value, values: value not in values,
}


class Case(msgspec.Struct, frozen=True):
    """One call of the factory.

    Attributes:
        title: Name of the case.
        platform: What `get_platform_target` returns; None where it does not know.
        neuron_config: Attributes of the plugin's configuration, None for none.
        hf_config: Attributes of the Hugging Face config.
        module: Module that has to be selected, if the configs are to be accepted.
        refusal: Regular expression over the message, if they are not.
        stored: Format of the checkpoint, whose `quantization_config` `hf_config` has; empty for a plain one.
    """

    title: str
    platform: str | None
    neuron_config: dict[str, Any] | None
    hf_config: dict[str, Any]
    module: str | None = None
    refusal: str | None = None
    stored: str = ""

    @property
    def config_text(self) -> Checked:
        """`hf_config` as an expression, in which a format's part is read from the table of formats."""
        if not self.stored:
            return py(self.hf_config)
        others = {name: value for name, value in self.hf_config.items() if name != QUANTIZED}
        format_text = f"CHECKPOINTS[{py(self.stored)}]"
        return Checked(f"{py(others)} | {format_text}" if others else format_text)


def selection_cases(variant: Variant, declared: Sequence[Variant]) -> list[Case]:
    """Every path to the variant, every refusal that it brings, and the way past it.

    Args:
        declared: All variants of the model, the fallback first.
    """
    cases = [
        *_by_name(variant),
        *_by_format(variant, declared),
        *_by_rule(variant, declared),
        *_by_platform(variant, declared),
        *_past(declared),
    ]
    return [case for case in cases if case.refusal or case.module == _selected(case, declared)]


def checkpoints(variant: Variant) -> dict[str, dict[str, Any]]:
    """What a config has of each format that a variant loads, by the format's name."""
    return {name: {QUANTIZED: FORMATS[variant.name][name]} for name in variant.formats}


def _by_name(variant: Variant) -> Iterator[Case]:
    hf_config, neuron_config = _satisfying(variant.require)
    for key in variant.quantization:
        asked = {**neuron_config, "quantization": key}
        for platform in PLATFORMS:
            if platform in (variant.platforms or PLATFORMS):
                yield Case(f"{key} is asked for on {platform}", platform, asked, hf_config, variant.module)
            else:
                refusal = f"{variant.name} on {platform} .*possible: on"
                yield Case(f"{key} does not run on {platform}", platform, asked, hf_config, refusal=refusal)
        title = f"{key} is asked for, {UNKNOWN}"
        if variant.platforms:
            yield Case(title, None, asked, hf_config, refusal=UNKNOWN)
        else:
            yield Case(title, None, asked, hf_config, variant.module)
        for condition in variant.require:
            without = [item for item in variant.require if item is not condition]
            others, settings = _satisfying([*without, *_opposite(condition)])
            words = re.escape(f"{variant.name} without {condition}")
            yield Case(
                f"{key} needs {condition}",
                _home(variant),
                {**settings, "quantization": key},
                others,
                refusal=words,
            )


def _by_format(variant: Variant, declared: Sequence[Variant]) -> Iterator[Case]:
    needed, neuron_config = _satisfying(variant.require)
    settings = neuron_config or None
    for name in variant.formats:
        hf_config = needed | {QUANTIZED: FORMATS[variant.name][name]}
        for platform in PLATFORMS:
            if platform in (variant.platforms or PLATFORMS):
                title = f"the checkpoint is {name}, on {platform}"
                yield Case(title, platform, settings, hf_config, variant.module, stored=name)
            else:
                refusal = f"{variant.name} on {platform} .*possible: on"
                title = f"{name} is not loaded on {platform}"
                yield Case(title, platform, settings, hf_config, refusal=refusal, stored=name)
        title = f"the checkpoint is {name}, {UNKNOWN}"
        if variant.platforms:
            yield Case(title, None, settings, hf_config, refusal=UNKNOWN, stored=name)
        else:
            yield Case(title, None, settings, hf_config, variant.module, stored=name)
        for other in declared:
            for key in other.quantization:
                if other != variant and _home(variant) in (other.platforms or PLATFORMS):
                    refusal = f"quantization {re.escape(repr(key))} for a checkpoint with"
                    asked = {**neuron_config, "quantization": key}
                    title = f"{key} does not load {name}"
                    yield Case(title, _home(variant), asked, hf_config, refusal=refusal, stored=name)


def _by_rule(variant: Variant, declared: Sequence[Variant]) -> Iterator[Case]:
    if not variant.when:
        return
    before = _no_rule(declared[: list(declared).index(variant)])
    hf_config, neuron_config = _satisfying([*before, *variant.when, *variant.require])
    title = " and ".join(map(str, variant.when))
    for platform in variant.platforms or PLATFORMS:
        yield Case(f"{title}, on {platform}", platform, neuron_config or None, hf_config, variant.module)


def _by_platform(variant: Variant, declared: Sequence[Variant]) -> Iterator[Case]:
    hf_config, neuron_config = _satisfying([*_no_rule(declared), *variant.require])
    settings = neuron_config or None
    for platform in variant.default_on:
        yield Case(f"the default on {platform}", platform, settings, hf_config, variant.module)
    if variant.default_on:
        yield Case(f"nothing is asked for, {UNKNOWN}", None, settings, hf_config, refusal=UNKNOWN)


def _past(declared: Sequence[Variant]) -> Iterator[Case]:
    fallback = declared[0]
    hf_config, neuron_config = _satisfying(_no_rule(declared))
    for key in fallback.quantization:
        yield Case(f"{key} is asked for, {UNKNOWN}", None, {"quantization": key}, {}, fallback.module)
    for platform in (*PLATFORMS, None):
        title = f"nothing is asked for, on {platform}" if platform else f"nothing is asked for, {UNKNOWN}"
        if platform or not any(other.default_on for other in declared):
            yield Case(title, platform, neuron_config or None, hf_config, fallback.module)
    unknown = {"quantization": "of_nothing"}
    yield Case("a word that nothing has", None, unknown, {}, refusal="quantization 'of_nothing' .*possible: ")
    stored = {QUANTIZED: {"quant_method": "of_nothing"}}
    refusal = "quantization_config 'of_nothing' .*possible: unquantized"
    yield Case("a format that nothing loads", None, None, stored, refusal=refusal)


def _selected(case: Case, declared: Sequence[Variant]) -> str:
    """The module that the declarations give for a case that they do not refuse."""
    asked = (case.neuron_config or {}).get("quantization")
    form = checkpoint_format(case.hf_config.get(QUANTIZED) or {"quant_method": ""})

    def holds(conditions: Sequence[Condition]) -> bool:
        return all(_holds(condition, case) for condition in conditions)

    kinds: list[Callable[[Variant], bool]] = [
        lambda variant: asked in variant.quantization,
        lambda variant: form in variant.formats,
        lambda variant: (
            bool(variant.when)
            and holds([*variant.when, *variant.require])
            and (not variant.platforms or case.platform in variant.platforms)
        ),
        lambda variant: case.platform in variant.default_on and holds(variant.require),
    ]
    found = (variant.module for is_chosen in kinds for variant in declared if is_chosen(variant))
    return next(found, declared[0].module)


def _holds(condition: Condition, case: Case) -> bool:
    first, _, rest = condition.field.partition(".")
    of_plugin = first == "neuron_config" and rest
    value: Any = (case.neuron_config or {}) if of_plugin else case.hf_config
    for key in (rest if of_plugin else condition.field).split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None and condition.op in ("<", "<=", ">", ">="):
        return False
    return OPERATORS[condition.op](value, condition.value)


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


def _no_rule(variants: Sequence[Variant]) -> list[Condition]:
    """What keeps the rules of these variants from holding, beside that their fields are absent."""
    return [item for variant in variants for condition in variant.when[:1] for item in _opposite(condition)]


def _opposite(condition: Condition) -> list[Condition]:
    """What breaks a condition that an absent field would meet."""
    opposite = {"!=": "==", "not in": "in"}.get(condition.op)
    return [Condition(condition.field, opposite, condition.value)] if opposite else []  # type: ignore[arg-type]


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
