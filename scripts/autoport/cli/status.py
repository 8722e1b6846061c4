"""`autoport status`: where a port stands."""

from pathlib import Path
from typing import TYPE_CHECKING

from autoport.cli.arguments import AsJson, Name, WorkspacePath

if TYPE_CHECKING:
    from autoport.port_state import Port

# Steps of a model that was written by hand, in the order in which they help.
BY_HAND = ("review", "research", "analyze", "prove")


def command(name: Name, workspace: WorkspacePath = Path(), as_json: AsJson = False) -> None:
    """Show which steps of a port are done, and which of its files were edited since."""
    from autoport.cli.output import print_json, print_table
    from autoport.codegen.register import file_with_row
    from autoport.port import STEPS
    from autoport.port_state import Port
    from autoport.preflight import what_stands
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace, writable=False), name)
    if not port.exists:
        raise port.no_such_port()
    note_lost_row(port)
    note_outdated(port)
    files = {path: port.file_status(path) for path in sorted(port.manifest.files)}
    by_hand = port.files_by_hand()
    files = files or dict.fromkeys(by_hand, "by hand")
    registry = file_with_row(port)
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
                "command": going_on(port),
            }
        )
        return
    rows = []
    for step, definition in STEPS.items():
        record = port.manifest.steps.get(step)
        row = (record.status, record.summary) if record else ("not run", "")
        if by_hand and step == "generate":
            row = ("by hand", what_stands(port))
        rows.append((definition.number, step, *row))
    origin = f" from {port.source}" if port.source else " without a SOURCE"
    title = f"{name}{origin}, in {port.workspace.root}"
    print_table(("Step", "Command", "Status", "Result"), rows + served, title=title)
    with_row = [(registry, "has the row")] if registry not in ("", *files) else []
    print_table(("File", "State"), [*files.items(), *with_row])
    to_do = going_on(port)
    if to_do:
        waiting = any(record.status == "waiting" for record in port.manifest.steps.values())
        print(f"After the review, to go on: {to_do} --confirm" if waiting else f"To go on: {to_do}")


def going_on(port: "Port") -> str:
    """The command that goes on with a port, but for ``--confirm``; empty where every step is done, or for a draft."""
    from autoport.doctor import devices
    from autoport.port import STEPS
    from autoport.step import Options, command_line

    to_do = [step for step in STEPS if not _is_done(port, step)]
    if not to_do or port.has_state("draft.json"):
        return ""
    if port.files_by_hand():
        return next((port.command(step) for step in BY_HAND if step in to_do), "")
    if not port.source:
        return port.command("research")
    options = Options(dry_run=not devices(), **port.manifest.chosen.values())
    return port.manifest.command or command_line(port, options)


def _is_done(port: "Port", step: str) -> bool:
    return step in port.manifest.steps and port.manifest.steps[step].status == "done"


def note_outdated(port: "Port") -> None:
    """Mark each step whose inputs changed since it ran; of registering, `note_lost_row` knows more."""
    from autoport.port import STEPS, fingerprint
    from autoport.step import Options

    options = Options(**port.manifest.chosen.values())
    for step, record in port.manifest.steps.items():
        if step not in STEPS or step == "register" or record.status not in ("done", "red"):
            continue
        if record.fingerprint != fingerprint(port, step, options):
            record.status, record.summary = "outdated", "what it read has changed since"


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
