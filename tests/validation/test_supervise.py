"""No process is left behind, whoever dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from autoport.errors import Refusal
from autoport.validation import supervise
from autoport.validation.supervise import group_exists, supervised

SLEEPERS = """
import os, signal, sys, tempfile, time
tempfile.mkstemp()
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    if not os.fork():
        break
print("up", flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(supervise, "TERM_SECONDS", 1.0)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where commands have their temporary files; nothing may be left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def wait_for(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def members(group):
    return list(supervise._members(group))


def started(process):
    wait_for(lambda: process.log.read_text().count("up") == 3)
    assert len(members(process.group)) == 3
    return process.group


def sleepers(tmp_path, *arguments):
    return supervised([sys.executable, "-c", SLEEPERS, *arguments], {}, tmp_path, tmp_path / "log")


@pytest.mark.parametrize("arguments", [(), ("stubborn",)])
def test_the_group_ends_with_the_block(tmp_path, temporary, arguments):
    with sleepers(tmp_path, *arguments) as process:
        group = started(process)
        [scratch] = temporary.iterdir()
        assert list(scratch.iterdir())
    assert not group_exists(group)
    assert process.guard.returncode is not None
    assert not list(temporary.iterdir())


def test_the_group_ends_when_the_block_raises(tmp_path):
    with pytest.raises(KeyboardInterrupt), sleepers(tmp_path) as process:  # noqa: PT012
        group = started(process)
        raise KeyboardInterrupt
    assert not group_exists(group)


def test_what_a_command_that_died_left_behind_is_ended(tmp_path):
    with sleepers(tmp_path) as process:
        group = started(process)
        os.kill(group, signal.SIGKILL)
        assert process.wait(15) == -signal.SIGKILL
        assert process.how_it_ended() == "was killed by SIGKILL"
        wait_for(lambda: not group_exists(group))


def test_an_exit_code_that_is_no_signal(tmp_path):
    """A guard passes signal N on as 128 + N."""
    with supervised(
        [sys.executable, "-c", "raise SystemExit(255)"], {}, tmp_path, tmp_path / "log"
    ) as process:
        assert process.wait(15) == 255
        assert process.how_it_ended() == "exited with code 255"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_group_ends_when_the_caller_is_killed(tmp_path, temporary, number):
    script = f"""
import sys, time
from pathlib import Path
from autoport.validation.supervise import supervised
with supervised([sys.executable, "-c", {SLEEPERS!r}], {{}}, Path({str(tmp_path)!r}), Path("log")) as process:
    print(process.group, flush=True)
    time.sleep(300)
"""
    caller = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    group = int(caller.stdout.readline())
    wait_for(lambda: (tmp_path / "log").read_text().count("up") == 3)
    caller.send_signal(number)
    assert caller.wait(20) != 0
    caller.stdout.close()
    wait_for(lambda: not group_exists(group))
    wait_for(lambda: not list(temporary.iterdir()))


def test_the_group_ends_when_the_guard_was_killed(tmp_path):
    with sleepers(tmp_path) as process:
        group = started(process)
        process.guard.kill()
    assert not group_exists(group)


def test_a_group_that_the_guard_has_ended_is_left_alone(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(supervise, "end_group", ended.append)
    with supervised(["true"], {}, tmp_path, tmp_path / "log") as process:
        assert process.wait(15) == 0
    assert ended == []


def test_exit_code_and_output(tmp_path):
    command = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"]
    with supervised(command, {}, tmp_path, tmp_path / "logs" / "log") as process:
        assert process.wait(15) == 7
    assert set(process.tail().split()) == {"out", "err"}
    assert process.how_it_ended() == "exited with code 7"


def test_a_command_that_does_not_exist(tmp_path):
    with supervised(["/no/such/command"], {}, tmp_path, tmp_path / "log") as process:
        assert process.wait(15) == 127
    assert "No such file" in process.tail()


def test_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(Refusal, match="WS-WRITE"),
        supervised(["true"], {}, tmp_path, Path(tmp_path, "file/log")),
    ):
        pass
