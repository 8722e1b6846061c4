"""`autoport port`: all steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoport.cli.arguments import (
    AsJson,
    ContextLength,
    Force,
    Incomplete,
    KeepEdited,
    Name,
    NoRegister,
    PortBatchSize,
    PortInstance,
    PortLnc,
    PortRelax,
    Probe,
    ReplaceRow,
    TpSizes,
    WorkspacePath,
)
from autoport.errors import Refusal

if TYPE_CHECKING:
    from autoport.port import StepResult
    from autoport.port_state import Port
    from autoport.schema.plan import Override, Section
    from autoport.step import Options
    from autoport.workspace import Workspace


def command(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            metavar="[SOURCE]", help="Checkpoint folder or hub id; not needed to go on with a port."
        ),
    ] = "",
    workspace: WorkspacePath = Path(),
    out_of_tree: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a package of its own there; the checkout is only read."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="No Trainium: prove the port on the CPU.")
    ] = False,
    review: Annotated[bool, typer.Option("--review", help="Pause after the analysis (exit code 3).")] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Go on after a pause for review.")] = False,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a decision of the analysis."),
    ] = [],
    relax: PortRelax = [],
    context_length: ContextLength = None,
    batch_size: PortBatchSize = None,
    instance: PortInstance = None,
    lnc: PortLnc = None,
    tp: TpSizes = [],
    force: Force = False,
    keep_edited: KeepEdited = False,
    replace_row: ReplaceRow = False,
    no_register: NoRegister = False,
    probe: Probe = None,
    incomplete: Incomplete = None,
    as_json: AsJson = False,
) -> None:
    """Port a model: research, plan, generate, register, document, review, prove."""
    import sys

    import msgspec

    from autoport.analysis import decisions
    from autoport.cli.chosen import given, settled
    from autoport.cli.output import EXIT_CODES, note, print_json
    from autoport.cli.port_report import report
    from autoport.port import (
        STEPS,
        StepResult,
        forget_stale_source,
        next_step,
        require_device,
    )
    from autoport.port_state import Port
    from autoport.step import Options, command_line

    options = Options(
        dry_run=dry_run,
        review=review,
        confirm=confirm,
        force=force,
        keep_edited=keep_edited,
        replace_row=replace_row,
        no_register=no_register or None,
    )
    passed = given(
        relax=relax,
        tp_sizes=tp,
        probe=probe,
        incomplete=incomplete,
        context_length=context_length,
        batch_size=batch_size,
        instance=instance,
        lnc=lnc,
    )
    require_device(options)
    port = Port(_place(workspace, out_of_tree, name), name, source, new_source=force or keep_edited)
    results: list[StepResult] = []
    with port.lock(), decisions.forgotten_if_refused(port):
        options = settled(port, passed, options)
        if no_register:
            port.manifest.unregistered = True  # also for the runs after a pause
        taken = decisions.parse_overrides(overrides, f"{decisions.user()} with --set")
        if confirm:
            decisions.record_file(port)
        decisions.record(port, taken)
        forget_stale_source(port)
        first = next_step(port, options)
        if first != "research":
            note(f"{name} exists; going on at {STEPS[first].title}" if first else f"{name} is up to date")
        results = _run(port, options)
        if results[-1].status == "waiting" and review and sys.stdin.isatty() and not as_json:
            decisions.record(port, _ask(results[-1].data["sections"]))
            if typer.confirm("Go on?"):
                results = [*results[:-1], *_run(port, msgspec.structs.replace(options, confirm=True))]
    if as_json:
        print_json({"name": name, "source": port.source, "status": _status(results), "steps": results})
    else:
        report(port, results, options)
        if results[-1].status == "waiting":
            note(
                f"waiting for review; to go on: {command_line(port, options)} --confirm [--set section.field=value]"
            )
        elif results[-1].status == "red":
            note(f"stopped after step {results[-1].number}; mend it and run the same command again")
    raise typer.Exit(EXIT_CODES[results[-1].status])


def _status(results: Sequence["StepResult"]) -> str:
    """The status of the last step, as the exit code says it: ``done``, ``red`` or ``waiting``."""
    return "done" if results[-1].status == "kept" else results[-1].status


def _place(workspace: Path, out_of_tree: Path | None, name: str) -> "Workspace":
    """Where the port is written."""
    from autoport.package_workspace import PackageWorkspace
    from autoport.workspace import Workspace

    if out_of_tree is None:
        return Workspace.find(workspace)
    # The current folder is the default of --workspace, and need not be a checkout here.
    return PackageWorkspace.open(out_of_tree, name, workspace if workspace != Path() else None)


def _run(port: "Port", options: "Options") -> list["StepResult"]:
    from autoport.cli.output import note, working
    from autoport.port import run_port

    with working(f"Porting {port.name} from {port.source} ..."):
        return list(run_port(port, options, lambda _, step: note(f"step {step.number}: {step.title}")))


def _ask(sections: Sequence["Section"]) -> list["Override"]:
    """Show each section and take overrides for it, at the terminal."""
    from autoport.analysis import decisions

    taken: list[Override] = []
    for section in sections:
        print(f"\n{section.name}: {section.target}\n  reference: {section.reference}")
        print(f"  change: {section.change}\n  known from: {section.source}")
        fields = [field for field in decisions.FIELDS if field.startswith(f"{section.name}.")]
        hint = f" (or field=value: {', '.join(fields)})" if fields else ""
        answer = typer.prompt(f"  Enter to accept{hint}", default="", show_default=False).strip()
        while answer:
            text = answer if answer.startswith(f"{section.name}.") else f"{section.name}.{answer}"
            try:
                taken += decisions.parse_overrides([text], f"{decisions.user()} at the terminal")
            except Refusal as refusal:
                print(f"  {refusal}")
            answer = typer.prompt("  another, or Enter", default="", show_default=False).strip()
    return taken
