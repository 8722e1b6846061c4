"""Options that a port keeps: what a command passes, over what the port was run with before."""

from collections.abc import Collection
from typing import Any

import msgspec

from autoport.cli.output import note
from autoport.port import STEPS
from autoport.port_state import Chosen, Port
from autoport.step import Options, chosen_words, spelled


def given(relax: list[str] | None = None, tp_sizes: list[int] | None = None, **passed: Any) -> Chosen:
    """What the command line passes; None, and an empty list, where it does not."""
    return Chosen(relax=[] if relax == ["none"] else relax or None, tp_sizes=tp_sizes or None, **passed)


def settled(port: Port, passed: Chosen, options: Options, steps: Collection[str] = STEPS) -> Options:
    """The options of a run of `steps`, with those of the port that are not passed.

    A person is told of those that are the port's, and of those that are others than before.
    """
    before, new = port.manifest.chosen.values(), passed.values()
    options = msgspec.structs.replace(options, **before | new)
    used = {name for step in steps for name in STEPS[step].options}
    words = [
        word for name, words in chosen_words(options).items() if name in used - new.keys() for word in words
    ]
    if words:
        note(f"as before: {' '.join(words)}")
    known = {name for step in port.manifest.steps if step in STEPS for name in STEPS[step].options}
    for name, value in new.items():
        if name in used & known and value != before.get(name):
            note(f"{spelled(name)} {_text(before.get(name))} -> {_text(value)}")
    return options


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "default"
    return "default" if value is None else str(value)
