"""The end of `autoport port`: what a report of the port is written from."""

import re

import pytest
from autoport.cli import app
from autoport.cli.port_report import print_red_proof
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.proof import PhaseProof, Proof, ProofRun
from autoport.step import Options
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


def test_the_registry_is_listed_while_it_has_the_ports_row(port, workspace):
    def status():
        return CliRunner().invoke(app, ["status", "tiny", "--workspace", str(workspace.root)]).output

    registry = str(workspace.registry_path.relative_to(workspace.root))
    assert port("--review").exit_code == 3
    assert registry not in status()
    assert registry in after(port("--confirm").output, "Files written:")
    assert registry in after(port("--review", "--batch-size", "2").output, "Files kept:")
    assert re.search(f"{registry} .* has the row", status())
    workspace.registry_path.write_text(
        workspace.registry_path.read_text().replace("LlamaForCausalLM", "Other")
    )
    assert registry not in after(port("--review", "--batch-size", "4").output, "Files kept:")
    assert "has the row" not in status()


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
    assert f"After the review, to go on: {command} --confirm\n" in status()
    assert port("--batch-size", "2", "--confirm").exit_code == 0
    assert "o go on: " not in status()

    (workspace.model_dir("tiny") / "model.py").open("a").write("\n")
    assert re.search(r"review *│ outdated", status())
    assert f"To go on: {command}\n" in status()


def test_the_status_of_steps_that_ran_alone_says_how_to_go_on(tmp_path, workspace):
    source = write_checkpoint(tmp_path / "model", small_config(hidden_size=256))
    place = ["--workspace", str(workspace.root)]
    for step in (["research", "tiny", str(source)], ["analyze", "tiny", "--batch-size", "2"]):
        CliRunner().invoke(app, [*step, *place])
    output = CliRunner().invoke(app, ["status", "tiny", *place]).output
    assert f"To go on: autoport port tiny --workspace {workspace.root} --dry-run --batch-size 2\n" in output


def test_the_status_of_a_model_written_by_hand(workspace):
    (workspace.model_dir("nova")).mkdir()
    (workspace.model_dir("nova") / "model.py").write_text("x = 1\n")

    def status():
        return CliRunner().invoke(app, ["status", "nova", "--workspace", str(workspace.root)])

    [problem] = status().exception.problems
    assert problem.rule == "PORT-NONE"
    assert problem.next_step.startswith(f"autoport review nova --workspace {workspace.root}; ")
    assert f"autoport research nova SOURCE --workspace {workspace.root}" in problem.next_step
    nova = Port(workspace, "nova")
    run_step(nova, "review", Options())
    output = status().output
    assert re.search(r"generate *│ by hand", output)
    assert re.search(r"vllm_neuron/model/nova/model.py *│ by hand", output)
    assert re.search(r"review *│ red", output)
    (workspace.model_dir("nova") / "model.py").write_text("x = 2\n")
    output = status().output
    assert re.search(r"review *│ outdated", output)
    assert f"To go on: autoport review nova --workspace {workspace.root}\n" in output


def write_proof(port, run):
    proof = Proof(False, "simulator", "LlamaForCausalLM", {}, 0, 1e-3, 1.0, [run], {}, {})
    port.write_state("proof.json", proof)


def test_the_log_of_a_red_proof_can_be_read_from_any_folder(workspace, capsys):
    port = Port(workspace, "nova")
    run = ProofRun(1, "float32", [], [], {}, 1.0, "the port raised", ".autoport/nova/proof/rank0.log")
    write_proof(port, run)
    print_red_proof(port)
    log = workspace.root / run.log
    assert (
        capsys.readouterr().out
        == f"Log of the red run: autoport diagnose {log} --port nova --workspace {workspace.root}\n"
    )


def test_logits_that_differ_are_no_matter_of_a_log(workspace, capsys):
    port = Port(workspace, "nova")
    phase = PhaseProof("decode", 4, 0.5, "position 1", 4, 2, failure="too far off")
    run = ProofRun(1, "float32", [phase], [], {}, 1.0, "too far off", ".autoport/nova/proof/rank0.log")
    write_proof(port, run)
    print_red_proof(port)
    assert "troubleshooting.md, under 'A red proof'" in capsys.readouterr().out


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
