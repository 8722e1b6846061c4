"""`autoport check-registry`: rows of the plugin's registry.py that cannot work."""

from pathlib import Path

import typer

from autoport.cli.arguments import AsJson, WorkspacePath


def command(workspace: WorkspacePath = Path(), as_json: AsJson = False) -> None:
    """List rows of registry.py whose class or package does not exist; exit 1 if there is one."""
    from autoport.cli.output import print_json, print_table
    from autoport.codegen.registry_rows import broken_rows
    from autoport.errors import ExitCode
    from autoport.workspace import Workspace

    broken = broken_rows(Workspace.find(workspace))
    if as_json:
        print_json(broken)
    elif broken:
        print_table(("Architecture", "From", "Found"), [(r.architecture, r.origin, r.found) for r in broken])
    else:
        print("every row has its class")
    raise typer.Exit(ExitCode.RED if broken else ExitCode.DONE)
