"""JSON of a model's files, which may hold anything: a value that can be used, or an error that says why not."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

DEEPEST = 64  # levels of objects and lists; published configs have fewer than ten
LONGEST_NUMBER = 300  # digits of an integer; a float holds it then


class UnusableJson(ValueError):
    """JSON that is valid, and that no file of a model can mean."""


def parse_json(text: str) -> Any:
    """Decode JSON.

    Returns:
        The value; an integer beyond 64 bits is a float (some configs write "no limit" as 10**30).

    Raises:
        UnusableJson: A key twice in one object, an integer of more than 300 digits, or more than 64 levels,
            whatever the interpreter's recursion limit is.
        ValueError: The text is no JSON; NaN and Infinity are none.
    """
    try:
        value = json.loads(
            text, parse_constant=_no_constant, parse_int=_number, object_pairs_hook=_without_repeats
        )
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(DEEPEST):
        level = [item for part in level for item in _items(part) if isinstance(item, (dict, list))]
    if level:
        raise _too_deep()
    return value


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> UnusableJson:
    return UnusableJson(f"nested too deep: more than {DEEPEST} levels")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise UnusableJson(f"key {repeated!r:.80} appears twice in one object")
    return found


def _number(digits: str) -> int | float:
    if len(digits) > LONGEST_NUMBER:
        raise UnusableJson(f"a number of {len(digits.lstrip('-'))} digits: {digits[:20]}...")
    value = int(digits)
    return value if abs(value) < 2**63 else float(value)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
