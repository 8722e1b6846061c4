"""Hardware rules: where the simulator fails or takes notes as the device would.

An operator states a rule in one of two ways:

- `require`: the device fails when the condition is false (a kernel assert or an error of the Python
  wrapper). It raises with the device's message. With `VLLM_NEURON_SIM_STRICT=0` it is recorded instead,
  and the operator goes on as the plugin's CPU mode does.
- `fallback`: the device computes the right values when the condition is true, but leaves the kernel for a
  slow path without a word. It is recorded, and so is what some kernel versions assert and newer ones may not.

What the plugin refuses in its CPU mode, too, is a plain exception in the operator, strict or not.

Both work in code traced by `torch.compile(fullgraph=True)`; a record is then made once per trace. There an
error arrives wrapped in a dynamo exception that carries the message. Numbers that may be symbolic (shapes)
belong in `got`, not in an f-string: `got` is formatted only when the rule is broken.
"""

import functools
import operator as builtin_operator
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

Kind = Literal["error", "fallback"]


@dataclass(frozen=True)
class Record:
    """One broken rule, with the number of times it was met."""

    operator: str
    kind: Kind
    rule: str
    message: str
    count: int = 1


_records: dict[tuple[str, Kind, str, str], Record] = {}


def records() -> list[Record]:
    """What was recorded in this process since the last `reset`, in the order of first occurrence."""
    return list(_records.values())


def reset() -> None:
    _records.clear()


def require(
    condition: bool,
    operator: str,
    rule: str,
    message: str,
    error: type[Exception] = AssertionError,
    *,
    got: object = None,
) -> None:
    """State what the device needs.

    Args:
        condition: true when the device would accept the call.
        operator: name of the operator, as exported.
        rule: short id of the rule, unique within the operator.
        message: the device's wording, without the offending value when `got` is given.
        error: exception type that the device raises.
        got: offending value (number, shape or dtype); appended to the message as ", got ...".

    Raises:
        error: the condition is false and the simulator is strict.
    """
    if not condition:
        _broken(operator, "error", rule, _with_value(message, got), error)


def fallback(condition: bool, operator: str, message: str, *, got: object = None) -> bool:
    """Record that the device would take the slow path, when `condition` is true. Returns the condition."""
    if condition:
        _broken(operator, "fallback", "slow-path", _with_value(message, got), None)
    return condition


def _with_value(message: str, got: object) -> str:
    return message if got is None else f"{message}, got {_concrete(got)}"


def _concrete(value: object) -> object:
    """`value` with symbolic integers made plain, so that a message can be built while tracing."""
    if isinstance(value, (tuple, list)):
        return tuple([builtin_operator.index(n) for n in value])
    if isinstance(value, int):
        return builtin_operator.index(value)
    return value


def _is_strict() -> bool:
    return os.environ.get("VLLM_NEURON_SIM_STRICT", "1") != "0"


# Runs for real at trace time and leaves nothing in the graph.
@torch.compiler.assume_constant_result
def _broken(operator: str, kind: Kind, rule: str, message: str, error: type[Exception] | None) -> None:
    if error is not None and _is_strict():
        raise error(message)
    key = (operator, kind, rule, message)
    known = _records.get(key)
    _records[key] = replace(known, count=known.count + 1) if known else Record(operator, kind, rule, message)


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def operator(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function as an operator: rules for model code do not hold for what it does inside."""

    @functools.wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        _depth.value += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth.value -= 1

    return marked


def inside_operator() -> bool:
    """True while an operator runs in this thread. Always false while `torch.compile` traces."""
    return _depth.value > 0


def require_row(tensor: torch.Tensor | None, size: int, operator: str, name: str, message: str) -> None:
    """Kernels read a vector as one row: `tensor` must be None or [1, size]. The rule's id is "<name>-2d"."""
    if tensor is not None:
        require(shape_is(tensor, (1, size)), operator, f"{name}-2d", message, got=tensor.shape)


def shape_is(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    return tuple(tensor.shape) == tuple(shape)
