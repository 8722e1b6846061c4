"""Checkpoint keys with their layer index taken out."""

import re
from collections.abc import Iterable


def fold(key: str) -> tuple[str, int | None]:
    """Replace the first number in a key by ``{i}``: ``a.3.b`` -> (``a.{i}.b``, 3)."""
    match = re.search(r"(?<![^.])\d{1,9}(?=\.)", key)
    if match is None:
        return key, None
    return f"{key[: match.start()]}{{i}}{key[match.end() :]}", int(match[0])


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: {0, 1, 2, 5} -> ``0-2, 5``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in spans)
