"""`autoport register`: Step 5."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Name, ReplaceRow, WorkspacePath


def command(
    name: Name, workspace: WorkspacePath = Path(), replace_row: ReplaceRow = False, as_json: AsJson = False
) -> None:
    """Step 5: add the architecture to the plugin's registry.py."""
    from autoport.cli.steps import run_single
    from autoport.port import Options

    run_single("register", name, workspace, Options(replace_row=replace_row, no_register=False), as_json)
