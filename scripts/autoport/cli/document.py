"""`autoport document`: Step 6."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Force, KeepEdited, Name, WorkspacePath


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    force: Force = False,
    keep_edited: KeepEdited = False,
    as_json: AsJson = False,
) -> None:
    """Step 6: write the run script, the results file, the README and the logit test."""
    from autoport.cli.steps import run_single
    from autoport.step import Options

    run_single("document", name, workspace, Options(force=force, keep_edited=keep_edited), as_json)
