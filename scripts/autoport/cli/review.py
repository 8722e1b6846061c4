"""`autoport review`: Step 7."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Name, WorkspacePath


def command(name: Name, workspace: WorkspacePath = Path(), as_json: AsJson = False) -> None:
    """Step 7: check the port's files against the checklists; writes review.json."""
    from autoport.cli.steps import run_single
    from autoport.port import Options

    run_single("review", name, workspace, Options(), as_json)
