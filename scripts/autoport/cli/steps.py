"""Running one step as a command of its own."""

from collections.abc import Callable
from pathlib import Path

import typer

from autoport.cli.chosen import settled
from autoport.cli.output import EXIT_CODES, print_json, report_steps, working
from autoport.port import STEPS, run_step
from autoport.port_state import Chosen, Port
from autoport.step import Options
from autoport.workspace import Workspace


def run_single(
    step: str,
    name: str,
    workspace: Path,
    options: Options,
    as_json: bool,
    source: str = "",
    passed: Chosen = Chosen(),
    show: Callable[[Port], None] | None = None,
) -> None:
    """Run `step` of port `name`, print its result, and exit with its code.

    Args:
        passed: Options that the port keeps; see `autoport.cli.chosen`.
        show: Prints more than the one line of the result, for a person.
    """
    port = Port(Workspace.find(workspace), name, source)
    with port.lock():
        options = settled(port, passed, options, [step])
        port.manifest.command = ""
        with working(f"{STEPS[step].title} ..."):
            result = run_step(port, step, options)
    if as_json:
        print_json(result)
    else:
        if show:
            show(port)
        report_steps([result])
    raise typer.Exit(EXIT_CODES[result.status])
