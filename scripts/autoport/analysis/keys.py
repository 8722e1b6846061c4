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
