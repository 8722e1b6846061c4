"""The step driver: order, resume after a kill, and what a kill may leave behind."""

import ast
import os
import pathlib
import signal
import traceback

import pytest
from autoport import files as files_module
from autoport.errors import Refusal
from autoport.port import fingerprint, run_port, run_step
from autoport.port_state import Port
from autoport.step import Options
from autoport.workspace import STATE_FOLDER, Workspace
from checkpoints import small_config, write_checkpoint

# The proof has rank processes of its own; their end is tested in tests/validation.
WRITERS = ("research", "analyze", "generate", "register", "document", "review")


@pytest.fixture
def source(tmp_path):
    return str(write_checkpoint(tmp_path / "checkpoint", small_config(hidden_size=256)))


def statuses(workspace, source):
    port = Port(workspace, "tiny", source)
    return {r.step: r.status for r in run_port(port, Options(dry_run=True), lambda *_: None)}


def test_step_1_runs_again_when_what_it_read_is_another(workspace, source):
    folder = pathlib.Path(source)
    (folder / "modeling_x.py").write_text("x = 1")
    port = Port(workspace, "tiny", source)
    before = fingerprint(port, "research", Options())
    for name, text, changes in (
        ("modeling_x.py", "x = 2", True),
        ("tokenizer.model", "a", True),  # whether there is a tokenizer
        ("tokenizer.model", "b", False),  # and not what it is
    ):
        (folder / name).write_text(text)
        after = fingerprint(port, "research", Options())
        assert (after != before) is changes
        before = after


def visible_files(workspace):
    """Everything in the workspace but the state folder: path -> content."""
    return {
        str(path.relative_to(workspace.root)): path.read_bytes()
        for path in sorted(workspace.root.rglob("*"))
        if path.is_file() and STATE_FOLDER not in path.parts and "__pycache__" not in path.parts
    }


def killed_run(workspace, source, step):
    """Run the port in a child that is killed at the first file replaced in `step`; returns its signal."""
    pid = os.fork()
    if pid:
        return os.WTERMSIG(os.waitpid(pid, 0)[1])
    try:
        port = Port(workspace, "tiny", source)

        def arm(name, _):
            if name == step:
                replace = os.replace

                def replace_and_die(*args):
                    replace(*args)
                    os.kill(os.getpid(), signal.SIGKILL)

                files_module.os.replace = replace_and_die

        list(run_port(port, Options(dry_run=True), arm))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def test_second_run_keeps_everything(workspace, source, leave_out):
    leave_out("prove")
    assert set(statuses(workspace, source).values()) == {"done"}
    before = visible_files(workspace)
    assert set(statuses(workspace, source).values()) == {"kept"}
    assert visible_files(workspace) == before


def test_kill_in_each_step_then_resume(tmp_path, workspace, source, leave_out):
    leave_out("prove")
    undisturbed = Workspace.create(tmp_path / "undisturbed")
    statuses(undisturbed, source)
    finished = visible_files(undisturbed)
    started = visible_files(workspace)

    for step in WRITERS:
        assert killed_run(workspace, source, step) == signal.SIGKILL
        left = visible_files(workspace)
        ast.parse(left["vllm_neuron/model/registry.py"])
        for path, content in left.items():
            assert content in (started.get(path), finished.get(path)), f"{path} after a kill in {step}"

    assert set(statuses(workspace, source).values()) <= {"done", "kept"}
    assert visible_files(workspace) == finished


def test_steps_need_the_steps_before_them(workspace, source):
    port = Port(workspace, "tiny", source)
    for step in ("analyze", "generate", "register", "document", "prove"):
        with pytest.raises(Refusal) as refusal:
            run_step(port, step, Options())
        assert refusal.value.problems[0].rule == "PORT-ORDER"


def test_edits_are_kept_and_checked_again(workspace, source, leave_out):
    leave_out("prove")
    statuses(workspace, source)
    model = workspace.model_dir("tiny") / "model.py"
    edited = model.read_text() + "\n# tuned by hand\n"
    model.write_text(edited)
    again = statuses(workspace, source)
    assert again["generate"] == "kept"
    assert again["review"] == "done"
    assert model.read_text() == edited

    # The generator's own text has not changed, so the edit stands.
    assert (
        "kept: vllm_neuron/model/tiny/model.py"
        in run_step(Port(workspace, "tiny"), "generate", Options()).summary
    )
    assert model.read_text() == edited


def test_the_review_is_done_again_when_a_document_is_lost(workspace, source, leave_out):
    leave_out("prove")
    statuses(workspace, source)
    (workspace.model_dir("tiny") / "README.md").unlink()
    leave_out("document")
    assert statuses(workspace, source)["review"] == "done"  # run, not kept


def test_a_lost_file_is_written_again(workspace, source, leave_out):
    leave_out("prove")
    statuses(workspace, source)
    (workspace.model_dir("tiny") / "factory.py").unlink()
    assert statuses(workspace, source)["generate"] == "done"
    assert (workspace.model_dir("tiny") / "factory.py").is_file()
