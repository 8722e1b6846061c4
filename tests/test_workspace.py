"""Workspace and port state: names, atomic writes, hand-made edits."""

import os
import sys

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
    assert rules(refusal) == ["PORT-EDITED", "PORT-EDITED"]
    assert (workspace.root / "b.py").read_text() == "1\n"
    assert port.write_files("generate", {"a.py": "2\n", "b.py": "2\n", "c.py": "2\n"}, force=True) == [
        "a.py",
        "b.py",
        "c.py",
    ]
    assert Port(workspace, "yi").file_status("a.py") == "ours"


def test_another_source_needs_another_name(workspace):
    Port(workspace, "yi", "one").save()
    with pytest.raises(Refusal) as refusal:
        Port(workspace, "yi", "two")
    assert rules(refusal) == ["PORT-SOURCE"]


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
