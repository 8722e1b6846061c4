"""`autoport diagnose`: known failures in a log."""

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from autoport.cli.arguments import AsJson, WorkspacePath

if TYPE_CHECKING:
    from autoport.diagnose import Diagnosis, Match
    from autoport.port_state import Port

QUOTED = 500  # characters of a log's line


def command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="A log file (also relative to --workspace), or - for stdin.",
            show_default=False,
        ),
    ],
    port: Annotated[
        str,
        typer.Option("--port", metavar="NAME", help="Look for the place in this port (default: the log's)."),
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

    with working(f"Reading {log} ..."), _open(log, workspace) as file:
        diagnosis = diagnose(file, load_catalogue())
    subject = _named_port(workspace, port) if port else _likely_port(workspace, diagnosis)
    if subject is not None:
        from autoport.review.step import review_port, subject_of

        add_places(diagnosis, review_port(subject_of(subject)))
    if as_json:
        print_json(diagnosis)
    else:
        print(describe(diagnosis, subject, log, workspace), end="")
    raise typer.Exit(ExitCode.RED if diagnosis.go_on_at else ExitCode.DONE)


def _named_port(workspace: Path, name: str) -> "Port":
    from autoport.port_state import Port
    from autoport.workspace import Workspace

    return Port(Workspace.find(workspace, writable=False), name)


def _likely_port(folder: Path, diagnosis: "Diagnosis") -> "Port | None":
    """The port that the log's tracebacks go through, else the only one of the workspace; None when unclear."""
    from autoport.errors import Refusal
    from autoport.port_state import Port
    from autoport.workspace import Workspace

    try:
        workspace = Workspace.find(folder, writable=False)
        traced = [match.frame.split("/model/")[1].split("/")[0] for match in diagnosis.matches if match.frame]
        names = [name for name in traced if workspace.model_dir(name).is_dir()] or workspace.ports()
        there = [name for name in dict.fromkeys(names) if any(workspace.model_dir(name).glob("*.py"))]
        return Port(workspace, there[0]) if len(there) == 1 else None
    except Refusal:
        return None


def _open(log: str, workspace: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """The log as bytes; a path that is none here is one below the workspace.

    Raises:
        Refusal: DIAG-LOG.
    """
    from autoport.errors import refuse

    if log == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(log if Path(log).exists() else workspace.expanduser() / log, "rb")
    except OSError as error:
        raise refuse(
            "DIAG-LOG", f"cannot be read: {error.strerror}", log, "pass a log file, or - for stdin"
        ) from error


def describe(diagnosis: "Diagnosis", port: "Port | None", log: str, workspace: Path) -> str:
    """Text of a diagnosis."""
    lines = [f"port: {port.name} in {port.workspace.root}"] if port else []
    lines += [f"note: {text}" for text in [*diagnosis.notes, *_of_other_files(diagnosis, port)]]
    for match in diagnosis.matches:
        failure = match.failure
        often = f", {match.count} lines" if match.count > 1 else ""
        lines += [
            f"{failure.id}: {failure.title} (line {match.line}{often})",
            f"  log:   {_quoted(match.text)}",
        ]
        lines += [f"  cause: {failure.cause}", f"  fix:   {failure.fix}"]
        if match.frame:
            lines.append(f"  trace: {match.frame}")
        lines += [f"  likely place: {place}" for place in match.places]
        if not failure.wrapper:
            lines += _next(match, port, log, workspace)
        lines.append("")
    if diagnosis.go_on_at:
        known = "only messages that pass on a failure" if diagnosis.matches else "no known failure"
        lines.append(
            f"{known} in {diagnosis.lines} lines. {diagnosis.because}: go on at {diagnosis.go_on_at}"
        )
    return "\n".join(lines) + "\n"


def _quoted(line: str) -> str:
    """A line of the log; a very long one is cut, and ends with ``...``."""
    return line if len(line) <= QUOTED else f"{line[:QUOTED]} ..."


def _of_other_files(diagnosis: "Diagnosis", port: "Port | None") -> list[str]:
    """Asks whether the log belongs to the port, when its tracebacks name lines that the port does not have."""
    frames = dict.fromkeys(match.frame for match in diagnosis.matches if match.frame)
    if port is None or any(_has_line(port, frame) for frame in frames):
        return []
    return [f"is the log of these files? They have no {frame}" for frame in list(frames)[:1]]


def _has_line(port: "Port", frame: str) -> bool:
    """Whether ``path:line``, as it stands in a traceback, is a line of one of the port's files."""
    path, _, line = frame.rpartition(":")
    inside = path.partition("/model/")[2]
    file = port.workspace.model_dir(port.name).parent / inside
    if inside.partition("/")[0] != port.name or not file.is_file():
        return False
    return int(line) <= len(file.read_text(encoding="utf-8", errors="replace").splitlines())


def _next(match: "Match", port: "Port | None", log: str, workspace: Path) -> list[str]:
    """Where to look when the review found no place, and the next command."""
    failure = match.failure
    if failure.next:
        return [
            f"  next:  {failure.next.replace('SOURCE', port.source) if port and port.source else failure.next}"
        ]
    if port is None:
        again = shlex.join(["autoport", "diagnose", log, "--workspace", str(workspace)])
        return [f"  next:  {again} --port NAME, with the port's folder name under vllm_neuron/model/ as NAME"]
    place = ["--workspace", str(port.workspace.root)]
    if match.places or not failure.rules:
        return [f"  next:  {shlex.join(['autoport', 'review', port.name, *place])}"]
    lines = (
        []
        if match.frame
        else [f"  place: the review finds no fault of {', '.join(failure.rules)} in these files"]
    )
    if not port.has_state("plan.json"):
        start = shlex.join(["autoport", "research", port.name, "SOURCE", *place])
        return [
            *lines,
            f"  next:  {start}, with the checkpoint as SOURCE; then analyze and prove: the CPU shows the line",
        ]
    return [
        *lines,
        f"  next:  {shlex.join(['autoport', 'prove', port.name, *place])} (the CPU shows the line)",
        "         if it is green: is the log of these files? Else only the device or the real weights show it, see",
        "         references/troubleshooting.md",
    ]
