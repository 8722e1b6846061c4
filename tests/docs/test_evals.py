"""The scenarios for agents: well formed, preparable, and not passed before an agent has done anything."""

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from autoport.cli import app, review
from doc_checks import ROOT
from typer.testing import CliRunner

spec = importlib.util.spec_from_file_location("evals_run", ROOT / "evals" / "run.py")
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in runner.load()["evals"]}


def test_structure():
    assert runner.structure_problems(runner.load()) == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("id", "crash-log", "used twice"),
        ("prompt", " ", "no prompt"),
        ("files", ["evals/files/nowhere.log"], "no file"),
        ("setup", ["rm -rf workspace"], "not a setup command"),
        ("setup", ["copy files"], "not a setup command"),
        ("assertions", [], "no assertions"),
        ("assertions", ["the report is good"], "not an assertion"),
    ],
)
def test_structure_problems_are_found(key: str, value: object, problem: str):
    data = copy.deepcopy(runner.load())
    data["evals"][0][key] = value
    assert [text for text in runner.structure_problems(data) if problem in text]


@pytest.mark.parametrize(
    ("assertion", "expected"),
    [
        ("a.json exists", True),
        ("b.json is absent", True),
        ("a.json is absent", False),
        ('a.json contains "TEXT"', True),
        ('a.json contains "other"', False),
        ('a.json lacks "text"', False),
        ('b.json lacks "text"', False),
        ('a.json: steps.0.status is "done"', True),
        ("a.json: steps.0.status is true", False),
        ("a.json: nothing.at.all is 1", False),
        ("a.json: steps.7.status is 1", False),
    ],
)
def test_assertions(tmp_path: Path, assertion: str, expected: bool):
    (tmp_path / "a.json").write_text(json.dumps({"steps": [{"status": "done"}], "note": "text"}))
    assert runner.holds(assertion, tmp_path) is expected


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a scenario's autoport commands here: each would import torch anew."""

    def run(command: list[str], cwd: Path, check: bool) -> None:
        assert (command[:3], check) == ([sys.executable, "-m", "autoport"], True)
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            result = CliRunner().invoke(app, command[3:])
        assert result.exit_code == 0, result.output

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(run=run))


def prepared(case: dict[str, Any], folder: Path) -> None:
    """Prepare a scenario; nothing of it is done yet."""
    runner.prepare(case, folder)
    (folder / runner.REPLY).write_text("")
    assert not all(runner.holds(text, folder) for text in case["assertions"])


def test_a_scenario_is_prepared_by_the_command(tmp_path: Path):
    folder = tmp_path / "a folder with spaces"
    prepared(CASES["dry-run-port"], folder)
    assert (folder / "workspace").is_dir()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("dry-run-port", "hand-written-port")]
)
def test_prepared_scenario_is_not_passed_yet(name: str, tmp_path: Path):
    prepared(CASES[name], tmp_path / "a folder with spaces")


@pytest.mark.usefixtures("in_this_process")
def test_scenario_is_passed_by_who_does_it(tmp_path: Path):
    folder, case = tmp_path / "a folder with spaces", CASES["hand-written-port"]
    prepared(case, folder)
    with pytest.raises(typer.Exit) as stopped:
        review.command("qwen2", workspace=folder / "workspace")
    assert stopped.value.exit_code == 1
    (folder / runner.REPLY).write_text(
        "BIAS-2D at model.py:208, FWD-DEVICE at model.py:60, META-INIT at model.py:50"
    )
    assert all(runner.holds(text, folder) for text in case["assertions"])
