"""Where the bundle's data folders are: beside `scripts/` in a checkout, inside the package in a wheel."""

import functools
from pathlib import Path


@functools.cache
def bundle_root() -> Path:
    """Folder that holds templates/, references/, checklists/, skills/ and simulator/."""
    package = Path(__file__).resolve().parent
    packaged = package / "bundle"
    return packaged if packaged.is_dir() else package.parent.parent


def templates_dir() -> Path:
    return bundle_root() / "templates"


def references_dir() -> Path:
    return bundle_root() / "references"


def checklists_dir() -> Path:
    return bundle_root() / "checklists"


def simulator_dir() -> Path:
    return bundle_root() / "simulator"
