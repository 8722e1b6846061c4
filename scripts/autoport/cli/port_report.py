"""What `autoport port` prints at its end, besides the table of steps."""

import shlex
from collections.abc import Iterator, Sequence

from autoport.cli.output import print_files, report_steps
from autoport.cli.review import report_findings
from autoport.port import StepResult
from autoport.port_state import Port
from autoport.resources import references_dir
from autoport.schema.facts import Facts
from autoport.schema.parallel import TpPlan
from autoport.schema.plan import Plan
from autoport.schema.proof import Proof
from autoport.step import Options
from autoport.units import size_text


def report(port: Port, results: Sequence[StepResult], options: Options) -> None:
    """Print the steps, the files, what the plan recommends and warns of, and what a reader has to judge."""
    report_steps(results)
    print_files("Files kept:", kept_files(port, results))
    ran = {result.step for result in results}
    if "analyze" in ran:
        plan = port.read_state("plan.json", Plan, "analyze")
        print("\n".join(recommended(plan.tp)))
        _print_list("Pitfalls:", [f"{item.rule}: {item.text}" for item in plan.pitfalls])
    if "prove" in ran:
        from autoport.validation.summary import real_size_notes, slow_notes

        proof = port.read_state("proof.json", Proof, "prove")
        left_out = [f"TP {size}: {reason}" for size, reason in proof.not_run.items()]
        _print_list("TP sizes that the twin did not run:", left_out)
        _print_list("Slow paths of the twin on the simulator:", slow_notes(proof))
        if proof.real_size is not None:
            size = proof.real_size.tp_size
            title = f"At the config's own sizes, TP {size} (shapes on the simulator, no weights):"
            _print_list(title, real_size_notes(proof) or ["no rule broken, no slow path"])
        print_red_proof(port)
    report_findings(port, results)
    if results[-1].status in ("done", "kept") and options.dry_run:
        print(f"Next: {next_command(port)}")


def print_red_proof(port: Port) -> None:
    """Print where to look after a red proof: the log of a run that broke off, or what differing logits point to."""
    proof = port.read_state("proof.json", Proof, "prove")
    red = [run for run in proof.runs if run.failure]
    logs = [str(port.workspace.root / run.log) for run in red if not any(item.failure for item in run.phases)]
    if red and not logs:
        print(f"What a red phase points to: {references_dir() / 'troubleshooting.md'}, under 'A red proof'")
    elif logs:
        place = ["--port", port.name, "--workspace", str(port.workspace.root)]
        print(f"Log of the red run: {shlex.join(['autoport', 'diagnose', logs[0], *place])}")


def kept_files(port: Port, results: Sequence[StepResult]) -> list[str]:
    """The port's files in the workspace that stayed as they were, and the registry where it has its row."""
    from autoport.codegen.register import file_with_row

    written = {file for result in results for file in result.files}
    return sorted(({*port.manifest.files, file_with_row(port)} - {""}) - written)


def recommended(plan: TpPlan) -> Iterator[str]:
    """The recommended TP size, the memory of a rank, and the price of what was relaxed."""
    from autoport.analysis.tensor_parallel import recommendation

    text = f"Recommended: {recommendation(plan)}"
    for candidate in plan.candidates:
        if candidate.tp_size == plan.recommended:
            weights = size_text(candidate.weight_bytes_per_rank)
            cache = size_text(candidate.kv_bytes_per_rank)
            text += f"; at TP {candidate.tp_size} per rank {weights} of weights and {cache} of KV cache"
            yield f"{text} for {plan.batch_size} x {plan.context_length} tokens"
            yield from (f"  rests on: {text}" for text in plan.assumptions)
            yield from (f"  relaxed: {item.rule}: {item.text}" for item in candidate.relaxed)
            return
    yield text


def next_command(port: Port) -> str:
    """What follows a dry run: the smoke test on the device, and what it needs first."""
    place = ["--workspace", str(port.workspace.root)]
    steps = []
    warnings = port.read_state("facts.json", Facts, "research").warnings
    if any(warning.startswith("no tokenizer") for warning in warnings):
        steps.append(f"add a tokenizer to {port.source}")
    if port.manifest.unregistered:
        register = shlex.join(["autoport", "register", port.name, "--replace-row", *place])
        steps.append(f"{register}, if this port is to be served")
    smoke = shlex.join(["autoport", "smoke", port.name, "--on", "trn2", *place])
    return ", then ".join([*steps, f"{smoke} on a trn2 instance"])


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(title)
        print("\n".join(f"  {line}" for line in lines))
