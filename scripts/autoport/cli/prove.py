"""`autoport prove`: the proof on the CPU."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Name, TpSizes, WorkspacePath


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    tp: TpSizes = [],
    as_json: AsJson = False,
) -> None:
    """Prove the port on the CPU: a tiny twin on the simulator against the Hugging Face class."""
    from autoport.cli.steps import run_single
    from autoport.port import Options

    run_single("prove", name, workspace, Options(tp_sizes=tp), as_json)
