"""Checkpoint keys with their layer index taken out."""

import re
from collections.abc import Iterable, Mapping


def fold(key: str) -> tuple[str, int | None]:
    """Replace the first number in a key by ``{i}``: ``a.3.b`` -> (``a.{i}.b``, 3)."""
    match = re.search(r"(?<![^.])\d{1,9}(?=\.)", key)
    if match is None:
        return key, None
    return f"{key[: match.start()]}{{i}}{key[match.end() :]}", int(match[0])


def fold_all(keys: Iterable[str]) -> dict[str, set[int]]:
    """Folded keys, each with the indices that were folded away."""
    folded: dict[str, set[int]] = {}
    for key in keys:
        name, index = fold(key)
        folded.setdefault(name, set()).update(() if index is None else (index,))
    return folded


def fold_experts(folded: Mapping[str, set[int]]) -> dict[str, set[int]]:
    """Folded keys of one name for all experts; the experts are part of the name, as in ``{e: 0-7}``."""
    layers: dict[str, set[int]] = {}
    experts: dict[str, set[int]] = {}
    for key, indices in folded.items():
        match = re.search(r"(?<=experts\.)\d{1,9}(?=\.)", key)
        name = f"{key[: match.start()]}{{e}}{key[match.end() :]}" if match else key
        layers.setdefault(name, set()).update(indices)
        experts.setdefault(name, set()).update({int(match[0])} if match else ())
    return {name.replace("{e}", f"{{e: {ranges(experts[name])}}}"): found for name, found in layers.items()}


def label(key: str, indices: Iterable[int]) -> str:
    """A folded key with its layers, for messages."""
    layers = ranges(indices)
    return f"{key} (layers {layers})" if layers else key


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: {0, 1, 2, 5} -> ``0-2, 5``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in spans)
