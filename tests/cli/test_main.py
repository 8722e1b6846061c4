"""Every way to end a command: an exit code, a message, no traceback."""

import errno
import os
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


def test_other_errors_keep_their_traceback(monkeypatch):
    with pytest.raises(FileNotFoundError):
        ended(monkeypatch, FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere"))


def test_an_interrupt_says_how_to_go_on(monkeypatch, capsys):
    assert ended(monkeypatch, SystemExit(130)) == 130
    assert "run the same command again" in capsys.readouterr().err


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
