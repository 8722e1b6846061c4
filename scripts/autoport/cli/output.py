"""What commands print: data on stdout, progress and warnings on stderr."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from autoport.errors import ExitCode, Refusal
from autoport.port import StepResult

MARKS = {"done": "ok", "kept": "ok (kept)", "red": "RED", "waiting": "waiting"}
EXIT_CODES = {"done": ExitCode.DONE, "kept": ExitCode.DONE, "red": ExitCode.RED, "waiting": ExitCode.WAITING}


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def note(text: str) -> None:
    """Progress or a warning, for a person."""
    print(text, file=sys.stderr, flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a table to stdout; plain text when it is not a terminal."""
    from rich.console import Console
    from rich.table import Column, Table

    # Folded, as rich cuts a word that is longer than its column, such as a path.
    folding = (Column(name, overflow="fold") for name in columns)
    table = Table(*folding, title=title or None, title_justify="left", highlight=False)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    width = None if sys.stdout.isatty() else 140
    Console(width=width, highlight=False, markup=False).print(table)


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show that something long is running: a spinner on a terminal, one line elsewhere."""
    if not sys.stderr.isatty():
        note(text)
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(text)
        yield


def report_refusal(refusal: Refusal, as_json: bool) -> None:
    if as_json:
        print_json({"status": "refused", "problems": refusal.problems})
    for problem in refusal.problems:
        note(f"error {problem}")


def report_steps(results: Sequence[StepResult]) -> None:
    """Print the table of steps and the files they wrote."""
    rows = [(r.number, r.title, MARKS[r.status], f"{r.seconds:.1f} s", r.summary) for r in results]
    print_table(("Step", "What", "Verdict", "Time", "Result"), rows)
    print_files("Files written:", sorted({file for result in results for file in result.files}))


def print_files(title: str, files: Sequence[str]) -> None:
    if files:
        print(title)
        for file in files:
            print(f"  {file}")
