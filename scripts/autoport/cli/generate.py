"""`autoport generate`: Step 3-4."""

from pathlib import Path
from typing import Annotated

import typer

from autoport.cli.arguments import AsJson, Force, KeepEdited, Name, WorkspacePath


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    force: Force = False,
    keep_edited: KeepEdited = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Write nothing; list which decision brings which lines of model.py."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Steps 3 and 4: write config.py, factory.py, __init__.py and model.py."""
    if explain:
        return _explain(name, workspace, as_json)
    from autoport.cli.steps import run_single
    from autoport.step import Options

    run_single("generate", name, workspace, Options(force=force, keep_edited=keep_edited), as_json)


def _explain(name: str, workspace: Path, as_json: bool) -> None:
    from autoport.cli.output import note, print_json, print_table
    from autoport.codegen.explain import explain
    from autoport.port_state import Port
    from autoport.schema.plan import Plan
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace), name)
    blocks = explain(port.read_state("plan.json", Plan, "analyze"), port.workspace.package)
    if as_json:
        print_json(blocks)
        return
    rows = [
        (
            f"{block.first}-{block.last}" if block.last > block.first else str(block.first),
            block.section,
            block.template,
            "\n".join(f"{field} = {value}" for field, value in block.decisions.items()),
            "\n".join(block.sources),
        )
        for block in blocks
    ]
    print_table(("Lines", "Section", "Template", "Decision", "Known from"), rows)
    path = f"{port.workspace.package}/model/{name}/model.py"
    if port.file_status(path) != "ours":
        note(f"{path} is not as it was generated; the lines are those of the generated text")
