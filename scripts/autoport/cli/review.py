"""`autoport review`: Step 7."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autoport.cli.arguments import AsJson, Name, WorkspacePath

if TYPE_CHECKING:
    from autoport.port import StepResult
    from autoport.port_state import Port
    from autoport.review.step import Review, RuleResult


def command(name: Name, workspace: WorkspacePath = Path(), as_json: AsJson = False) -> None:
    """Step 7: check the port's files against the checklists; writes review.json.

    Works on any port in the workspace, also one that was written by hand.
    """
    from autoport.cli.output import EXIT_CODES, print_json, working
    from autoport.port import STEPS, run_step
    from autoport.port_state import Port
    from autoport.step import Options
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace), name)
    with port.lock(), working(f"{STEPS['review'].title} ..."):
        result = run_step(port, "review", Options())
    if as_json:
        print_json(result)
    else:
        print(report(result.data), end="")
        print(f"\n{result.status}: {result.summary}")
    raise typer.Exit(EXIT_CODES[result.status])


def report_findings(port: "Port", results: Sequence["StepResult"]) -> None:
    """Print what a reader of `autoport port` has to know besides the table: warnings, faults, questions."""
    from autoport.review.step import Review
    from autoport.schema.facts import Facts

    ran = {result.step for result in results}
    warnings = port.read_state("facts.json", Facts, "research").warnings if "research" in ran else []
    if warnings:
        print("Warnings:")
        print("\n".join(f"  {warning}" for warning in warnings))
    if "review" in ran:
        review = port.read_state("review.json", Review, "review")
        review.rules = [rule for rule in review.rules if rule.status in ("fail", "judge")]
        if review.rules:
            print("Self-review, faults and questions (`judge`: read the places, answer with evidence):")
            print(report(review), end="")


def report(review: "Review") -> str:
    """Text of a review: failed rules with every place, what is to be judged, one line per other rule."""
    lines = []
    for result in sorted(review.rules, key=lambda rule: ORDER.index(rule.status)):
        label = LABELS.get((result.status, result.severity), result.status)
        lines.append(f"{label:<15}{result.id:<18}{_first_line(result)}")
        if result.status == "fail":
            lines += [f"    {f.where}  {f.text}" for f in result.findings if f.status == "fail"]
            lines.append(f"    why: {result.why}")
        elif result.status == "judge":
            lines += [f"    {f.where}  {f.text}" for f in result.findings if f.status == "judge"]
            if result.question:
                lines.append(f"    question: {result.question}")
            lines += [f"    reference: {place}" for place in result.reference]
    return "\n".join(lines) + "\n"


ORDER = ("fail", "judge", "not checked", "pass", "not applicable")
LABELS = {("fail", "error"): "FAIL", ("fail", "warning"): "warning", ("not applicable", "error"): "-"}


def _first_line(result: "RuleResult") -> str:
    if result.reason:
        return f"{result.title} ({result.reason})"
    if result.status != "pass":
        return result.title
    more = f" and {len(result.findings) - 1} more" if len(result.findings) > 1 else ""
    return f"{result.title} ({result.findings[0].where}{more})"
