"""What a step of a port is given, and what it reports."""

from typing import Any, Literal

import msgspec

Status = Literal["done", "red", "waiting"]


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
