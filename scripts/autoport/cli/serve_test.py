"""`autoport serve-test`: Step 9, online serving."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoport.cli.arguments import BACKEND_SECONDS, AsJson, Name, On, TpSize, WorkspacePath, seconds

if TYPE_CHECKING:
    from autoport.validation.serving import Serving


def command(
    name: Name,
    workspace: WorkspacePath = Path(),
    on: On = None,
    base_url: Annotated[
        str, typer.Option("--base-url", metavar="URL", help="Test this server and start none.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Name of the model there (default: its first).")] = "",
    tp: TpSize = None,
    tcp_port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port of the server (default: a free one)."),
    ] = None,
    host_sampling: Annotated[
        bool, typer.Option("--host-sampling", help="Sample on the host: with seeds and penalties.")
    ] = False,
    timeout: Annotated[
        int | None,
        seconds("Longest wait for one answer (default: 300)."),
    ] = None,
    start_timeout: Annotated[
        int | None,
        seconds(f"Longest wait for its start (default: {BACKEND_SECONDS})."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve the port, plain and with prefix caching, and test it; writes serving.json and results.md."""
    from autoport.cli.output import print_json, working
    from autoport.codegen.register import require_row
    from autoport.errors import ExitCode
    from autoport.port_state import Port
    from autoport.validation import serving
    from autoport.validation.backends import best_backend, open_backend
    from autoport.validation.client import ANSWER_SECONDS
    from autoport.validation.smoke import needs_expert_parallel
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace), name)
    answer_seconds = timeout or ANSWER_SECONDS
    if base_url:
        with port.lock(), working(f"Testing {base_url} ..."):
            result = serving.check_url(base_url, model, answer_seconds)
            serving.write(port, result)
    else:
        require_row(port)
        backend = open_backend(
            on or best_backend(), port.workspace, needs_expert_parallel(port), start_timeout
        )
        with port.lock(), working(f"Serving {name} on {backend.name} ..."):
            result = serving.serve_test(port, backend, tp, tcp_port, host_sampling, answer_seconds)
    if as_json:
        print_json(result)
    else:
        report(result, port.workspace.root)
    raise typer.Exit(ExitCode.DONE if result.passed else ExitCode.RED)


def report(result: "Serving", root: Path) -> None:
    """Print the verdict for a person."""
    from autoport.cli.output import print_table

    if result.checkpoint is not None:
        print(f"Checkpoint: {result.checkpoint}, TP {result.checkpoint.tp_size}")
    for run in result.runs:
        if run.command:
            print(f"Command: {run.command}")
        rows = [(c.name, c.status, c.found, f"{c.seconds:.1f} s") for c in run.checks]
        print_table(("Check", "Result", "Found", "Time"), rows, title=f"{run.title}, on {result.place}")
        numbers = [row for load in run.loads for row in load.rows()]
        if numbers:
            print_table(("Measured", "Value"), numbers, title=f"{run.title}, on {result.place}")
        if run.failure:
            print(f"{run.title}: {run.failure} (log: {root / run.log})")
        for known in run.known:
            print(f"{known.id}\n  log:   {known.line}\n  cause: {known.cause}\n  fix:   {known.fix}")
    if result.skipped:
        print(f"Not run: {result.skipped}")
    print(f"Serving test: {'green' if result.passed else 'RED'}, measured on {result.place}")
    if result.on_device and result.on != "trn2":
        print(f"On a trn2 instance: {result.on_device}")
