"""`autoport generate`: Step 3-4."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Force, KeepEdited, Name, WorkspacePath


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    force: Force = False,
    keep_edited: KeepEdited = False,
    as_json: AsJson = False,
) -> None:
    """Steps 3 and 4: write config.py, factory.py, __init__.py and model.py."""
    from autoport.cli.steps import run_single
    from autoport.port import Options

    run_single("generate", name, workspace, Options(force=force, keep_edited=keep_edited), as_json)
