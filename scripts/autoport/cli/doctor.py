"""`autoport doctor`: what this machine has."""

from pathlib import Path
from typing import Annotated

import typer

from autoport.cli.arguments import AsJson, WorkspacePath


def command(
    workspace: WorkspacePath = Path(),
    source: Annotated[
        str, typer.Option("--source", metavar="SOURCE", help="Compare its size with the free disk space.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="No Trainium is expected.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at Python, packages, workspace, Neuron device, hub and disk; stop where the port would."""
    from autoport.cli.output import note, print_json, print_table, working
    from autoport.doctor import examine
    from autoport.errors import ExitCode

    with working("Examining ..."):
        items = examine(workspace, dry_run, source)
    stops = [item for item in items if item.status == "stop"]
    if as_json:
        print_json({"status": "refused" if stops else "done", "items": items})
    else:
        rows = [(item.name, item.status, item.found, item.next_step) for item in items]
        print_table(("What", "Status", "Found", "Next"), rows)
    for item in stops:
        note(f"stop: {item.name}: {item.found}. Next: {item.next_step}")
    raise typer.Exit(ExitCode.REFUSED if stops else ExitCode.DONE)
