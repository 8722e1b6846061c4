"""Processes that the tool starts import nothing from the current folder, which may be a downloaded checkpoint."""

import subprocess
from pathlib import Path

import pytest
from autoport import modules
from autoport.codegen.render import format_python
from autoport.research.modeling.probe import probe
from autoport.research.step import research
from autoport.validation import sweep
from checkpoints import write_checkpoint
from published import PUBLISHED

IMPORTED = ("h2", "json", "torch", "msgspec", "ruff")  # by the tool, or by what it imports


@pytest.fixture
def hostile_folder(tmp_path, monkeypatch):
    """A checkpoint as the current folder, with modules that leave a mark when they are imported."""
    folder = write_checkpoint(
        tmp_path / "checkpoint", PUBLISHED["command-r7b"], {"model.layers.0.x.weight": ("BF16", (1,))}
    )
    mark = tmp_path / "mark"
    for name in IMPORTED:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (folder / "autoport").mkdir()
    (folder / "autoport/__init__.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(folder)
    return mark


def test_the_probe_confirms_a_model_and_imports_nothing_of_the_current_folder(hostile_folder):
    facts, _ = research(".")
    assert probe(facts) == []
    confirmed = {finding.topic for finding in facts.modeling.findings if finding.confirmed}
    assert confirmed == {"norm", "rope", "activation"}
    activation = next(finding for finding in facts.modeling.findings if finding.topic == "activation")
    assert activation.value["function"] == "silu"
    assert not hostile_folder.exists()


def test_formatting_imports_nothing_of_the_current_folder(hostile_folder):
    assert format_python("x  =  1\n") == "x = 1\n"
    assert not hostile_folder.exists()


def test_a_sweep_starts_its_ports_in_their_own_folders(hostile_folder, monkeypatch):
    started = {}

    def start(command, **options):
        started.update(options)
        raise OSError("not today")

    monkeypatch.setattr(sweep.subprocess, "Popen", start)
    with pytest.raises(OSError, match="not today"):
        sweep._in_process("name", Path("folder"), [], set())
    assert started["cwd"] == Path("folder").absolute()
    assert str(modules.PACKAGE_PARENT) in started["env"]["PYTHONPATH"]


def test_a_relative_search_path_still_works(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/helper_of_mine.py").write_text("print(input())\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert modules.run_module("helper_of_mine", text="said\n").stdout == "said\n"
    (tmp_path / "mine/slow_one.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        modules.run_module("slow_one", text="", timeout=0.5)
