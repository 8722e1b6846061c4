"""`autoport research`: Step 1."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Name, Probe, Source, WorkspacePath


def command(
    name: Name,
    source: Source,
    workspace: WorkspacePath = Path(),
    probe: Probe = None,
    as_json: AsJson = False,
) -> None:
    """Step 1: read config, modeling source and headers; writes facts.json and checkpoint.json."""
    from autoport.cli.chosen import given
    from autoport.cli.steps import run_single
    from autoport.step import Options

    run_single("research", name, workspace, Options(), as_json, source, passed=given(probe=probe))
