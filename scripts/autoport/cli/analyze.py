"""`autoport analyze`: Step 2."""

from pathlib import Path

from autoport.cli.arguments import (
    AsJson,
    BatchSize,
    ContextLength,
    Incomplete,
    InstanceName,
    Lnc,
    Name,
    Relax,
    WorkspacePath,
)


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    relax: Relax = [],
    context_length: ContextLength = None,
    batch_size: BatchSize = 1,
    instance: InstanceName = "trn2.48xlarge",
    lnc: Lnc = 2,
    incomplete: Incomplete = False,
    as_json: AsJson = False,
) -> None:
    """Step 2: plan the port (reference model, TP sizes, weight map); writes plan.json."""
    from autoport.cli.analysis_report import print_analysis
    from autoport.cli.steps import run_single
    from autoport.step import Options

    run_single(
        "analyze",
        name,
        workspace,
        Options(
            relax=relax,
            context_length=context_length,
            batch_size=batch_size,
            instance=instance,
            lnc=lnc,
            incomplete=incomplete,
        ),
        as_json,
        show=print_analysis,
    )
