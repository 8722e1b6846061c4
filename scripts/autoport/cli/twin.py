"""`autoport twin`: the tiny twin of a model, as a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="config.json, its folder, or a hub id.", show_default=False),
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new or empty folder.", show_default=False)
    ],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the weights.")] = 0,
) -> None:
    """Build a tiny checkpoint with the structure of a model: its config shrunk, random weights."""
    from autoport.cli.output import working
    from autoport.validation.ranks import check_installed
    from autoport.validation.twin import build_from

    check_installed("torch")
    with working(f"Building the twin of {source} ..."):
        folder = build_from(source, directory, seed)
    print(folder)
