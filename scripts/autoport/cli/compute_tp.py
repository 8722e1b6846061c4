"""`autoport compute-tp`: tensor-parallel sizes, and expert parallelism, from a config alone."""

from typing import TYPE_CHECKING, Annotated

import typer

from autoport.cli.arguments import AsJson, BatchSize, ContextLength, InstanceName, Lnc, Relax

if TYPE_CHECKING:
    from autoport.analysis.estimate import Estimate


def command(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="config.json, its folder, or a hub id.", show_default=False),
    ],
    relax: Relax = [],
    context_length: ContextLength = 4096,
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
    from autoport.analysis.tensor_parallel import CANDIDATE_COLUMNS, candidate_rows, recommendation
    from autoport.cli.output import note, print_json, print_table
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
        print_json(
            document | {"experts": estimate.experts, "vision": estimate.vision, "parts": estimate.parts}
        )
    elif explain:
        print_table(("What", "Per rank", "How"), explain_rows(estimate, explain), title=f"TP {explain}")
    else:
        print_table(CANDIDATE_COLUMNS, candidate_rows(plan), title=facts.architecture.value)
        print(f"KV cache for {batch_size} x {context_length} tokens; weights are estimated from the config.")
        print(
            f"{plan.instance} at LNC {plan.lnc}: {plan.cores} logical cores of {plan.bytes_per_core / 1e9:.0f} GB, "
            f"{plan.weight_limit_bytes / 1e9:.0f} GB of it for weights ({hardware.source})."
        )
        _print_experts(estimate)
        _print_vision(estimate)
        print(f"Recommended: {recommendation(plan)}")
    raise typer.Exit(ExitCode.DONE if plan.recommended else ExitCode.RED)


def _print_experts(estimate: "Estimate") -> None:
    from autoport.cli.output import print_table

    experts = estimate.experts
    if experts is None:
        return
    rows = [
        (
            item.tp_size,
            item.ep_degree,
            "yes" if item.valid else "no",
            "\n".join(f"{v.rule}: {v.text}" for v in item.violations),
        )
        for item in experts.candidates
    ]
    title = f"Expert parallelism: {experts.num_experts} experts, world {experts.world_size}"
    print_table(("TP sub-group", "ep_degree", "Valid", "Why"), rows, title=title)
    needed = "needed" if estimate.plan.recommended is None else "not needed: a TP size fits"
    print(f"Expert parallelism is {needed}; {experts.note}.")


def _print_vision(estimate: "Estimate") -> None:
    if estimate.vision:
        valid = [str(tp) for tp, broken in estimate.vision.items() if not broken]
        print(f"Vision tower alone: TP {', '.join(valid) or 'none'}.")


def explain_rows(estimate: "Estimate", tp: int) -> list[tuple[str, str, str]]:
    """What one rank holds at a TP size, part by part.

    Raises:
        Refusal: TP-EXPLAIN for a size that the table does not have.
    """
    from autoport.errors import refuse

    plan = estimate.plan
    candidate = next((item for item in plan.candidates if item.tp_size == tp), None)
    if candidate is None:
        sizes = ", ".join(str(item.tp_size) for item in plan.candidates)
        raise refuse("TP-EXPLAIN", f"TP {tp} is not in the table", "option --explain", f"use one of {sizes}")
    kv = estimate.facts.fields["num_kv_heads"].value
    rows = [
        (name, _gb(part.per_rank(tp, kv)), _how(part.split, part.kv_heads, part.copied, tp, kv))
        for name, part in estimate.parts.items()
    ]
    copies = f", {candidate.kv_replicas} ranks share each" if candidate.kv_replicas > 1 else ""
    heads = f"{candidate.kv_heads_per_rank} KV heads{copies}"
    if "kv_lora_rank" in estimate.facts.fields:
        heads = "latent, whole on every rank"
    cache = f"{heads}; {plan.batch_size} x {plan.context_length} tokens in bfloat16"
    total = candidate.weight_bytes_per_rank + candidate.kv_bytes_per_rank + candidate.reserve_bytes
    rows += [
        ("KV cache", _gb(candidate.kv_bytes_per_rank), cache),
        ("reserve", _gb(candidate.reserve_bytes), "assumed: compiled graphs, activations, collectives"),
        ("total", _gb(total), f"of {_gb(plan.bytes_per_core)} per logical core"),
    ]
    if candidate.padded_vocab_size != estimate.facts.fields["vocab_size"].value:
        rows.append(("padding", "", f"vocabulary to {candidate.padded_vocab_size}"))
    rows += [(violation.rule, "broken", violation.text) for violation in candidate.violations]
    return rows


def _gb(size: int) -> str:
    return f"{size / 1e9:.3f} GB"


def _how(split: int, kv_heads: int, copied: int, tp: int, kv: int) -> str:
    ways = [f"split {tp} ways"] if split else []
    if kv_heads:
        ways.append(f"k and v split {min(tp, kv)} ways")
    if copied:
        ways.append(f"{_gb(copied)} whole on every rank")
    return ", ".join(ways)
