"""`autoport analyze`: Step 2."""

from pathlib import Path

from autoport.cli.arguments import (
    AsJson,
    ContextLength,
    Incomplete,
    Name,
    PortBatchSize,
    PortInstance,
    PortLnc,
    PortRelax,
    WorkspacePath,
)


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    relax: PortRelax = [],
    context_length: ContextLength = None,
    batch_size: PortBatchSize = None,
    instance: PortInstance = None,
    lnc: PortLnc = None,
    incomplete: Incomplete = None,
    as_json: AsJson = False,
) -> None:
    """Step 2: plan the port (reference model, TP sizes, weight map); writes plan.json."""
    from autoport.cli.analysis_report import print_analysis
    from autoport.cli.chosen import given
    from autoport.cli.steps import run_single
    from autoport.step import Options

    passed = given(
        relax=relax,
        context_length=context_length,
        batch_size=batch_size,
        instance=instance,
        lnc=lnc,
        incomplete=incomplete,
    )
    run_single("analyze", name, workspace, Options(), as_json, passed=passed, show=print_analysis)
