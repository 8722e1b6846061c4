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
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of coverage.md and coverage.json; results are merged into what is there "
            "(default: references/ where this folder has it, else this folder).",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(
            "--tp",
            help="TP size to prove (may be repeated; default 1 and 2). With 4 the checkpoints have twice the heads.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what this version of the code has swept already.")
    ] = False,
) -> None:
    """Port and prove a tiny checkpoint of every architecture of the landscape; write a coverage report."""
    import sys

    from autoport.errors import ExitCode, refuse
    from autoport.validation import landscape
    from autoport.validation.ranks import check_installed
    from autoport.validation.sweep import (
        WIDE,
        Result,
        code_digest,
        merge,
        read_report,
        summary,
        sweep,
        write_report,
    )

    check_installed()
    known = landscape.names()
    wanted = [name for name in known if not arch or name in arch or name.partition(": ")[0] in arch]
    unknown = [name for name in arch or () if name not in known]
    if unknown:
        step = f"name a model type or variant of references/landscape.json, e.g. {known[0]}"
        raise refuse("SWEEP-NAME", f"not in the landscape: {', '.join(unknown)}", "option --arch", step)
    if out is None:
        out = Path("references") if Path("references").is_dir() else Path()
    out.mkdir(parents=True, exist_ok=True)
    results = read_report(out)
    if resume:
        current = code_digest()
        done = {name: row.wide if tp == [WIDE] else row for name, row in results.items()}
        wanted = [name for name in wanted if (row := done.get(name)) is None or row.code != current]

    def show(result: Result) -> None:
        results[result.name] = merge(results.get(result.name), result, tp or ())
        write_report(list(results.values()), out)
        note = "; ".join(result.reasons)[:200]
        print(f"{result.verdict:8} {result.name} ({result.seconds:.0f} s) {note}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="autoport-sweep-") as folder:
        swept = sweep(wanted, jobs, Path(folder), tp or (), show)
    for path in write_report(list(results.values()), out):
        print(path)
    print(summary(list(results.values())), file=sys.stderr)
    if any(result.verdict in ("red", "failed") for result in swept):
        raise SystemExit(ExitCode.RED)
