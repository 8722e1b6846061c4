"""No hardware rule of the simulator is without a call that breaks it and one that keeps it."""

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_decode_rules
import test_moe_rules
import test_operator_rules
import torch
import torch.distributed as dist
import vllm_neuron
from vllm_neuron.simulator import rules
from vllm_neuron.simulator.guards import check_loaded, guard_forward

SIMULATOR = Path(vllm_neuron.__file__).parent
STATED_BY = ("rules.require", "rules.require_row", "rules.fallback")

Site = tuple[str, int]
"""File below the simulator's package, and line where the call that states a rule begins."""


@functools.cache
def stated() -> dict[Site, int]:
    """Where the simulator states a rule -> last line of that call."""
    return {
        (str(path.relative_to(SIMULATOR)), node.lineno): node.end_lineno or node.lineno
        for path in SIMULATOR.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in STATED_BY
    }


class Seen:
    """Where rules were broken and kept while the table's calls ran."""

    def __init__(self) -> None:
        self.sites = stated()
        self.broken: set[Site] = set()
        self.kept: set[Site] = set()

    def note(self, keeps: bool) -> None:
        frame = sys._getframe(2)
        for _ in range(2):  # `require_row` is between the rule and `require`
            path = frame.f_code.co_filename
            if path.startswith(str(SIMULATOR)):
                name, line = str(Path(path).relative_to(SIMULATOR)), frame.f_lineno
                found = [
                    site for site, last in self.sites.items() if site[0] == name and site[1] <= line <= last
                ]
                (self.kept if keeps else self.broken).update(found)
            frame = frame.f_back


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    found = Seen()
    require, fallback = rules.require, rules.fallback

    def noting_require(condition, *args, **kwargs):
        found.note(bool(condition))
        require(condition, *args, **kwargs)

    def noting_fallback(condition, *args, **kwargs):
        found.note(not condition)
        return fallback(condition, *args, **kwargs)

    monkeypatch.setattr(rules, "require", noting_require)
    monkeypatch.setattr(rules, "fallback", noting_fallback)
    yield found
    rules.reset()


def attempt(call: Callable[..., object], arguments: dict) -> None:
    with contextlib.suppress(AssertionError, ValueError, NotImplementedError, RuntimeError):
        call(**arguments)


def test_every_rule_is_broken_and_kept_by_a_call_of_the_tables(seen):
    for module in (test_decode_rules, test_moe_rules, test_operator_rules):
        for rule in (*module.ERRORS.values(), *module.FALLBACKS.values()):
            attempt(rule.call, rule.bad)
            attempt(rule.call, rule.good)
    operators = {site for site in seen.sites if site[0].startswith("functional/")}
    assert len(operators) > 100
    assert sorted(operators - seen.broken) == []
    assert sorted(operators - seen.kept) == []


def test_every_rule_of_a_models_forward_is_broken_and_kept(seen, groups):
    x, model = torch.arange(4.0), torch.nn.Linear(2, 2)
    _, pair, _, world = groups
    for forward in (
        lambda: x.to("cpu"),
        lambda: x.tolist(),
        lambda: x[0].item(),
        lambda: rules.operator(lambda: x[0].item())(),
        lambda: [dist.all_reduce(torch.ones(2), group=group) for group in (pair, world)],
    ):
        with contextlib.suppress(NotImplementedError, RuntimeError), guard_forward():
            forward()
    check_loaded(model)
    with pytest.raises(NotImplementedError):
        check_loaded(model.to("meta"))
    guards = {site for site in seen.sites if site[0] == "simulator/guards.py"}
    assert len(guards) == len({site for site in seen.sites if not site[0].startswith("functional/")})
    assert sorted(guards - seen.broken) == []
    assert sorted(guards - seen.kept) == []


def test_a_rule_that_nobody_breaks_is_seen(seen):
    attempt(test_operator_rules.qkv, {})
    assert seen.kept
    assert not seen.broken
