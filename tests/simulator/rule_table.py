"""Tables of hardware rules: for each, a call that breaks it and one that does not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from vllm_neuron.simulator import rules


@dataclass
class Rule:
    """`call(**bad)` breaks a rule, `call(**good)` does not. `message`: pattern, or text of a fallback."""

    call: Callable[..., Any]
    bad: dict[str, Any]
    message: str
    good: dict[str, Any]
    error: type[Exception] = AssertionError


def check_error(rule: Rule) -> None:
    with pytest.raises(rule.error, match=rule.message):
        rule.call(**rule.bad)
    rule.call(**rule.good)


def check_fallback(rule: Rule) -> None:
    rules.reset()
    rule.call(**rule.bad)
    assert any(r.kind == "fallback" and rule.message in r.message for r in rules.records())
    rules.reset()
    rule.call(**rule.good)
    assert not any(rule.message in r.message for r in rules.records())


def check_named(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Each argument by itself is refused by name."""
    for name, value in arguments.items():
        with pytest.raises(NotImplementedError, match=name):
            call(**{name: value})
