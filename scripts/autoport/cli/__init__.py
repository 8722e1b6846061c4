"""The command `autoport`: one module per subcommand, each importing what it needs only when it runs."""

import sys

import typer

from autoport.cli import (
    analyze,
    compute_tp,
    demo,
    diagnose,
    doctor,
    document,
    generate,
    init_workspace,
    inspect,
    install,
    port,
    prove,
    register,
    research,
    review,
    search_ops,
    serve_test,
    smoke,
    status,
    sweep,
    twin,
    uninstall,
)
from autoport.cli.output import report_refusal
from autoport.errors import ExitCode, Refusal

app = typer.Typer(
    name="autoport",
    help="Port Hugging Face decoder models to the vLLM Neuron backend, and prove the port on the CPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for module in (
    port,
    research,
    analyze,
    generate,
    register,
    document,
    review,
    prove,
    smoke,
    serve_test,
    status,
    compute_tp,
    inspect,
    doctor,
    search_ops,
    diagnose,
    init_workspace,
    twin,
    sweep,
    demo,
    install,
    uninstall,
):
    app.command(module.__name__.rpartition(".")[2].replace("_", "-"))(module.command)


def main() -> None:
    """Entry point: turns refusals into a message and exit code 2."""
    try:
        app()
    except Refusal as refusal:
        report_refusal(refusal, as_json="--json" in sys.argv)
        raise SystemExit(ExitCode.REFUSED) from None
    except BrokenPipeError:
        raise SystemExit(ExitCode.DONE) from None
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None
