"""`autoport smoke`: Step 8, offline inference."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoport.cli.arguments import BACKEND_SECONDS, AsJson, Name, On, TpSize, WorkspacePath, seconds

if TYPE_CHECKING:
    from autoport.validation.smoke import Smoke


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    on: On = None,
    tp: TpSize = None,
    timeout: Annotated[
        int | None,
        seconds(f"Longest time for the example (default: {BACKEND_SECONDS})."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the port's example and judge what it generates; writes smoke.json and results.md."""
    from autoport.cli.output import print_json, working
    from autoport.codegen.register import require_row
    from autoport.errors import ExitCode
    from autoport.port_state import Port
    from autoport.validation.backends import best_backend, open_backend
    from autoport.validation.smoke import needs_expert_parallel, smoke
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace), name)
    require_row(port)
    backend = open_backend(on or best_backend(), port.workspace, needs_expert_parallel(port), timeout)
    with port.lock(), working(f"Smoke test of {name} on {backend.name} ..."):
        result = smoke(port, backend, tp)
    if as_json:
        print_json(result)
    else:
        report(result, port.workspace.root)
    raise typer.Exit(ExitCode.DONE if result.passed else ExitCode.RED)


def report(result: "Smoke", root: Path) -> None:
    """Print the verdict for a person."""
    from autoport.cli.output import print_table

    print(f"Checkpoint: {result.checkpoint}, TP {result.checkpoint.tp_size}")
    print(f"Command:    {result.command}")
    print_table(("Check", "Result", "Found"), [(c.name, c.status, c.found) for c in result.checks])
    for generation in result.generations.generations if result.generations else []:
        print(f"  {generation.prompt!r} -> {generation.text[:100]!r}")
    for known in result.known:
        print(f"{known.id}\n  log:   {known.line}\n  cause: {known.cause}\n  fix:   {known.fix}")
    verdict = "green" if result.passed else f"RED (log: {root / result.log})"
    print(f"Smoke test: {verdict}, measured on {result.place}")
    if result.on != "trn2":
        print(f"On a trn2 instance, from the workspace: {result.on_device}")
