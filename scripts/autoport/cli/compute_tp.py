"""`autoport compute-tp`: tensor-parallel sizes, and expert parallelism, from a config alone."""

from typing import TYPE_CHECKING, Annotated

import typer

from autoport.cli.arguments import (
    AsJson,
    BatchSize,
    ContextLength,
    InstanceName,
    Lnc,
    Relax,
)

if TYPE_CHECKING:
    from autoport.analysis.estimate import Estimate


def command(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="config.json, its folder, or a hub id.", show_default=False),
    ],
    relax: Relax = [],
    context_length: ContextLength = None,
    batch_size: BatchSize = 1,
    instance: InstanceName = "trn2.48xlarge",
    lnc: Lnc = 2,
    explain: Annotated[
        int | None,
        typer.Option("--explain", metavar="TP", min=1, help="Show what one rank holds at this size."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which tensor-parallel sizes a model can have, and why not the others (exit 1: none)."""
    from autoport.analysis.estimate import estimate_parallelism
    from autoport.analysis.instances import find_instance
    from autoport.analysis.memory import MEMORY_COLUMNS, memory_rows
    from autoport.analysis.tensor_parallel import CANDIDATE_COLUMNS, candidate_rows, recommendation
    from autoport.cli.output import note, print_json, print_table
    from autoport.cli.parallel_report import hardware_text, print_experts
    from autoport.errors import ExitCode

    hardware = find_instance(instance, lnc)
    estimate = estimate_parallelism(config, context_length, batch_size, relax, hardware)
    facts, plan = estimate.facts, estimate.plan
    for warning in facts.warnings:
        note(f"warning: {warning}")
    for key, value in facts.unconsumed.items():
        note(f"warning: {key} is {value!r:.60}, which no rule took into account")
    if as_json:
        document = {"architecture": facts.architecture, "weights": "estimated from the config", "plan": plan}
        print_json(document | {"experts": estimate.experts, "vision": estimate.vision})
    elif explain:
        print_table(MEMORY_COLUMNS, memory_rows(plan, explain), title=f"TP {explain}")
    else:
        print_table(CANDIDATE_COLUMNS, candidate_rows(plan), title=facts.architecture.value)
        left_out = ", without the vision tower" if estimate.vision else ""
        print(f"KV cache for {batch_size} x {plan.context_length} tokens;", end=" ")
        print(f"weights are estimated from the config{left_out}.")
        print(f"{hardware_text(plan)} ({hardware.source}).")
        for text in plan.assumptions:
            print(f"Assumption: {text}.")
        if estimate.experts:
            print_experts(estimate.experts, plan)
        _print_vision(estimate)
        print(f"Recommended: {recommendation(plan)}")
    raise typer.Exit(ExitCode.DONE if plan.recommended else ExitCode.RED)


def _print_vision(estimate: "Estimate") -> None:
    if estimate.vision:
        valid = [str(tp) for tp, broken in estimate.vision.items() if not broken]
        print(f"Vision tower alone: TP {', '.join(valid) or 'none'}.")
