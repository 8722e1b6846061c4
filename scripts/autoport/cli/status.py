"""`autoport status`: where a port stands."""

from pathlib import Path
from typing import TYPE_CHECKING

from autoport.cli.arguments import AsJson, Name, WorkspacePath

if TYPE_CHECKING:
    from autoport.port_state import Port


def command(name: Name, workspace: WorkspacePath = Path(), as_json: AsJson = False) -> None:
    """Show which steps of a port are done, and which of its files were edited since."""
    from autoport.cli.output import print_json, print_table
    from autoport.port import STEPS
    from autoport.port_state import Port
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace, writable=False), name)
    if not port.exists:
        raise port.no_such_port()
    note_lost_row(port)
    files = {path: port.file_status(path) for path in sorted(port.manifest.files)}
    served = serving_rows(port)
    if as_json:
        tests = {command: {"status": status, "found": found} for _, command, status, found in served}
        print_json(
            {
                "name": name,
                "source": port.source,
                "written_to": str(port.workspace.root),
                "steps": port.manifest.steps,
                "tests": tests,
                "files": files,
                "command": port.manifest.command,
            }
        )
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
    origin = f" from {port.source}" if port.source else " without a SOURCE"
    title = f"{name}{origin}, in {port.workspace.root}"
    print_table(("Step", "Command", "Status", "Result"), rows + served, title=title)
    print_table(("File", "State"), list(files.items()))
    records = port.manifest.steps
    if port.manifest.command and any(step not in records or records[step].status != "done" for step in STEPS):
        waiting = any(record.status == "waiting" for record in records.values())
        print(f"To go on: {port.manifest.command}{' --confirm, after the review' if waiting else ''}")


def serving_rows(port: "Port") -> list[tuple[str, str, str, str]]:
    """(step, command, status, result) of the smoke and the serving test.

    The status is that of the model's files as they are now; ``outdated`` is a result of other files.
    """
    from autoport.codegen.results import OFFLINE, ONLINE, current_sections

    rows = []
    sections = current_sections(port)
    for number, command, name, state in (
        ("8", "smoke", OFFLINE, "smoke.json"),
        ("9", "serve-test", ONLINE, "serving.json"),
    ):
        measured = sections[name]
        if measured is not None:
            status = "green" if measured.verdict == "passed" else "red"
            rows.append((number, command, status, measured.facts[0][1]))
        elif port.has_state(state):
            rows.append((number, command, "outdated", f"the model's files changed since {state}"))
        else:
            rows.append((number, command, "not run", ""))
    return rows


def note_lost_row(port: "Port") -> None:
    """Mark Step 5 as lost when the plugin takes another class for the port's architecture by now."""
    from autoport.codegen.register import is_registered, registered_from
    from autoport.schema.plan import Plan

    record = port.manifest.steps.get("register")
    if record is None or record.status != "done" or port.manifest.unregistered:
        return
    architecture = port.read_state("plan.json", Plan, "analyze").architecture.hf_name
    if not is_registered(port, architecture):
        origin = registered_from(port, architecture)
        record.status = "lost"
        record.summary = f"{architecture} is served from {origin}" if origin else f"no row for {architecture}"
