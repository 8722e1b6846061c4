"""The alias table, and the resolver that finds a field's value and says where it came from."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoport.errors import Problem
from autoport.schema import Fact

# Standard name -> spellings in config.json, in the order in which they are looked for.
ALIASES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
    ),
    "norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "activation": ("hidden_act", "hidden_activation", "activation_function"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "attention_bias": ("attention_bias",),
    "mlp_bias": ("mlp_bias",),
    "dtype": ("dtype", "torch_dtype"),
    "sliding_window": ("sliding_window",),
    "use_sliding_window": ("use_sliding_window",),
    "max_window_layers": ("max_window_layers",),
    "layer_types": ("layer_types",),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}

LARGEST_INTEGER = 2**40
LARGEST_LAYER_COUNT = 10_000

Check = Callable[[Any], str | None]


def is_integer(value: Any) -> str | None:
    """What is wrong with `value` as a size: a whole number from 1 to `LARGEST_INTEGER`."""
    if isinstance(value, bool) or not isinstance(value, int):
        return f"is {describe(value)}, not a whole number"
    return None if 1 <= value <= LARGEST_INTEGER else f"is {value}, not between 1 and {LARGEST_INTEGER}"


def is_layer_count(value: Any) -> str | None:
    """What is wrong with `value` as a number of layers."""
    return is_integer(value) or (
        f"is {value}, not a number of layers" if value > LARGEST_LAYER_COUNT else None
    )


def is_number(value: Any) -> str | None:
    """What is wrong with `value` as a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"is {describe(value)}, not a number"
    return None if value > 0 and math.isfinite(value) else f"is {value}, not a finite number above zero"


def is_flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"is {describe(value)}, not true or false"


def is_text(value: Any) -> str | None:
    return None if isinstance(value, str) else f"is {describe(value)}, not a string"


def is_text_list(value: Any) -> str | None:
    good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return None if good else f"is {describe(value)}, not a list of strings"


def describe(value: Any) -> str:
    """A value from a config, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Resolver:
    """Looks fields up in a config and in its class's defaults, and collects every problem.

    `null` in the config means that there is no value. As in transformers it also hides the class default
    of an optional field.

    Attributes:
        consumed: Config keys that were looked at.
        problems: Everything wrong so far.
        warnings: What a reader must know.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Fact], config_file: str):
        self.config = config
        self.defaults = defaults
        self.config_file = config_file
        self.consumed: set[str] = set()
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def problem(self, rule: str, found: str, next_step: str) -> None:
        self.problems.append(Problem(rule, found, self.config_file, next_step))

    def optional(self, name: str, check: Check) -> Fact | None:
        """The field's fact, or None for no value. A value of the wrong kind is a problem (CFG-TYPE)."""
        spellings = self._spellings(name)
        self.consumed.update(spellings)
        given = {key: self.config[key] for key in spellings if self.config.get(key) is not None}
        if given:
            key, value = next(iter(given.items()))
            self._check_agreement(given)
            fact = Fact(value, f"config.json: {key}")
        elif any(key in self.config for key in spellings):
            return None
        else:
            default = self._default(name)
            if default is None:
                return None
            key, fact = name, default
        wrong = check(fact.value)
        if wrong:
            self.problem("CFG-TYPE", f"{key} {wrong}", f"correct {key} in config.json")
            return None
        return fact

    def required(self, name: str, check: Check) -> Fact | None:
        """The field's fact, from the config or the class; no value at all is a problem (CFG-MISSING)."""
        count = len(self.problems)
        fact = self.optional(name, check)
        if fact is None and len(self.problems) == count:
            fact = self._default(name)
        if fact is None and len(self.problems) == count:
            spellings = " or ".join(self._spellings(name))
            self.problem(
                "CFG-MISSING",
                f"{name} has no value: neither config.json nor a config class gives {spellings}",
                f"add {self._spellings(name)[0]} to config.json",
            )
        return fact

    def _spellings(self, name: str) -> Sequence[str]:
        """The spellings that the config class declares, or every known one if it declares none."""
        declared = [key for key in ALIASES[name] if key in self.defaults]
        return declared or ALIASES[name]

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
