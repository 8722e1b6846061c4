"""The checkout that a port is written into, its lock, and files that are whole at every moment."""

import os
import re
import sys
import threading
import time

import pytest
from autoport.cli import main
from autoport.errors import Refusal
from autoport.files import write_atomic
from autoport.port_state import Port
from autoport.resources import simulator_dir
from autoport.workspace import Workspace
from refusals import rules


def test_workspace_without_the_plugin(tmp_path):
    with pytest.raises(Refusal) as refusal:
        Workspace.find(tmp_path)
    assert rules(refusal) == ["WS-MISSING"]


def test_private_package_is_found(tmp_path):
    (tmp_path / "private_vllm_neuron" / "model").mkdir(parents=True)
    (tmp_path / "private_vllm_neuron" / "__init__.py").touch()
    assert Workspace.find(tmp_path).package == "private_vllm_neuron"


def test_create_needs_an_empty_folder(workspace):
    with pytest.raises(Refusal) as refusal:
        Workspace.create(workspace.root)
    assert rules(refusal) == ["WS-EXISTS"]


def test_a_made_workspace_has_what_its_files_import(workspace):
    simulated = {path.parent.name for path in simulator_dir().glob("*/__init__.py")}
    files = workspace.root.rglob("*.py")
    imported = {
        name
        for path in files
        for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    }
    assert {"libtorch_neuronx_lite", "nkilib"} <= imported & simulated
    assert imported & simulated <= {path.name for path in workspace.root.iterdir()}


def test_the_lock_leaves_nothing_behind(workspace):
    port = Port(workspace, "yi", "one")
    port.save()
    staged = port.state_dir / "staging" / ".model.py.1.part"
    staged.parent.mkdir()
    staged.touch()
    (port.state_dir / ".plan.json.1.part").touch()
    with port.lock():
        assert [path.name for path in port.state_dir.iterdir()] == ["port.json"]
    assert [path.name for path in port.state_dir.parent.iterdir()] == ["yi"]


def test_a_run_that_wrote_no_state_leaves_no_state_folder(workspace):
    with Port(workspace, "yi", "one").lock(), workspace.lock("registry"):
        pass
    assert not (workspace.root / ".autoport").exists()


def test_a_lock_is_held_by_one_at_a_time(workspace):
    inside, together = [], []

    def hold():
        with workspace.lock("registry"):
            inside.append(1)
            time.sleep(0.001)
            together.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=hold) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1] * 20
    assert not (workspace.root / ".autoport").exists()


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    target.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Refusal) as refusal:
        write_atomic(target, b"new")
    assert rules(refusal) == ["WS-WRITE"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_text() == "old"


@pytest.mark.parametrize("command", [["port", "yi", "nowhere", "--dry-run"], ["analyze", "yi"]])
def test_unwritable_workspace(command, workspace, monkeypatch, capsys):
    """Root may write anywhere, so the answer of the system is replaced."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(sys, "argv", ["autoport", *command, "--workspace", str(workspace.root)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "WS-WRITE" in capsys.readouterr().err
    assert not (workspace.root / ".autoport").exists()
