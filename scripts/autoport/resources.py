"""Where the bundle's data folders are: beside `scripts/` in a checkout, inside the package in a wheel."""

import functools
import shlex
import sys
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


def install_command(extra: str) -> str:
    """The command that adds an extra of this package to the environment of the running Python.

    By path, as pip would ask its index for a name; in a wheel the name is that of what is installed.
    """
    root = bundle_root()
    package = str(root) if (root / "scripts" / "autoport").is_dir() else "autoport-vllm-neuron"
    return shlex.join([sys.executable, "-m", "pip", "install", f"{package}[{extra}]"])
