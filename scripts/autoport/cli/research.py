"""`autoport research`: Step 1."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Name, Source, TrustRemoteCode, WorkspacePath


def command(
    name: Name,
    source: Source,
    workspace: WorkspacePath = Path(),
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Step 1: read the config and the checkpoint's headers; writes facts.json and checkpoint.json."""
    from autoport.cli.steps import run_single
    from autoport.port import Options

    run_single("research", name, workspace, Options(trust_remote_code=trust_remote_code), as_json, source)
