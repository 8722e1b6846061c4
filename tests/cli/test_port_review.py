"""`autoport port --review`, `--confirm` and `--set`."""

import re

import pytest
import typer
from autoport.cli.port import _ask, command
from autoport.schema.plan import Section
from autoport.workspace import Workspace
from checkpoints import small_config, write_checkpoint
from typer.testing import CliRunner

app = typer.Typer()
app.command()(command)


@pytest.fixture
def run(tmp_path, leave_out):
    leave_out("review", "prove")
    source = write_checkpoint(tmp_path / "model", small_config(hidden_size=256))
    workspace = Workspace.create(tmp_path / "ws")

    def run(*arguments, with_source=False):
        given = [
            "tiny",
            *([str(source)] if with_source else []),
            "--workspace",
            str(workspace.root),
            "--dry-run",
        ]
        return CliRunner().invoke(app, [*given, *arguments])

    run.workspace = workspace
    return run


def test_pausing_and_going_on_without_the_source(run):
    paused = run("--review", with_source=True)
    assert paused.exit_code == 3
    assert "autoport port tiny --workspace " in paused.stderr
    assert "--dry-run --confirm" in paused.stderr
    assert not run.workspace.model_dir("tiny").exists()
    done = run("--confirm", "--set", "norm.eps=0.125")
    assert done.exit_code == 0, done.stderr
    assert "going on at Analyse" in done.stderr
    readme = (run.workspace.model_dir("tiny") / "README.md").read_text()
    assert "norm.eps" in readme.replace("\\", "")
    assert re.search(r"0\\?\.125", readme)
    assert run().exit_code == 0


def test_the_command_to_go_on_has_the_options_of_this_one(run):
    given = ["--incomplete", "--keep-edited", "--no-register", "--tp", "2", "--relax", "even-heads"]
    paused = run("--review", *given, with_source=True)
    words = paused.stderr.partition("to go on: ")[2].split()
    assert set(given) <= set(words)
    assert "--probe" not in words
    assert "--force" not in words


def test_without_a_port_a_source_is_needed(run):
    result = run()
    assert result.exception.problems[0].rule == "PORT-NONE"


def test_at_a_terminal_each_section_is_asked_for(monkeypatch, capsys):
    answers = iter(["", "eps=0.5", "nonsense=1", ""])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    sections = [Section("rope", "a", "b", "c", "d"), Section("norm", "a", "b", "c", "d")]
    taken = _ask(sections)
    assert [(item.field, item.value) for item in taken] == [("norm.eps", 0.5)]
    assert taken[0].who.endswith("at the terminal")
    assert "DEC-SET" in capsys.readouterr().out
