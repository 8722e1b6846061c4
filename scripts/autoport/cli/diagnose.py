"""`autoport diagnose`: known failures in a log."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from autoport.cli.arguments import AsJson, WorkspacePath

if TYPE_CHECKING:
    from autoport.diagnose import Diagnosis


def command(
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="A log file, or - for stdin.", show_default=False)
    ],
    port: Annotated[
        str, typer.Option("--port", metavar="NAME", help="Look for the place in this port.")
    ] = "",
    workspace: WorkspacePath = Path(),
    as_json: AsJson = False,
) -> None:
    """Find known failures in a log: cause, fix, likely place in the port, next command.

    Exit code 1 when nothing in the log is known.
    """
    from autoport.cli.output import print_json, working
    from autoport.diagnose import add_places, diagnose, load_catalogue
    from autoport.errors import ExitCode

    with working(f"Reading {log} ..."), _open(log) as file:
        diagnosis = diagnose(file, load_catalogue())
    if port:
        from autoport.review.step import review_port, subject_of
        from autoport.workspace import Port, Workspace

        add_places(diagnosis, review_port(subject_of(Port(Workspace.find(workspace), port))))
    if as_json:
        print_json(diagnosis)
    else:
        print(describe(diagnosis, port, workspace), end="")
    raise typer.Exit(ExitCode.RED if diagnosis.go_on_at else ExitCode.DONE)


def _open(log: str) -> contextlib.AbstractContextManager[BinaryIO]:
    """The log as bytes.

    Raises:
        Refusal: DIAG-LOG.
    """
    from autoport.errors import refuse

    if log == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(log, "rb")
    except OSError as error:
        raise refuse(
            "DIAG-LOG", f"cannot be read: {error.strerror}", log, "pass a log file, or - for stdin"
        ) from error


def describe(diagnosis: "Diagnosis", port: str, workspace: Path) -> str:
    """Text of a diagnosis."""
    name = port or "NAME"
    lines = []
    for match in diagnosis.matches:
        failure = match.failure
        often = f", {match.count} lines" if match.count > 1 else ""
        lines += [f"{failure.id}: {failure.title} (line {match.line}{often})", f"  log:   {match.text[:200]}"]
        lines += [f"  cause: {failure.cause}", f"  fix:   {failure.fix}"]
        if match.frame:
            lines.append(f"  trace: {match.frame}")
        lines += [f"  place: {place}" for place in match.places]
        if port and failure.rules and not match.places:
            lines.append(f"  place: not known; the port breaks none of {', '.join(failure.rules)}")
        if not failure.wrapper:
            lines.append(f"  next:  {failure.next or f'autoport review {name} --workspace {workspace}'}")
        lines.append("")
    if diagnosis.go_on_at:
        known = "only messages that pass on a failure" if diagnosis.matches else "no known failure"
        lines.append(
            f"{known} in {diagnosis.lines} lines. {diagnosis.because}: go on at {diagnosis.go_on_at}"
        )
    return "\n".join(lines) + "\n"
