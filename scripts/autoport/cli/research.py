"""`autoport research`: Step 1."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Name, Probe, Source, WorkspacePath


def command(
    name: Name,
    source: Source,
    workspace: WorkspacePath = Path(),
    probe: Probe = False,
    as_json: AsJson = False,
) -> None:
    """Step 1: read config, modeling source and headers; writes facts.json and checkpoint.json."""
    from autoport.cli.steps import run_single
    from autoport.step import Options

    options = Options(probe=probe)
    run_single("research", name, workspace, options, as_json, source)
