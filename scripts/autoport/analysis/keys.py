"""Checkpoint keys by layer: what each layer has, and under which prefix."""

import re
from collections.abc import Iterable

from autoport.families.family import Keys


class CheckpointKeys:
    """The keys of a decoder checkpoint.

    Attributes:
        names: The family's names.
        prefix: What stands before the decoder's keys, e.g. ``"model."`` or nothing.
        layers: Layer indices by the rest of the key (``self_attn.q_proj.weight`` -> {0, 1, ...}).
        others: Keys outside the layers.
    """

    def __init__(self, keys: Iterable[str], names: Keys = Keys()):
        bases = "|".join(re.escape(base) for base in names.bases)
        layer_key = re.compile(rf"^({bases}){re.escape(names.layers)}\.(\d{{1,6}})\.(.+)$")
        self.names = names
        self.layers: dict[str, set[int]] = {}
        self.others: set[str] = set()
        prefixes = set()
        for key in keys:
            match = layer_key.match(key)
            if match:
                prefixes.add(match[1])
                self.layers.setdefault(match[3], set()).add(int(match[2]))
            else:
                self.others.add(key)
        self.prefix = next((base for base in names.bases if base in prefixes), names.bases[0])

    @property
    def layer(self) -> str:
        """Prefix of a layer's keys, with ``{i}`` for its index."""
        return f"{self.prefix}{self.names.layers}.{{i}}."

    def in_layers(self, name: str, kind: str) -> bool:
        """Whether any layer has ``<name>.<kind>``."""
        return bool(name) and f"{name}.{kind}" in self.layers

    def outside(self, name: str, kind: str) -> bool:
        """Whether the decoder or the whole model has ``<name>.<kind>`` outside its layers."""
        return f"{self.prefix}{name}.{kind}" in self.others or f"{name}.{kind}" in self.others
