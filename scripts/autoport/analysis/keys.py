"""Checkpoint keys by layer: what each layer has, and under which prefix."""

import re
from collections.abc import Iterable

LAYER_KEY = re.compile(r"^(model\.)?layers\.(\d{1,6})\.(.+)$")


class CheckpointKeys:
    """The keys of a decoder checkpoint.

    Attributes:
        prefix: ``"model."``, or ``""`` for a checkpoint whose keys begin with ``layers.``.
        layers: Layer indices by the rest of the key (``self_attn.q_proj.weight`` -> {0, 1, ...}).
        others: Keys outside the layers.
    """

    def __init__(self, keys: Iterable[str]):
        self.layers: dict[str, set[int]] = {}
        self.others: set[str] = set()
        prefixes = set()
        for key in keys:
            match = LAYER_KEY.match(key)
            if match:
                prefixes.add(match[1] or "")
                self.layers.setdefault(match[3], set()).add(int(match[2]))
            else:
                self.others.add(key)
        self.prefix = "" if prefixes == {""} else "model."


def fold(key: str) -> tuple[str, int | None]:
    """Replace the first number in a key by ``{i}``: ``a.3.b`` -> (``a.{i}.b``, 3)."""
    match = re.search(r"(?<=\.)\d+(?=\.)", key)
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
