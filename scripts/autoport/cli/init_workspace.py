"""`autoport init-workspace`: a workspace to try things in."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new or empty folder.", show_default=False)
    ],
) -> None:
    """Make a workspace from the bundled simulator, with an empty registry."""
    from autoport.workspace import Workspace

    print(Workspace.create(directory).root)
