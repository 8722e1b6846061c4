"""Python modules: whether one is there, and running one that imports nothing from the current folder.

`python -m MODULE` puts the current folder first on sys.path, and the current folder may be a downloaded
checkpoint, whose files must never run. `-P` does away with that from Python 3.11 on only.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parents[1]


def search_path() -> str:
    """PYTHONPATH for a process in another folder: the present entries made absolute, then this package's."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([*map(os.path.abspath, given), str(PACKAGE_PARENT)])


def run_module(
    module: str, *arguments: str, text: str, timeout: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `module` in an empty temporary folder with `text` as its input, and wait for it.

    Args:
        timeout: Seconds; None waits for ever.

    Raises:
        subprocess.TimeoutExpired: It was ended after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="autoport-") as empty:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=empty,
            env=os.environ | {"PYTHONPATH": search_path()},
        )


def installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    return module in sys.modules or importlib.util.find_spec(module) is not None
