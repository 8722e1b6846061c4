"""Runs a command in a process group of its own, and ends the whole group whatever happens to the caller.

Between the caller and the command stands a small guard process. It ends the group when the caller asks for it,
and also when the caller is gone: its standard input is a pipe from the caller, which the system closes then,
by whatever signal the caller died. Run as a module it is the guard.

The command has a folder of its own for temporary files, which the guard removes: vLLM leaves the sockets of its
processes behind.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from autoport.errors import refuse

TERM_SECONDS = 8.0  # for the command to end by itself after SIGTERM
KILL_SECONDS = 4.0
POLL_SECONDS = 0.2
TAIL_LINES = 30


class Supervised:
    """A running command.

    Attributes:
        log: File with its output and error output.
        group: Its process group.
    """

    def __init__(self, guard: "subprocess.Popen[bytes]", group: int, log: Path):
        self.guard = guard
        self.group = group
        self.log = log

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative when a signal killed it."""
        code = self.guard.poll()
        return 128 - code if code is not None and code - 128 in signal.valid_signals() else code

    def wait(self, timeout: float) -> int | None:
        """Wait for the command to end by itself; None when it has not after `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.guard.wait(timeout)
        return self.returncode

    def how_it_ended(self) -> str:
        code = self.returncode
        return "is still running" if code is None else end(code)

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return "\n".join(lines[-TAIL_LINES:])

    def stop(self) -> None:
        """End the group; returns when no process of it is left."""
        assert self.guard.stdin is not None
        with contextlib.suppress(OSError):
            self.guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.guard.wait(TERM_SECONDS + 2 * KILL_SECONDS)
        code = self.guard.poll()
        if code is None or code < 0:
            # It was killed, or hangs. After one that ended the group, its number may be that of another one.
            end_group(self.group)
        self.guard.kill()
        self.guard.wait()
        if self.guard.stdout is not None:
            self.guard.stdout.close()


def end(code: int) -> str:
    """How a process with this exit code ended; negative when a signal killed it."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


@contextlib.contextmanager
def supervised(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
) -> Iterator[Supervised]:
    """Run `command` in `folder`; its group is ended at the end of the block, or when this process dies.

    Args:
        environment: Added to this process's environment.

    Raises:
        Refusal: WS-WRITE when the log cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = open(log, "wb")  # noqa: SIM115
    except OSError as error:
        raise refuse(
            "WS-WRITE",
            f"cannot write: {error.strerror}",
            log,
            "free space or change the folder's permissions",
        ) from error
    with file:
        guard = subprocess.Popen(
            [sys.executable, "-m", __name__, str(TERM_SECONDS), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            cwd=folder,
            env=os.environ | dict(environment) | {"PYTHONPATH": _path(environment)},
            start_new_session=True,  # Ctrl-C on the terminal reaches the caller only
        )
    assert guard.stdout is not None
    line = guard.stdout.readline()
    running = Supervised(guard, int(line or 0), log)
    try:
        yield running
    finally:
        running.stop()


def _path(environment: Mapping[str, str]) -> str:
    """PYTHONPATH with this package's folder at the end, for the guard."""
    before = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join([*filter(None, [before]), str(Path(__file__).resolve().parents[2])])


# --- Groups -----------------------------------------------------------------------------------------------


def group_exists(group: int) -> bool:
    """Whether a process of the group is left, other than ones that ended and wait to be collected."""
    if group <= 0:
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(state != "Z" for pid, state in _members(group))


def _members(group: int) -> Iterator[tuple[int, str]]:
    """(pid, state letter) of each process of the group."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    yield int(entry.name), fields[0]


def end_group(group: int) -> None:
    """Kill what is left of the group, and wait until it is gone."""
    deadline = time.monotonic() + KILL_SECONDS
    while group_exists(group) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 4)


# --- The guard --------------------------------------------------------------------------------------------


def guard(term_seconds: float, command: Sequence[str]) -> int:
    """Run `command` until it ends or standard input closes; returns its exit code, 128 + N for signal N.

    Args:
        term_seconds: For the command to end by itself after SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        with tempfile.TemporaryDirectory(prefix="autoport-", ignore_cleanup_errors=True) as scratch:
            return _guarded(term_seconds, command, os.environ | {"TMPDIR": scratch})
    except OSError as error:
        print(error, file=sys.stderr)
        return 127


def _guarded(term_seconds: float, command: Sequence[str], environment: Mapping[str, str]) -> int:
    # The command's output goes where the guard's errors go: to the log.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=2,
        env=environment,
        preexec_fn=_default_signals,
        start_new_session=True,
    )
    with contextlib.suppress(OSError):  # the caller may be gone already
        os.write(1, f"{child.pid}\n".encode())
    code = None
    while code is None:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        code = child.poll()
        if readable:
            break
    if code is None:
        child.terminate()  # it knows its own children
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(term_seconds)
    end_group(child.pid)
    code = child.wait()
    return 128 - code if code < 0 else code


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(guard(float(sys.argv[1]), sys.argv[2:]))
