"""The resolver that finds a field's value under any of its names and says where it came from."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoport import expressions
from autoport.errors import Problem
from autoport.research.aliases import ALIASES
from autoport.research.config_class import class_attributes
from autoport.research.config_defaults import config_defaults
from autoport.research.readings import READINGS
from autoport.research.values import ConfigValues, UnknownAttribute
from autoport.schema.facts import Fact
from autoport.schema.field_types import LARGEST_PART_COUNT, LARGEST_SIZE

SHAPE = ("hidden_size", "num_layers")  # that every published config gives
OUTER_KEYS = (
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
)  # a nested config may leave them to the outer one

Check = Callable[[Any], str | None]


def is_integer(value: Any) -> str | None:
    """What is wrong with `value` as a size: a whole number from 1 to `LARGEST_SIZE`."""
    too_large = isinstance(value, float) and value > LARGEST_SIZE  # as an integer beyond 64 bits is read
    if isinstance(value, bool) or not (isinstance(value, int) or too_large):
        return f"is {describe(value)}, not a whole number"
    return None if 1 <= value <= LARGEST_SIZE else f"is {value}, not between 1 and {LARGEST_SIZE}"


def is_count(value: Any) -> str | None:
    """What is wrong with `value` as a number that may be 0."""
    return None if value == 0 and type(value) is int else is_integer(value)


def is_part_count(value: Any) -> str | None:
    """What is wrong with `value` as a number of layers, heads or experts, from 1 to `LARGEST_PART_COUNT`."""
    too_many = f"is {value}; at most {LARGEST_PART_COUNT} layers, heads or experts can be planned"
    return is_integer(value) or (too_many if value > LARGEST_PART_COUNT else None)


def is_part_count_or_0(value: Any) -> str | None:
    """What is wrong with `value` as a number of experts, which 0 says there are none."""
    return is_count(value) or (is_part_count(value) if value else None)


def is_number(value: Any) -> str | None:
    """What is wrong with `value` as a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"is {describe(value)}, not a number"
    return None if value > 0 and math.isfinite(value) else f"is {value}, not a finite number above zero"


def is_flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"is {describe(value)}, not true or false"


def is_text(value: Any) -> str | None:
    return None if isinstance(value, str) else f"is {describe(value)}, not a string"


def is_flag_list(value: Any) -> str | None:
    good = isinstance(value, list) and all(isinstance(item, bool) for item in value)
    return None if good else f"is {describe(value)}, not a list of true and false"


def is_text_list(value: Any) -> str | None:
    good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return None if good else f"is {describe(value)}, not a list of strings"


def describe(value: Any) -> str:
    """A value from a config, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Resolver:
    """Looks fields up in a config and in its class, and collects every problem.

    `null` in the config means that there is no value. As in transformers it also hides the class default
    of an optional field.

    Attributes:
        config: The decoder's config: config.json, or the part of it at `path`.
        config_file: Name of config.json, for messages.
        model_type: That of `use_class`; empty before, with nothing taken from a class.
        defaults: Defaults that the config class declares; empty for a class that is not known.
        attributes: The values that the config class computes from `config` (see `config_class`).
        renamed: The class's `attribute_map`: standard name -> the name under which it keeps the value.
        path: Where `config` stands in config.json, e.g. ``"text_config."``.
        outer: config.json itself when `config` is nested in it.
        consumed: Config keys that were looked at.
        problems: Everything wrong so far.
        warnings: What a reader must know.
        rejected: The condition on which the config class raises an error for this config.
        without_value: Required fields for which neither the config nor the class has a name.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        config_file: str,
        path: str = "",
        outer: Mapping[str, Any] | None = None,
    ):
        self.config = config
        self.config_file = config_file
        self.path = path
        self.outer: Mapping[str, Any] = outer or {}
        self.defaults: Mapping[str, Fact] = {}
        self.attributes: Mapping[str, Fact] = {}
        self.renamed: Mapping[str, str] = {}
        self.consumed: set[str] = set()
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.model_type = ""
        self.rejected = ""
        self.without_value: list[str] = []

    def use_class(self, model_type: str) -> None:
        """Take defaults and computed values from transformers' config class, if it has one."""
        self.model_type = model_type
        self.defaults = config_defaults(model_type)
        computed = class_attributes(model_type, self.config, self.path)
        self.attributes = computed.facts
        if "attribute_map" in self.defaults:
            self.renamed = self.defaults["attribute_map"].value
        self.rejected = computed.rejected
        if computed.unfollowed:
            self.warnings.append(f"what the config class computes is not known: {computed.unfollowed}")

    def problem(self, rule: str, found: str, next_step: str) -> None:
        self.problems.append(Problem(rule, found, self.config_file, next_step))

    def attribute(self, key: str) -> Fact | None:
        """What the config class holds under `key` or under what it renames it to."""
        return self.attributes.get(self.renamed.get(key, key))

    def optional(self, name: str, check: Check, strict: bool = False) -> Fact | None:
        """The field's fact, or None for no value. A value of the wrong kind is a problem (CFG-TYPE).

        Args:
            strict: Take only what the config class declares, when the class is known.
        """
        if name in READINGS.get(self.model_type, {}):
            return self._computed(name, check)
        spellings = self._spellings(name, strict)
        self.consumed.update(spellings)
        fact = self._find(name, spellings)
        if fact is None:
            return None
        wrong = check(fact.value)
        if wrong and self.problems and fact.source.startswith("derived: "):
            return None  # what it was computed from is wrong already
        if wrong:
            key = (
                fact.source.removeprefix("config.json: ") if fact.source.startswith("config.json: ") else name
            )
            self.problem("CFG-TYPE", f"{key} {wrong}", f"correct {key} in config.json")
            return None
        return fact

    def _find(self, name: str, spellings: Sequence[str]) -> Fact | None:
        given = {key: self.config[key] for key in spellings if self.config.get(key) is not None}
        if given:
            self._check_agreement(given)
        if not any(key in self.config for key in spellings):
            for key in spellings:
                if key in OUTER_KEYS and self.outer.get(key) is not None:
                    return Fact(self.outer[key], f"config.json: {key}")
        for key in (*given, *spellings):
            fact = self.attribute(key)
            if fact is not None and key in given:
                if self._changed(fact.value, given[key]):
                    self.warnings.append(
                        f"config.json gives {self.path}{key} {describe(given[key])}, but the class has "
                        f"{describe(fact.value)} ({fact.source.removeprefix('derived: ')})"
                    )
                return None if fact.value is None else fact
            if fact is not None and fact.value is not None:
                return fact
            if key in given:
                return Fact(given[key], f"config.json: {self.path}{key}")
        if any(key in self.config for key in spellings):
            return None
        return self._default(name)

    @staticmethod
    def _changed(value: Any, given: Any) -> bool:
        return type(value) is not dict and value != given

    def required(self, name: str, check: Check) -> Fact | None:
        """The field's fact, from the config or the class; no value at all is a problem (CFG-MISSING)."""
        count = len(self.problems)
        fact = self.optional(name, check)
        if fact is None and len(self.problems) == count:
            fact = self._default(name)
        if fact is None and len(self.problems) == count:
            spellings = " or ".join(self._spellings(name))
            if not any(self._is_declared(key) for key in ALIASES[name]):
                self.without_value.append(name)
            self.problem(
                "CFG-MISSING",
                f"{name} has no value: neither config.json nor a config class gives {spellings}",
                f"add {self._spellings(name)[0]} to config.json",
            )
        if fact is not None and name in SHAPE and not any(key in self.config for key in ALIASES[name]):
            self.warnings.append(
                f"config.json gives no {self.path}{self._spellings(name)[0]}; "
                f"the class has {describe(fact.value)} ({fact.source}): please confirm"
            )
        return fact

    def _computed(self, name: str, check: Check) -> Fact | None:
        """The value of a field that the class computes (see `research.readings`)."""
        expression = READINGS[self.model_type][name]
        self.consumed.update(expressions.names(expression))
        try:
            fact = ConfigValues(self.config, self.model_type).compute(expression)
        except UnknownAttribute as error:
            self.problem(
                "CFG-MISSING", f"{name} has no value: {error} is missing", f"add {error} to config.json"
            )
            return None
        except ValueError as error:
            self.problem("CFG-TYPE", f"{name}: {error}", "correct it in config.json")
            return None
        fact = Fact(fact.value, fact.source.replace("config.json: ", f"config.json: {self.path}"))
        wrong = None if fact.value is None else check(fact.value)
        if wrong:
            self.problem("CFG-TYPE", f"{name} {wrong} ({fact.source})", "correct it in config.json")
            return None
        return None if fact.value is None else fact

    def _spellings(self, name: str, strict: bool = False) -> Sequence[str]:
        """The spellings that the config class has, or every known one if it has none."""
        if name == "partial_rotary_factor" and self.defaults:
            return [name]  # the class folds its other spellings into rope_parameters
        declared = [key for key in ALIASES[name] if self._is_declared(key)]
        return declared if declared or (strict and self.defaults) else ALIASES[name]

    def _is_declared(self, key: str) -> bool:
        own = self.renamed.get(key, key)
        return (
            key in self.defaults
            or own in self.defaults
            or (own in self.attributes and not self.attributes[own].source.startswith("config.json: "))
        )

    def _default(self, name: str) -> Fact | None:
        for key in ALIASES[name]:
            if key in self.defaults and self.defaults[key].value is not None:
                return self.defaults[key]
        return None

    def _check_agreement(self, given: Mapping[str, Any]) -> None:
        first = next(iter(given.values()))
        if any(value != first for value in given.values()):
            listing = ", ".join(f"{key} {describe(value)}" for key, value in given.items())
            self.problem("CFG-CONFLICT", f"two spellings disagree: {listing}", "keep the right one of them")
