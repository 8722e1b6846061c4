"""`autoport status`: where a port stands."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Name, WorkspacePath


def command(name: Name, workspace: WorkspacePath = Path(), as_json: AsJson = False) -> None:
    """Show which steps of a port are done, and which of its files were edited since."""
    from autoport.cli.output import print_json, print_table
    from autoport.errors import refuse
    from autoport.port import STEPS
    from autoport.workspace import Port, Workspace

    port = Port(Workspace.find(workspace), name)
    if not port.has_state("port.json"):
        raise refuse(
            "PORT-NONE", f"no port named {name!r}", port.state_dir, f"start one: autoport port {name} SOURCE"
        )
    files = {path: port.file_status(path) for path in sorted(port.manifest.files)}
    if as_json:
        print_json({"name": name, "source": port.source, "steps": port.manifest.steps, "files": files})
        return
    rows = []
    for step, definition in STEPS.items():
        record = port.manifest.steps.get(step)
        rows.append(
            (
                definition.number,
                step,
                record.status if record else "not run",
                record.summary if record else "",
            )
        )
    print_table(("Step", "Command", "Status", "Result"), rows, title=f"{name} from {port.source}")
    print_table(("File", "State"), list(files.items()))
