"""The end of `autoport port`: what a report of the port is written from."""

import pytest
from autoport.cli import app
from autoport.port_state import Port
from autoport.units import size_text
from autoport.workspace import STATE_FOLDER
from checkpoints import small_config, write_checkpoint
from typer.testing import CliRunner


@pytest.fixture
def port(tmp_path, leave_out, workspace):
    leave_out("prove")
    source = write_checkpoint(tmp_path / "model", small_config(hidden_size=256))

    def port(*arguments):
        given = ["port", "tiny", str(source), "--workspace", str(workspace.root), "--dry-run", *arguments]
        return CliRunner().invoke(app, given)

    return port


def after(output, title):
    """The indented lines under a title."""
    lines = output[output.index(title) :].splitlines()[1:]
    end = next((i for i, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    return [line.strip() for line in lines[:end]]


def test_a_dry_run_ends_with_memory_pitfalls_and_the_next_command(port, workspace):
    result = port()
    assert result.exit_code == 0, result.output
    recommended = next(line for line in result.output.splitlines() if line.startswith("Recommended: TP "))
    assert " per rank " in recommended
    assert " of weights and " in recommended
    assert "0.00" not in recommended
    assert "PIT-META" in [line.partition(":")[0] for line in after(result.output, "Pitfalls:")]
    smoke = f"autoport smoke tiny --on trn2 --workspace {workspace.root} on a trn2 instance"
    assert result.output.endswith(
        f"Next: add a tokenizer to {workspace.root.parent / 'model'}, then {smoke}\n"
    )


def test_a_resumed_run_lists_the_files_that_it_kept(port):
    written = after(port().output, "Files written:")
    again = port().output
    kept = after(again, "Files kept:")
    assert "vllm_neuron/model/tiny/model.py" in kept
    assert set(kept) == {path for path in written if STATE_FOLDER not in path}
    assert "Files written:" not in again


def test_a_port_without_its_row_names_the_command_for_it(port):
    output = port("--no-register").output
    assert "then autoport register tiny --replace-row --workspace" in output


def test_a_refused_step_1_leaves_nothing(tmp_path, workspace):
    arguments = ["port", "tiny", str(tmp_path / "nowhere"), "--workspace", str(workspace.root), "--dry-run"]
    assert CliRunner().invoke(app, arguments).exit_code != 0
    assert not (workspace.root / STATE_FOLDER).exists()


def test_the_status_says_how_to_go_on(port, workspace):
    def status():
        return CliRunner().invoke(app, ["status", "tiny", "--workspace", str(workspace.root)]).output

    assert port("--review", "--batch-size", "2").exit_code == 3
    command = f"autoport port tiny --workspace {workspace.root} --dry-run --batch-size 2"
    assert f"To go on: {command} --confirm, after the review" in status()
    assert port("--batch-size", "2").exit_code == 0
    assert "To go on" not in status()


def test_the_status_of_a_port_that_was_only_reviewed_has_no_source(workspace):
    Port(workspace, "nova").save()
    output = CliRunner().invoke(app, ["status", "nova", "--workspace", str(workspace.root)]).output
    assert "nova without a SOURCE, in " in output


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (64_000, "64.00 kB"), (2_100_000, "2.10 MB"), (10**9, "1.00 GB")],
)
def test_sizes_of_small_models_are_not_zero(size, text):
    assert size_text(size) == text
