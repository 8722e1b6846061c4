"""`autoport port`: all steps."""

from pathlib import Path
from typing import Annotated

import typer

from autoport.cli.arguments import (
    AsJson,
    BatchSize,
    ContextLength,
    Force,
    Name,
    Relax,
    ReplaceRow,
    Source,
    TpSizes,
    TrustRemoteCode,
    WorkspacePath,
)


def command(
    name: Name,
    source: Source,
    workspace: WorkspacePath = Path(),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="No Trainium: prove the port on the CPU.")
    ] = False,
    review: Annotated[bool, typer.Option("--review", help="Pause after the analysis (exit code 3).")] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Go on after a --review pause.")] = False,
    relax: Relax = [],
    context_length: ContextLength = 4096,
    batch_size: BatchSize = 1,
    tp: TpSizes = [],
    force: Force = False,
    replace_row: ReplaceRow = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Port a model: research, plan, generate, register, document, review, prove."""
    from autoport.cli.output import EXIT_CODES, note, print_json, report_steps, working
    from autoport.port import STEPS, Options, StepResult, require_device, run_port
    from autoport.workspace import Port, Workspace

    options = Options(
        dry_run=dry_run,
        review=review,
        confirm=confirm,
        relax=relax,
        force=force,
        replace_row=replace_row,
        trust_remote_code=trust_remote_code,
        context_length=context_length,
        batch_size=batch_size,
        tp_sizes=tp,
    )
    require_device(options)
    port = Port(Workspace.find(workspace), name, source)
    results: list[StepResult] = []
    with port.workspace.lock(f"port-{name}"), working(f"Porting {name} from {source} ..."):
        for result in run_port(port, options, lambda _, step: note(f"step {step.number}: {step.title}")):
            results.append(result)
    if as_json:
        print_json({"name": name, "source": source, "steps": results})
    else:
        report_steps(results)
        if results[-1].status == "waiting":
            note(f"waiting for review: autoport port {name} {source} --confirm goes on")
        elif len(results) < len(STEPS):
            note(f"stopped after step {results[-1].number}; mend it and run the same command again")
    raise typer.Exit(EXIT_CODES[results[-1].status])
