"""What a step of a port is given, and what it reports."""

import shlex
from typing import Any, Literal

import msgspec

from autoport.port_state import Chosen, Port

Status = Literal["done", "red", "waiting"]
# Names of the switches in `Options` that a run after a pause needs again.
FLAGS = ("dry_run", "force", "keep_edited", "replace_row", "no_register")


class Options(msgspec.Struct):
    """What the user chose; every step takes what it needs.

    Attributes:
        dry_run: No Trainium: Phase C is the proof on the simulator.
        review: Pause after Step 2.
        confirm: Go on after a pause.
        relax: Names of rules to relax, e.g. ``even-heads``.
        force: Overwrite files that were edited by hand.
        keep_edited: Keep files that were edited by hand, and write a new text beside them.
        replace_row: Replace a registry row of the same architecture.
        aliases: Other spellings of the architecture that get a registry row, too.
        no_register: Leave registry.py as it is; None: as the port remembers it.
        probe: Confirm the reading of the modeling file by running pieces of transformers' class.
        context_length: Tokens per sequence for the KV-cache estimate; None: see `planned_context`.
        batch_size: Sequences for the KV-cache estimate.
        instance: Instance type that the port is planned for.
        lnc: Physical cores per logical core of it.
        incomplete: Leave what no declaration covers to be written by hand, instead of a refusal.
        tp_sizes: Tensor-parallel sizes for the proof (default: 1 and 2, where valid).
    """

    dry_run: bool = False
    review: bool = False
    confirm: bool = False
    relax: list[str] = []
    force: bool = False
    keep_edited: bool = False
    replace_row: bool = False
    no_register: bool | None = None
    aliases: list[str] = []
    probe: bool = False
    context_length: int | None = None
    batch_size: int = 1
    instance: str = "trn2.48xlarge"
    lnc: int = 2
    tp_sizes: list[int] = []
    incomplete: bool = False


class Outcome(msgspec.Struct):
    """What a step reports: its status, one line for the table, and data for `--json`."""

    status: Status
    summary: str
    data: Any = None
    files: list[str] = []


def command_line(port: Port, options: Options) -> str:
    """The command that goes on with this port from any folder, with the options that change its result."""
    words = ["autoport", "port", port.name, "--workspace", str(port.workspace.root)]
    words += [f"--{spelled(name)}" for name in FLAGS if getattr(options, name)]
    return shlex.join([*words, *(word for chosen in chosen_words(options).values() for word in chosen)])


def chosen_words(options: Options) -> dict[str, list[str]]:
    """The words of the command line for each option of `Chosen` that is not the default."""
    default, words = Options(), {}
    for name in Chosen.__struct_fields__:
        value = getattr(options, name)
        if value != getattr(default, name):
            words[name] = _words(f"--{spelled(name)}", value)
    return words


def spelled(name: str) -> str:
    """An option of `Options` as the command line has it, without its dashes."""
    return "tp" if name == "tp_sizes" else name.replace("_", "-")


def _words(option: str, value: Any) -> list[str]:
    if value is True:
        return [option]
    return [word for item in (value if isinstance(value, list) else [value]) for word in (option, str(item))]
