"""`autoport register`: Step 5."""

from pathlib import Path
from typing import Annotated

import typer

from autoport.cli.arguments import AsJson, Name, ReplaceRow, WorkspacePath


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    replace_row: ReplaceRow = False,
    alias: Annotated[
        list[str],
        typer.Option(
            "--alias", metavar="ARCHITECTURE", help="Register this spelling of the architecture, too; repeat."
        ),
    ] = [],
    as_json: AsJson = False,
) -> None:
    """Step 5: add the architecture to the plugin's registry.py."""
    from autoport.cli.steps import run_single
    from autoport.step import Options

    options = Options(replace_row=replace_row, no_register=False, aliases=alias)
    run_single("register", name, workspace, options, as_json)
