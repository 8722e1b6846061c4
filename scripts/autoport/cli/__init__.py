"""The command `autoport`: one module per subcommand, each importing what it needs only when it runs."""

import contextlib
import errno
import os
import signal
import sys
import threading
from types import FrameType
from typing import Annotated

import typer

from autoport import __version__
from autoport.cli import (
    add_variant,
    analyze,
    check_registry,
    compute_tp,
    demo,
    diagnose,
    doctor,
    document,
    draft,
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
    unregister,
)
from autoport.cli.output import note, report_refusal
from autoport.errors import ExitCode, Refusal, refuse

app = typer.Typer(
    name="autoport",
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
    unregister,
    check_registry,
    add_variant,
    draft,
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


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autoport {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Port Hugging Face decoder models to the vLLM Neuron backend, and prove the port on the CPU."""


INTERRUPTED = 128 + signal.SIGINT
INTERRUPTED_TEXT = "interrupted; run the same command again to go on"
READER_GONE = 128 + signal.SIGPIPE
# Errors of the machine, wherever they come up; others are faults of the program and keep their traceback.
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
UNUSABLE_PATH = {errno.ENAMETOOLONG, errno.ELOOP}


def main() -> None:
    """Entry point: turns refusals, interrupts and write errors into a message and an exit code."""
    code: int | str | None
    _end_imports_on_interrupt()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except Refusal as refusal:
        code = _refused(refusal)
    except SystemExit as stop:
        code = stop.code
        if code == INTERRUPTED:
            note(INTERRUPTED_TEXT)
        elif isinstance(stop.__context__, BrokenPipeError):
            code = _reader_gone()
    except BrokenPipeError:
        code = _reader_gone()
    except OSError as error:
        unusable = _of_the_machine(error)
        if unusable is None:
            raise
        code = _refused(unusable)
    raise SystemExit(code) from None


def _of_the_machine(error: OSError) -> Refusal | None:
    """The refusal for an error that is no fault of the program."""
    if error.errno in UNUSABLE_PATH:
        return refuse(
            "OS-PATH", f"no usable path: {error.strerror}", error.filename, "correct the path in the command"
        )
    if error.errno in CANNOT_WRITE:
        step = "free space or change the permissions, then run the same command again"
        return refuse("OS-WRITE", f"cannot write: {error.strerror}", error.filename or "stdout", step)
    return None


def _end_imports_on_interrupt() -> None:
    """Let Ctrl-C during an import end the process, as a kill does; elsewhere it stays a KeyboardInterrupt.

    Modules that take seconds to import swallow the exception now and then, and the run would go on.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{INTERRUPTED_TEXT}\n".encode())
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _refused(refusal: Refusal) -> int:
    with contextlib.suppress(OSError):
        report_refusal(refusal, as_json="--json" in sys.argv)
        sys.stdout.flush()
        return ExitCode.REFUSED
    _discard_stdout()
    return ExitCode.REFUSED


def _reader_gone() -> int:
    _discard_stdout()
    return READER_GONE


def _discard_stdout() -> None:
    """Let nothing be written at exit to an output that takes nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
