"""Workspace and port state: names, atomic writes, hand-made edits."""

import os
import sys
import threading
import time

import pytest
from autoport.cli import main
from autoport.errors import Refusal
from autoport.workspace import Port, Workspace, check_model_name, class_prefix, write_atomic


@pytest.fixture
def workspace(tmp_path):
    return Workspace.create(tmp_path / "workspace")


def rules(refusal):
    return [problem.rule for problem in refusal.value.problems]


@pytest.mark.parametrize("name", ["yi", "gpt_neox", "llama_3_2", "qwen2"])
def test_good_names(name):
    assert check_model_name(name) == name


@pytest.mark.parametrize(
    "name", ["Yi", "yi-6b", "../evil", "a/b", "", "1st", "yi_", "_yi", "a__b", "yi.py", "yi\n", "ÿi"]
)
def test_names_that_are_not_snake_case(name):
    with pytest.raises(Refusal) as refusal:
        check_model_name(name)
    assert rules(refusal) == ["NAME-SNAKE"]


def test_a_name_that_no_file_system_takes():
    with pytest.raises(Refusal) as refusal:
        check_model_name("a" * 300)
    assert rules(refusal) == ["NAME-LONG"]


@pytest.mark.parametrize(("name", "hint"), [("PhiMoE", "phimoe"), ("yi-6b", "yi_6b"), ("None", "gpt_neox")])
def test_a_bad_name_comes_with_a_good_one(name, hint):
    with pytest.raises(Refusal, match=f"e.g. '{hint}'"):
        check_model_name(name)
    assert check_model_name(hint) == hint


@pytest.mark.parametrize("name", ["class", "registry", "kv_cache", "torch", "none"])
def test_reserved_names(name):
    with pytest.raises(Refusal) as refusal:
        check_model_name(name)
    assert rules(refusal) == ["NAME-RESERVED"]


@pytest.mark.parametrize(
    ("name", "prefix"), [("yi", "Yi"), ("gpt_neox", "GPTNeoX"), ("deepseek_v2", "DeepseekV2")]
)
def test_class_prefix(name, prefix):
    assert class_prefix(name) == prefix


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


def test_edited_and_foreign_files_are_kept(workspace):
    port = Port(workspace, "yi", "somewhere")
    port.write_files("generate", {"a.py": "1\n", "b.py": "1\n"})
    (workspace.root / "a.py").write_text("mine\n")
    (workspace.root / "c.py").write_text("foreign\n")
    with pytest.raises(Refusal) as refusal:
        port.write_files("generate", {"a.py": "2\n", "b.py": "2\n", "c.py": "2\n"})
    assert rules(refusal) == ["PORT-EDITED", "PORT-FOREIGN"]
    assert (workspace.root / "b.py").read_text() == "1\n"
    written = port.write_files("generate", {"a.py": "2\n", "b.py": "2\n", "c.py": "2\n"}, force=True)
    assert written.changed == ["a.py", "b.py", "c.py"]
    assert Port(workspace, "yi").file_status("a.py") == "ours"


def test_an_edit_of_what_would_be_written_again_stays(workspace):
    port = Port(workspace, "yi", "somewhere")
    port.write_files("generate", {"a.py": "1\n", "b.py": "1\n"})
    (workspace.root / "a.py").write_text("mine\n")
    written = port.write_files("generate", {"a.py": "1\n", "b.py": "2\n"})
    assert (written.changed, written.kept, written.beside) == (["b.py"], ["a.py"], [])
    assert (workspace.root / "a.py").read_text() == "mine\n"


def test_an_edit_can_be_merged(workspace):
    port = Port(workspace, "yi", "somewhere")
    port.write_files("generate", {"a.py": "1\n"})
    (workspace.root / "a.py").write_text("mine\n")
    written = port.write_files("generate", {"a.py": "2\n"}, keep_edited=True)
    assert (written.kept, written.beside) == (["a.py"], ["a.py.new"])
    assert [(workspace.root / name).read_text() for name in ("a.py", "a.py.new")] == ["mine\n", "2\n"]
    # Merged or not, the same text is not offered again.
    (workspace.root / "a.py.new").unlink()
    assert Port(workspace, "yi").write_files("generate", {"a.py": "2\n"}).beside == []
    assert not (workspace.root / "a.py.new").exists()
    (workspace.root / "c.py").write_text("foreign\n")
    with pytest.raises(Refusal) as refusal:
        port.write_files("generate", {"c.py": "2\n"}, keep_edited=True)
    assert rules(refusal) == ["PORT-FOREIGN"]


def test_another_source_needs_another_name_or_a_new_start(workspace):
    port = Port(workspace, "yi", "one")
    port.write_files("generate", {"a.py": "1\n"})
    with pytest.raises(Refusal) as refusal:
        Port(workspace, "yi", "two")
    assert rules(refusal) == ["PORT-SOURCE"]
    again = Port(workspace, "yi", "two", new_source=True)
    assert again.source == "two"
    assert again.file_status("a.py") == "ours"


def test_a_port_that_is_not_there_names_those_that_are(workspace):
    Port(workspace, "yi", "one").save()
    with pytest.raises(Refusal) as refusal:
        Port(workspace, "nope").read_state("plan.json", dict, "analyze")
    assert rules(refusal) == ["PORT-NONE"]
    assert "there are: yi" in str(refusal.value)


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


def test_the_lock_sees_what_another_run_has_recorded(workspace):
    port = Port(workspace, "yi", "one")
    Port(workspace, "yi", "one").write_files("generate", {"a.py": "1\n"})
    with port.lock():
        assert port.file_status("a.py") == "ours"


def test_a_local_source_is_the_same_from_anywhere(workspace, tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    Port(workspace, "yi", "checkpoint").save()
    monkeypatch.chdir("/")
    assert Port(workspace, "yi", str(tmp_path / "checkpoint")).source == str(tmp_path / "checkpoint")


def test_damaged_state_is_named(workspace):
    port = Port(workspace, "yi", "somewhere")
    port.save()
    (port.state_dir / "port.json").write_text('{"name": 3')
    with pytest.raises(Refusal) as refusal:
        Port(workspace, "yi")
    assert rules(refusal) == ["PORT-STATE"]
    assert "port.json" in str(refusal.value)


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


def test_a_file_in_the_place_of_a_ports_folder_is_refused(tmp_path):
    workspace = Workspace.create(tmp_path / "workspace")
    (workspace.root / ".autoport").mkdir(exist_ok=True)
    (workspace.root / ".autoport/small").write_text("")
    with pytest.raises(Refusal, match="PORT-STATE: is a file, not the folder of a port"):
        Port(workspace, "small")
