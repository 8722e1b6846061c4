"""`autoport port --review`, `--confirm` and `--set`."""

import re

import pytest
import typer
from autoport.cli import app as cli
from autoport.cli.chosen import given
from autoport.cli.port import _ask, command
from autoport.port_state import Port
from autoport.schema.plan import Plan, Section
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
    assert run().exit_code == 3
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


def test_the_registry_is_left_alone_after_a_pause_too(run):
    before = run.workspace.registry_path.read_bytes()
    assert run("--review", "--no-register", with_source=True).exit_code == 3
    assert run("--confirm").exit_code == 0
    assert run.workspace.registry_path.read_bytes() == before


def test_a_refused_value_does_not_stay_in_the_way(run):
    assert run("--review", with_source=True).exit_code == 3
    assert run("--confirm", "--set", "norm.eps=small").exception.problems[0].rule == "DEC-VALUE"
    assert run("--confirm").exit_code == 0


def test_a_confirmed_plan_stays_until_other_options_are_passed(run):
    def planned():
        tp = Port(run.workspace, "tiny").read_state("plan.json", Plan, "analyze").tp
        return tp.batch_size, tp.context_length

    assert run("--review", "--context-length", "256", "--batch-size", "4", with_source=True).exit_code == 3
    assert run("--confirm").exit_code == 0
    again = run()
    assert again.exit_code == 0
    assert "as before: --context-length 256 --batch-size 4" in again.stderr
    assert planned() == (4, 256)

    other = run("--context-length", "128")
    assert other.exit_code == 3
    assert "context-length 256 -> 128" in other.stderr
    assert run("--confirm").exit_code == 0
    assert planned() == (4, 128)


def test_a_step_alone_takes_the_options_of_the_port(run):
    assert run("--review", "--batch-size", "4", "--incomplete", with_source=True).exit_code == 3
    place = ["--workspace", str(run.workspace.root)]
    CliRunner().invoke(cli, ["analyze", "tiny", "--no-incomplete", *place])
    chosen = Port(run.workspace, "tiny").manifest.chosen
    assert (chosen.batch_size, chosen.incomplete) == (4, False)


def test_rules_are_relaxed_no_more():
    before, after = given(relax=["even-heads"]), given(relax=["none"])
    assert (before.relax, after.relax, given(relax=[]).relax) == (["even-heads"], [], None)


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
