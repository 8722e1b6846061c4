"""`autoport draft`: a draft model of speculative decoding."""

from pathlib import Path

import typer

from autoport.cli.arguments import AsJson, Force, Name, ReplaceRow, Source, WorkspacePath


def command(
    name: Name,
    source: Source,
    workspace: WorkspacePath = Path(),
    force: Force = False,
    replace_row: ReplaceRow = False,
    as_json: AsJson = False,
) -> None:
    """Port an Eagle3 draft model: package, factory, row in registry.py, README and example; then the self-review."""
    from autoport.analysis.draft import HF_NAME, plan_draft
    from autoport.cli.output import EXIT_CODES, print_json
    from autoport.cli.review import report_findings
    from autoport.codegen.draft import example_command, write_draft
    from autoport.port import run_step
    from autoport.port_state import Port
    from autoport.step import Options
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace), name, source)
    with port.lock():
        plan = plan_draft(port.source)
        files = write_draft(port, plan, force, replace_row)
        port.write_state("draft.json", plan)
        review = run_step(port, "review", Options())
    if as_json:
        content = {"name": name, "source": port.source, "plan": plan, "files": files, "review": review}
        print_json(content | {"example": example_command(port, plan)})
        raise typer.Exit(EXIT_CODES[review.status])
    words = f"draft vocabulary {plan.draft_vocab_size} of {plan.architecture.vocab_size}"
    words += "" if plan.own_embedding else ", the target's embedding"
    print(f"{name} is {HF_NAME} ({words})" + ("" if files else "; up to date"))
    for file in files:
        print(f"  {file}")
    print(f"self-review {review.status}: {review.summary}")
    report_findings(port, [review])
    print(f"serve it: {example_command(port, plan)}")
    raise typer.Exit(EXIT_CODES[review.status])
