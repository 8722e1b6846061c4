"""`autoport search-ops`: search before implementing."""

from pathlib import Path
from typing import Annotated

import typer

from autoport.cli.arguments import AsJson, WorkspacePath


def command(
    words: Annotated[
        list[str], typer.Argument(metavar="WORD...", help="What is needed, e.g. rmsnorm.", show_default=False)
    ],
    workspace: WorkspacePath = Path(),
    as_json: AsJson = False,
) -> None:
    """List what the workspace already offers for a word, the first choice first.

    Looks through functional, nn, utils, other models and installed kernels, by reading their source. Several
    words have to match together; synonyms count. Exit code 1 when nothing is found.
    """
    from autoport.cli.output import print_json
    from autoport.errors import ExitCode
    from autoport.search_ops import search
    from autoport.workspace import Workspace

    offers = search(Workspace.find(workspace), words)
    if as_json:
        print_json(offers)
    else:
        place = ""
        for offer in offers:
            if offer.place != place:
                place = offer.place
                print(f"{place}:")
            print(f"  {shortened(offer.name + offer.signature)}")
            print(f"    {offer.where}  {offer.use}")
            if offer.summary:
                print(f"    {offer.summary}")
        if not offers:
            print(f"nothing for {' '.join(words)}")
    raise typer.Exit(ExitCode.DONE if offers else ExitCode.RED)


def shortened(text: str, length: int = 300) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
