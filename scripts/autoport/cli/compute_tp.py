"""`autoport compute-tp`: tensor-parallel sizes from a config alone."""

from typing import Annotated

import typer

from autoport.cli.arguments import AsJson, BatchSize, ContextLength, Relax


def command(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="config.json, its folder, or a hub id.", show_default=False),
    ],
    relax: Relax = [],
    context_length: ContextLength = 4096,
    batch_size: BatchSize = 1,
    as_json: AsJson = False,
) -> None:
    """Show which tensor-parallel sizes a model can have, and why not the others (exit 1: none)."""
    from autoport.analysis.estimate import estimate_tensor_parallel
    from autoport.analysis.tensor_parallel import CANDIDATE_COLUMNS, candidate_rows, recommendation
    from autoport.cli.output import note, print_json, print_table
    from autoport.errors import ExitCode

    facts, plan = estimate_tensor_parallel(config, context_length, batch_size, relax)
    for warning in facts.warnings:
        note(f"warning: {warning}")
    if as_json:
        print_json({"architecture": facts.architecture, "weights": "estimated from the config", "plan": plan})
    else:
        print_table(CANDIDATE_COLUMNS, candidate_rows(plan), title=facts.architecture.value)
        size = f"{batch_size} x {context_length} tokens"
        print(f"KV cache for {size}; weights are estimated from the config.")
        print(f"Recommended: {recommendation(plan)}")
    raise typer.Exit(ExitCode.DONE if plan.recommended else ExitCode.RED)
