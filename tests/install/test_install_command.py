"""`autoport install` and `uninstall` as an agent or a person runs them."""

import json
import sys
from pathlib import Path

import pytest
from autoport import __version__
from autoport.cli import main
from autoport.install.agents import AGENTS
from autoport.install.bundle import LAUNCHERS, MAIN_SKILL, PARTS, bundled_skills
from autoport.install.manifest import MANIFEST, plugin_manifest
from autoport.resources import bundle_root


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "stdin", None)
    return tmp_path / "home"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autoport", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("agent", AGENTS)
def test_each_agent_has_its_folder(agent: str, home: Path, monkeypatch: pytest.MonkeyPatch):
    assert run(monkeypatch, "install", "--agent", agent, "--link") == 0
    assert run(monkeypatch, "install", "--agent", agent, "--link", "--scope", "user") == 0
    assert (Path(AGENTS[agent].project) / MAIN_SKILL / "SKILL.md").is_file()
    assert (home / AGENTS[agent].user / MAIN_SKILL / "SKILL.md").is_file()


def test_prints_the_number_of_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert run(monkeypatch, "install", "--agent", "codex") == 0
    count = sum(len(files) for files in bundled_skills().values())
    assert f"{len(bundled_skills())} skills, {count} files, verified by hash" in capsys.readouterr().out


def test_status_and_uninstall(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run(monkeypatch, "install", "--agent", "kiro")
    capsys.readouterr()
    assert run(monkeypatch, "install", "--status", "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert status["version"] == __version__
    assert {(row["agent"], row["skill"]["state"]) for row in status["installed"]} == {("kiro", "current")}

    skill = Path(AGENTS["kiro"].project) / MAIN_SKILL
    (skill / "README.md").unlink()
    assert run(monkeypatch, "install", "--status", "--agent", "kiro") == 1
    assert f"missing: {skill.resolve()}/README.md" in capsys.readouterr().err

    assert run(monkeypatch, "uninstall", "--agent", "kiro", "--dry-run") == 0
    assert skill.is_dir()
    assert run(monkeypatch, "uninstall", "--agent", "kiro") == 0
    assert not skill.exists()
    assert run(monkeypatch, "uninstall", "--agent", "kiro") == 0


def test_uninstall_prints_before_it_removes(monkeypatch: pytest.MonkeyPatch):
    """The program may be removing itself, and can load nothing more afterwards."""
    run(monkeypatch, "install", "--agent", "kiro")
    skill = Path(AGENTS["kiro"].project) / MAIN_SKILL
    there = []
    monkeypatch.setattr("autoport.cli.output.print_table", lambda *_, **__: there.append(skill.exists()))
    assert run(monkeypatch, "uninstall", "--agent", "kiro") == 0
    assert there == [True]
    assert not skill.exists()


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--agent", "emacs"], "INSTALL-AGENT"),
        ([], "INSTALL-AGENT"),
        (["--agent", "kiro", "--project", "nowhere"], "INSTALL-PROJECT"),
    ],
)
def test_wrong_use_is_refused(
    arguments: list[str], rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, "install", *arguments) == 2
    assert capsys.readouterr().err.startswith(f"error {rule}")
    assert not list(Path().iterdir())


def test_plugin_manifest_is_up_to_date():
    manifest = json.loads((bundle_root() / MANIFEST).read_text(encoding="utf-8"))
    assert manifest == plugin_manifest(), "run scripts/regenerate_plugin_manifest.py"
    assert all((bundle_root() / skill / "SKILL.md").is_file() for skill in manifest["skills"])


def test_wheel_takes_along_what_is_installed():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")
    build = tomllib.loads((bundle_root() / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    parts = [*PARTS, *(f"scripts/{name}" for name in LAUNCHERS)]
    assert build["targets"]["wheel"]["force-include"] == {part: f"autoport/bundle/{part}" for part in parts}
