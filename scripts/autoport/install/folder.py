"""The folder of one installed skill, as found."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from autoport.install.access import refusing_os_errors
from autoport.install.bundle import bundled_skills
from autoport.install.stamp import STAMP, file_hash, read_stamp

State = Literal["absent", "current", "outdated", "edited", "damaged", "linked", "foreign"]


class SkillState(msgspec.Struct):
    """A skill's folder as found.

    Attributes:
        version: Version in the stamp, empty where there is none.
        edited: Installed files that were changed since.
        missing: Installed files that are no longer there.
        foreign: Files that no installation put there (what setup and Python generate does not count).
    """

    skill: str
    folder: str
    state: State
    version: str = ""
    files: int = 0
    edited: list[str] = []
    missing: list[str] = []
    foreign: list[str] = []


@refusing_os_errors
def inspect_skill(target: Path, skill: str) -> SkillState:
    """Compare the folder of `skill` in `target` with its stamp and with the bundle."""
    folder = target / skill
    if folder.is_symlink():
        linked = _same_skill(folder, skill)
        return SkillState(skill, str(folder), "linked" if linked else "foreign")
    if not folder.exists():
        return SkillState(skill, str(folder), "absent")
    stamp = read_stamp(folder) if folder.is_dir() else None
    if stamp is None:
        return SkillState(skill, str(folder), "foreign")
    bundle = hashes(bundled_skills().get(skill, {}))
    found = {file: file_hash(folder / file) for file in stamp.files | bundle}
    edited = [
        file
        for file, digest in stamp.files.items()
        if found[file] is not None and found[file] not in (digest, bundle.get(file))
    ]
    missing = [file for file in stamp.files if found[file] is None]
    foreign = [
        file
        for file in _other_files(folder)
        if file not in stamp.files and found.get(file, "") != bundle.get(file)
    ]
    state: State = "current" if stamp.files == bundle else "outdated"
    state = "edited" if edited else "damaged" if missing else state
    return SkillState(
        skill, str(folder), state, stamp.version, len(stamp.files), sorted(edited), sorted(missing), foreign
    )


@refusing_os_errors
def installed_skills(target: Path) -> list[str]:
    """Names of the bundle's skills, and of older ones of ours that are still in `target`."""
    own = [path.parent.name for path in sorted(target.glob(f"*/{STAMP}")) if not path.parent.is_symlink()]
    return list(dict.fromkeys([*bundled_skills(), *own]))


def hashes(files: dict[str, Path]) -> dict[str, str]:
    return {file: file_hash(path) or "" for file, path in files.items()}


def generated_folders(folder: Path) -> list[Path]:
    """Folders that setup.sh and Python make inside an installed skill."""
    return [Path(at, name) for at, folders, _ in os.walk(folder) for name in _take_generated(at, folders)]


def _take_generated(at: str, folders: list[str]) -> list[str]:
    """Take the generated ones out of `folders`, so that a walk does not go into them."""
    generated = [
        name
        for name in folders
        if name == "__pycache__" or (name == ".venv" and any(Path(at, name).glob(".autoport-*")))
    ]
    folders[:] = [name for name in folders if name not in generated]
    return generated


def _other_files(folder: Path) -> list[str]:
    """Files in `folder`, as paths inside it, without the stamp and what is generated."""
    found = []
    for at, folders, files in os.walk(folder):
        _take_generated(at, folders)
        links = [name for name in folders if Path(at, name).is_symlink()]
        found += [Path(at, name).relative_to(folder).as_posix() for name in [*files, *links]]
    return sorted(file for file in found if file != STAMP)


def _same_skill(folder: Path, skill: str) -> bool:
    """Whether a linked folder holds a skill of this bundle's name."""
    try:
        text = (folder / "SKILL.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return f"name: {skill}" in text.split("---")[1].splitlines() if text.startswith("---") else False
