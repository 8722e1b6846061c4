"""Every way to end a command: an exit code, a message, no traceback."""

import contextlib
import errno
import importlib
import os
import signal
import subprocess
import sys

import pytest
from autoport import __version__, cli

AUTOPORT = (sys.executable, "-m", "autoport")


def ended(monkeypatch, error):
    def app():
        raise error

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(cli, "_discard_stdout", lambda: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_a_full_disk_is_refused_where_it_is_met(monkeypatch, capsys):
    assert ended(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/ws/proof/log")) == 2
    assert "OS-WRITE: cannot write: No space left on device (/ws/proof/log)" in capsys.readouterr().err


def test_a_path_that_the_machine_cannot_use_is_refused(monkeypatch, capsys):
    assert ended(monkeypatch, OSError(errno.ENAMETOOLONG, "File name too long", "/ws/x")) == 2
    assert "OS-PATH: no usable path: File name too long (/ws/x)" in capsys.readouterr().err


def test_other_errors_keep_their_traceback(monkeypatch):
    with pytest.raises(FileNotFoundError):
        ended(monkeypatch, FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere"))


def test_an_interrupt_says_how_to_go_on(monkeypatch, capsys):
    assert ended(monkeypatch, SystemExit(130)) == 130
    assert "run the same command again" in capsys.readouterr().err


@pytest.fixture
def ends(monkeypatch):
    """Exit codes of a process that ended at once; Ctrl-C is handled as in a command."""
    codes = []
    monkeypatch.setattr(cli.os, "_exit", codes.append)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cli._end_imports_on_interrupt()
    yield codes
    signal.signal(signal.SIGINT, before)


def test_a_module_that_swallows_an_interrupt_does_not_keep_the_command_alive(
    ends, tmp_path, monkeypatch, capfd
):
    (tmp_path / "swallows_interrupts.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.suppress(KeyboardInterrupt):
        importlib.import_module("swallows_interrupts")
    assert ends[:1] == [130]
    assert "run the same command again" in capfd.readouterr().err


def test_an_interrupt_outside_an_import_unwinds(ends):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert ends == []


def test_an_interrupt_that_the_caller_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    cli._end_imports_on_interrupt()
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN


def test_output_that_nobody_reads():
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([*AUTOPORT, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        result = subprocess.run([*AUTOPORT, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error OS-WRITE: cannot write: No space left on device (stdout)")
    assert len(result.stderr.splitlines()) == 1


def test_closed_outputs():
    result = subprocess.run(f"{sys.executable} -m autoport --version >&- 2>&-", shell=True)
    assert result.returncode == 0


def test_version():
    result = subprocess.run([*AUTOPORT, "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"autoport {__version__}\n")
