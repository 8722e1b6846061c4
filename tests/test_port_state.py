"""A port's files and state: hand-made edits, sources, the lock."""

import pytest
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.workspace import Workspace
from refusals import rules


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


def test_a_file_in_the_place_of_a_ports_folder_is_refused(tmp_path):
    workspace = Workspace.create(tmp_path / "workspace")
    (workspace.root / ".autoport").mkdir(exist_ok=True)
    (workspace.root / ".autoport/small").write_text("")
    with pytest.raises(Refusal, match="PORT-STATE: is a file, not the folder of a port"):
        Port(workspace, "small")
