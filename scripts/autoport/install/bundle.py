"""What is installed: the files of each skill, found in a checkout or in a wheel."""

import functools
from pathlib import Path, PurePosixPath

import autoport
from autoport.errors import Problem, Refusal
from autoport.resources import bundle_root

MAIN_SKILL = "autoport-vllm-neuron"
PARTS = (
    "SKILL.md",
    "README.md",
    "pyproject.toml",
    "references",
    "checklists",
    "templates",
    "skills",
    "simulator",
)
# Beside scripts/autoport/: what an agent or setup runs. The maintainers' scripts are left out.
LAUNCHERS = ("setup.sh", "demo.sh", "entry_point.py", "compute_tp.py", "inspect_checkpoint.py")
IGNORED = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".DS_Store"}


@functools.cache
def bundled_skills() -> dict[str, dict[str, Path]]:
    """Return, for each skill, its files: path inside the skill's folder -> file to copy.

    The main skill holds everything that a run needs. The sub-skills come also as folders of their own, since
    not every agent finds a skill inside another one.

    Raises:
        Refusal: INSTALL-BUNDLE with every part that is missing.
    """
    root, package = bundle_root(), Path(autoport.__file__).resolve().parent
    sources = {part: root / part for part in PARTS}
    sources |= {f"scripts/{name}": root / "scripts" / name for name in LAUNCHERS}
    missing = [path for path in sources.values() if not path.exists()]
    if missing:
        next_step = "install the wheel again, or use a complete checkout"
        raise Refusal(*(Problem("INSTALL-BUNDLE", "missing", str(path), next_step) for path in missing))
    main: dict[str, Path] = {}
    for target, source in sources.items():
        main |= _files(source, target)
    main |= _files(package, "scripts/autoport", leave_out=package / "bundle")
    skills = {MAIN_SKILL: main}
    for folder in sorted(path.parent for path in (root / "skills").glob("*/SKILL.md")):
        skills[folder.name] = _files(folder, "")
    return skills


def link_targets() -> dict[str, Path]:
    """Return the folder that a link to each skill points to.

    Raises:
        Refusal: INSTALL-LINK in a wheel, which has no such folder for the main skill.
    """
    root = bundle_root()
    if not (root / "scripts" / "autoport").is_dir():
        raise Refusal(
            Problem("INSTALL-LINK", "the package runs from a wheel", str(root), "install without --link")
        )
    return {name: root if name == MAIN_SKILL else root / "skills" / name for name in bundled_skills()}


def _files(source: Path, target: str, leave_out: Path | None = None) -> dict[str, Path]:
    if source.is_file():
        return {target: source}
    return {
        str(PurePosixPath(target, path.relative_to(source).as_posix())): path
        for path in sorted(source.rglob("*"))
        if path.is_file()
        and not IGNORED & set(path.relative_to(source).parts)
        and path.suffix != ".pyc"
        and not (leave_out and path.is_relative_to(leave_out))
    }
