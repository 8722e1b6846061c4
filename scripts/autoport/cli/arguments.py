"""Arguments and options that several subcommands share."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from autoport.errors import refuse


def _one_of_both(context: typer.Context, wanted: bool) -> bool:
    """Refuse (OPT-EDITED) `--force` beside `--keep-edited`; the option that is read second sees the first."""
    if wanted and (context.params.get("force") or context.params.get("keep_edited")):
        raise refuse(
            "OPT-EDITED",
            "--force overwrites what --keep-edited keeps",
            "options --force and --keep-edited",
            "pass one of them",
        )
    return wanted


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="snake_case name of the port, e.g. yi.", show_default=False)
]
Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="Checkpoint folder or Hugging Face model id.", show_default=False),
]
WorkspacePath = Annotated[
    Path, typer.Option("--workspace", "-w", metavar="DIR", help="Checkout that contains vllm_neuron/.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", callback=_one_of_both, help="Overwrite generated files that were edited by hand."
    ),
]
KeepEdited = Annotated[
    bool,
    typer.Option(
        "--keep-edited",
        callback=_one_of_both,
        help="Keep files edited by hand; write a new text beside them, as FILE.new.",
    ),
]
ReplaceRow = Annotated[
    bool, typer.Option("--replace-row", help="Replace a registry row of the same architecture.")
]
NoRegister = Annotated[
    bool, typer.Option("--no-register", help="Leave registry.py as it is; the port is proven all the same.")
]
Relax = Annotated[
    list[str],
    typer.Option("--relax", metavar="RULE", help="Relax a TP rule (even-heads); the price is printed."),
]
ContextLength = Annotated[
    int | None,
    typer.Option(
        "--context-length",
        min=1,
        help="Tokens per sequence for the KV cache (default: 4096, or the model's positions if fewer).",
        show_default=False,
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences for the KV cache.")]
InstanceName = Annotated[
    str,
    typer.Option(
        "--instance",
        metavar="TYPE",
        help="trn2.48xlarge, trn2.3xlarge or trn3; set more with ,devices=N,hbm-gb=N,reserve-gb=N.",
    ),
]
Lnc = Annotated[int, typer.Option("--lnc", help="Physical cores per logical core: 1 or 2.")]
# The options of a port: None where they are not passed, so that the port's own are taken (see `cli.chosen`).
PortBatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Sequences for the KV cache (default: 1).", show_default=False),
]
PortInstance = Annotated[
    str | None,
    typer.Option(
        "--instance",
        metavar="TYPE",
        help="trn2.48xlarge (default), trn2.3xlarge or trn3; set more with ,devices=N,hbm-gb=N,reserve-gb=N.",
        show_default=False,
    ),
]
PortLnc = Annotated[
    int | None,
    typer.Option("--lnc", help="Physical cores per logical core: 1 or 2 (default).", show_default=False),
]
PortRelax = Annotated[
    list[str],
    typer.Option(
        "--relax",
        metavar="RULE",
        help="Relax a TP rule (even-heads); the price is printed. none: relax no rule any more.",
    ),
]
Probe = Annotated[
    bool | None,
    typer.Option(
        "--probe/--no-probe",
        help="Confirm what was read by running pieces of transformers' class (needs torch).",
        show_default=False,
    ),
]
Incomplete = Annotated[
    bool | None,
    typer.Option(
        "--incomplete/--no-incomplete",
        help="Leave what is out of scope as functions to write by hand, with the evidence.",
        show_default=False,
    ),
]
TpSizes = Annotated[
    list[int],
    typer.Option("--tp", metavar="N", min=1, help="TP size to prove; repeat for more (default 1 and 2)."),
]
TpSize = Annotated[
    int | None,
    typer.Option("--tp", metavar="N", min=1, help="TP size (default: the recommended one, if it fits here)."),
]
On = Annotated[
    Literal["simulator", "cpu-mode", "trn2"] | None,
    typer.Option("--on", help="Where to run (default: trn2 where there is a device, else simulator)."),
]
BACKEND_SECONDS = (
    "600 on the simulator, 1800 in CPU mode, 7200 on trn2"  # `validation.backends.START_SECONDS`
)


def seconds(text: str) -> Any:
    """An option that is a number of seconds, at most a day."""
    return typer.Option(metavar="SECONDS", min=1, max=86_400, help=text)
