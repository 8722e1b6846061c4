"""`autoport prove`: the proof on the CPU."""

from pathlib import Path
from typing import Annotated

import typer

from autoport.cli.arguments import AsJson, Name, TpSizes, WorkspacePath


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    tp: TpSizes = [],
    variant: Annotated[
        str, typer.Option("--variant", metavar="VARIANT", help="Prove this implementation, e.g. fp8.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Prove the port on the CPU: a tiny twin on the simulator against the Hugging Face class."""
    from autoport.cli.chosen import given
    from autoport.cli.port_report import print_red_proof
    from autoport.cli.steps import run_single
    from autoport.step import Options

    if variant:
        prove_variant(name, workspace, variant, tp, as_json)
    else:
        run_single(
            "prove", name, workspace, Options(), as_json, passed=given(tp_sizes=tp), show=print_red_proof
        )


def prove_variant(name: str, workspace: Path, variant: str, tp: list[int], as_json: bool) -> None:
    """Prove one implementation, print the verdict, and exit with its code."""
    from autoport.cli.output import EXIT_CODES, print_json, working
    from autoport.port_state import Port
    from autoport.validation.variant_proof import run
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace), name)
    with port.lock(), working(f"Proof of {variant} ..."):
        outcome = run(port, variant, tp)
    if as_json:
        print_json(outcome)
    else:
        print(f"{variant}: {outcome.summary}")
    raise typer.Exit(EXIT_CODES[outcome.status])
