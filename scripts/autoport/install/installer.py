"""Install, update and remove the skills in one agent's skills folder."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from autoport.errors import Problem, Refusal
from autoport.install.access import refusing_os_errors, write_problem
from autoport.install.bundle import MAIN_SKILL, bundled_skills, link_targets
from autoport.install.folder import SkillState, generated_folders, hashes, inspect_skill, installed_skills
from autoport.install.stamp import STAMP, Stamp, file_hash, read_stamp


class Change(msgspec.Struct):
    """What an installation or removal does, or did, to one skill's folder."""

    skill: str
    folder: str
    action: Literal["install", "update", "keep", "link", "remove"]
    files: int
    written: int = 0
    removed: int = 0
    foreign: list[str] = []


@refusing_os_errors
def install(target: Path, link: bool = False, dry_run: bool = False, force: bool = False) -> list[Change]:
    """Bring the skills in `target` to the state of the bundle; nothing changes where any of them is refused.

    Args:
        link: Link to this checkout instead of copying.
        dry_run: Return what would be done.
        force: Overwrite installed files that were edited.

    Raises:
        Refusal: INSTALL-FOREIGN for a folder, link or file that is not ours, INSTALL-EDITED for edited files,
            INSTALL-LINK where a link cannot be made, INSTALL-WRITE when `target` cannot be used,
            INSTALL-VERIFY when a copy differs from the bundle.
    """
    links = link_targets() if link else {}
    states = [inspect_skill(target, skill) for skill in installed_skills(target)]
    problems = [problem for state in states for problem in _conflicts(state, links.get(state.skill), force)]
    problems += _write_problems(target, states)
    if problems:
        raise Refusal(*problems)
    changes = [_planned(state, links.get(state.skill)) for state in states]
    if dry_run:
        return changes
    with _staging(target) as staging:
        for change in changes:
            if change.action in ("install", "update"):
                _stage(change.skill, staging / change.skill)
        for change in changes:
            _apply(change, staging / change.skill, links.get(change.skill))
    _verify(changes, link)
    return changes


@refusing_os_errors
def uninstall(target: Path, dry_run: bool = False, force: bool = False) -> list[Change]:
    """Remove what `install` put into `target`; files of other origin stay, and are listed.

    Raises:
        Refusal: INSTALL-EDITED for edited files (not with `force`), INSTALL-WRITE when `target` cannot be
            used.
    """
    states = [inspect_skill(target, skill) for skill in installed_skills(target)]
    states = [state for state in states if state.state not in ("absent", "foreign")]
    problems = [problem for state in states for problem in _edit_problems(state, force)]
    if states:
        problems += _write_problems(target, states)
    if problems:
        raise Refusal(*problems)
    changes = [
        Change(state.skill, state.folder, "remove", state.files, removed=state.files, foreign=state.foreign)
        for state in states
    ]
    if not dry_run:
        for state in states:
            _remove(Path(state.folder))
    return changes


# --- Plan ---------------------------------------------------------------------------------------------------


def _conflicts(state: SkillState, link_to: Path | None, force: bool) -> list[Problem]:
    next_step = "move it away, or install in another --scope"
    folder = Path(state.folder)
    if state.state == "foreign":
        return [Problem("INSTALL-FOREIGN", f"{state.skill} exists and is not ours", state.folder, next_step)]
    if link_to and not folder.is_symlink() and folder.resolve() == link_to:
        return [
            Problem("INSTALL-LINK", "cannot become a link to itself", state.folder, "install without --link")
        ]
    wanted = bundled_skills().get(state.skill, {})
    parents = {str(parent) for file in wanted for parent in PurePosixPath(file).parents}
    in_the_way = [
        file
        for file in state.foreign
        if link_to or file in parents or wanted.keys() & {file, *map(str, PurePosixPath(file).parents)}
    ]
    problems = [
        Problem("INSTALL-FOREIGN", f"{file} exists and is not ours", state.folder, next_step)
        for file in in_the_way
    ]
    return problems + _edit_problems(state, force)


def _edit_problems(state: SkillState, force: bool) -> list[Problem]:
    next_step = "move your version away, or pass --force to lose it"
    return [
        Problem("INSTALL-EDITED", f"{file} was edited since it was installed", state.folder, next_step)
        for file in ([] if force else state.edited)
    ]


def _write_problems(target: Path, states: list[SkillState]) -> list[Problem]:
    """The first folder that cannot be written: above or at `target`, else in each skill."""
    groups = [[next(path for path in (target, *target.parents) if path.exists())]]
    for state in states:
        folder = Path(state.folder)
        if folder.is_dir() and not folder.is_symlink():
            parents = sorted({(folder / file).parent for file in bundled_skills().get(state.skill, {})})
            groups.append([path for path in parents if path.is_dir()])
    problems = []
    for group in groups:
        for path in group:
            if not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
                problems.append(write_problem("not writable" if path.is_dir() else "not a folder", path))
                break
    return problems


def _planned(state: SkillState, link_to: Path | None) -> Change:
    wanted = bundled_skills().get(state.skill, {})
    change = Change(state.skill, state.folder, "keep", len(wanted), foreign=state.foreign)
    if not wanted:  # a skill of an older version
        change.action, change.removed = "remove", state.files
    elif link_to:
        if not (state.state == "linked" and Path(state.folder).resolve() == link_to):
            change.action, change.removed = "link", state.files
    elif state.state in ("absent", "linked"):
        change.action, change.written = "install", len(wanted)
    else:
        folder, bundle = Path(state.folder), hashes(wanted)
        stale = (read_stamp(folder) or Stamp(state.skill, {})).files.keys() - bundle.keys()
        change.written = sum(file_hash(folder / file) != digest for file, digest in bundle.items())
        change.removed = sum((folder / file).is_file() for file in stale)
        if change.written or change.removed or state.state != "current":
            change.action = "update"
    return change


# --- Do -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A folder in `target` for complete copies; removed at the end, with folders that stayed empty."""
    created = [path for path in (target, *target.parents) if not path.exists()]
    staging = target / f".{MAIN_SKILL}.{os.getpid()}.part"
    try:
        for leftover in target.glob(f".{MAIN_SKILL}.*.part"):
            shutil.rmtree(leftover)
        staging.mkdir(parents=True)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()


def _stage(skill: str, folder: Path) -> None:
    """Copy a skill's files and its stamp into `folder`, and compare the copies with the bundle."""
    sources = bundled_skills()[skill]
    for file, source in sources.items():
        copy = folder / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        shutil.copymode(source, copy)
    stamp = Stamp(skill, {file: file_hash(folder / file) or "" for file in sources})
    differing = [file for file, digest in hashes(sources).items() if stamp.files[file] != digest]
    if differing:
        raise Refusal(*(_verify_problem(folder / file) for file in differing))
    (folder / STAMP).write_bytes(msgspec.json.format(msgspec.json.encode(stamp), indent=2) + b"\n")


def _apply(change: Change, staged: Path, link_to: Path | None) -> None:
    folder = Path(change.folder)
    if change.action in ("remove", "link"):
        _remove(folder)
    if change.action == "link" and link_to:
        folder.symlink_to(link_to, target_is_directory=True)
    elif change.action == "install":
        if folder.is_symlink():
            folder.unlink()
        staged.rename(folder)
    elif change.action == "update":
        files = bundled_skills()[change.skill]
        old = read_stamp(folder)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (staged / file).replace(folder / file)
        _delete(folder, old.files.keys() - files.keys() if old else ())
        (staged / STAMP).replace(folder / STAMP)


def _remove(folder: Path) -> None:
    """Remove an installed skill: the link, or the stamped files and what setup and Python generated."""
    if folder.is_symlink():
        folder.unlink()
        return
    stamp = read_stamp(folder) if folder.is_dir() else None
    if stamp:
        for generated in generated_folders(folder):
            shutil.rmtree(generated)
        _delete(folder, stamp.files)
        (folder / STAMP).unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def _delete(folder: Path, files: Iterable[str]) -> None:
    """Delete `files`, the bytecode beside them, and the folders that are empty then."""
    for file in files:
        (folder / file).unlink(missing_ok=True)
        if file.endswith(".py"):
            shutil.rmtree((folder / file).parent / "__pycache__", ignore_errors=True)
        for parent in list(PurePosixPath(file).parents)[:-1]:
            with contextlib.suppress(OSError):
                (folder / parent).rmdir()


def _verify(changes: list[Change], link: bool) -> None:
    """Compare what is there now with the bundle.

    Raises:
        Refusal: INSTALL-VERIFY for every file that differs.
    """
    problems = []
    for change in changes:
        folder = Path(change.folder)
        if change.action != "remove":
            expected = hashes(bundled_skills()[change.skill])
            problems += [
                _verify_problem(folder / file)
                for file, digest in expected.items()
                if file_hash(folder / file) != digest
            ]
            if folder.is_symlink() is not link:
                problems.append(_verify_problem(folder))
    if problems:
        raise Refusal(*problems)


def _verify_problem(path: Path) -> Problem:
    return Problem(
        "INSTALL-VERIFY",
        "differs from the bundle after copying",
        str(path),
        "check the disk, and install again",
    )
