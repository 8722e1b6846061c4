"""`autoport draft`: a draft model of speculative decoding."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Force, Name, ReplaceRow, Source, WorkspacePath


def command(
    name: Name,
    source: Source,
    workspace: WorkspacePath = Path(),
    force: Force = False,
    replace_row: ReplaceRow = False,
    as_json: AsJson = False,
) -> None:
    """Port an Eagle3 draft model: its package, its factory, and its row in registry.py."""
    from autoport.analysis.draft import HF_NAME, plan_draft
    from autoport.cli.output import print_json
    from autoport.codegen.draft import write_draft
    from autoport.port_state import Port
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace), name, source)
    with port.lock():
        plan = plan_draft(port.source)
        files = write_draft(port, plan, force, replace_row)
        port.write_state("draft.json", plan)
    if as_json:
        print_json({"name": name, "source": port.source, "plan": plan, "files": files})
        return
    words = f"draft vocabulary {plan.draft_vocab_size} of {plan.architecture.vocab_size}"
    words += "" if plan.own_embedding else ", the target's embedding"
    print(f"{name} is {HF_NAME} ({words})" + ("" if files else "; up to date"))
    for file in files:
        print(f"  {file}")
