"""`autoport sweep`: port and prove a tiny checkpoint of every known architecture."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer


def command(
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", metavar="NAME", help="Only this model type or variant (may be repeated)."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Ports at the same time.")] = 1,
    out: Annotated[Path, typer.Option("--out", help="Folder for coverage.md and coverage.json.")] = Path(),
    tp: Annotated[
        list[int] | None, typer.Option("--tp", help="TP size to prove (may be repeated; default 1 and 2).")
    ] = None,
) -> None:
    """Port and prove a tiny checkpoint of every architecture of the landscape; write a coverage report."""
    import sys

    from autoport.errors import ExitCode, refuse
    from autoport.validation import landscape
    from autoport.validation.ranks import check_installed
    from autoport.validation.sweep import Result, summary, sweep, write_report

    check_installed()
    known = landscape.names()
    wanted = [name for name in known if not arch or name in arch or name.partition(": ")[0] in arch]
    unknown = [name for name in arch or () if name not in known]
    if unknown:
        raise refuse("SWEEP-NAME", f"not in the landscape: {', '.join(unknown)}", "option --arch", known[0])

    def show(result: Result) -> None:
        note = "; ".join(result.reasons)[:200]
        print(f"{result.verdict:8} {result.name} ({result.seconds:.0f} s) {note}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="autoport-sweep-") as folder:
        results = sweep(wanted, jobs, Path(folder), tp or (), show)
    out.mkdir(parents=True, exist_ok=True)
    for path in write_report(results, out):
        print(path)
    print(summary(results), file=sys.stderr)
    if any(result.verdict in ("red", "failed") for result in results):
        raise SystemExit(ExitCode.RED)
