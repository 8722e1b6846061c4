"""The analysis of a port, for a person."""

from autoport.cli.output import note, print_table
from autoport.cli.parallel_report import hardware_text, print_experts
from autoport.port_state import Port


def print_analysis(port: Port) -> None:
    """Print the plan as it stands in plan.json: sections, parallel sizes, memory, pitfalls, what is composed."""
    from autoport.analysis.memory import MEMORY_COLUMNS, memory_rows
    from autoport.analysis.tensor_parallel import CANDIDATE_COLUMNS, candidate_rows, recommendation
    from autoport.schema.facts import Facts
    from autoport.schema.plan import Plan

    plan = port.read_state("plan.json", Plan, "analyze")
    facts = port.read_state("facts.json", Facts, "research")
    reference, architecture, tp = plan.reference_model, plan.architecture, plan.tp
    columns = ("Section", "This model", f"Change to {reference}/", "Known from")
    rows = [(item.name, item.target, item.change, item.source) for item in plan.sections]
    print_table(columns, rows, title=f"{architecture.hf_name} from {plan.source}, starting from {reference}/")
    print_table(CANDIDATE_COLUMNS, candidate_rows(tp), title="Tensor parallelism")
    print(f"{hardware_text(tp)}; KV cache for {tp.batch_size} x {tp.context_length} tokens.")
    for text in tp.assumptions:
        print(f"Assumption: {text}.")
    print(f"Recommended: {recommendation(tp)}")
    if tp.recommended is not None:
        title = f"Memory of one rank at TP {tp.recommended}"
        print_table(MEMORY_COLUMNS, memory_rows(tp, tp.recommended), title=title)
    if plan.ep is not None:
        print_experts(plan.ep, tp)
    print_table(("Rule", "Pitfall"), [(item.rule, item.text) for item in plan.pitfalls], title="Pitfalls")
    composed = {"attention": architecture.attention.composed}
    if architecture.moe is not None:
        composed["experts"] = architecture.moe.composed
    for part, reasons in composed.items():
        if reasons:
            print(f"Not in the fused operators: {part} ({'; '.join(reasons)})")
        else:
            print(f"Composed {part}: nothing, the fused operators do it")
    for item in plan.weights.ignored:
        print(f"Left out: {item.pattern} ({item.reason})")
    for override in plan.overrides:
        print(
            f"Overridden: {override.field} = {override.value!r} by {override.who} (was {override.previous!r})"
        )
    for warning in facts.warnings:
        note(f"warning: {warning}")
