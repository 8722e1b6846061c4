"""The scenarios for agents: well formed, preparable, and not passed before an agent has done anything."""

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from autoport.cli import review
from doc_checks import ROOT

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


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_prepared_scenario_is_not_passed_yet(name: str, tmp_path: Path):
    folder = tmp_path / "a folder with spaces"
    runner.prepare(CASES[name], folder)
    (folder / runner.REPLY).write_text("")
    assert not all(runner.holds(text, folder) for text in CASES[name]["assertions"])


@pytest.mark.slow
def test_scenario_is_passed_by_who_does_it(tmp_path: Path):
    case = CASES["hand-written-port"]
    runner.prepare(case, tmp_path)
    with pytest.raises(typer.Exit) as stopped:
        review.command("qwen2", workspace=tmp_path / "workspace")
    assert stopped.value.exit_code == 1
    (tmp_path / runner.REPLY).write_text(
        "BIAS-2D at model.py:208, FWD-DEVICE at model.py:60, META-INIT at model.py:50"
    )
    assert all(runner.holds(text, tmp_path) for text in case["assertions"])
