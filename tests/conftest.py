"""Settings of the whole test session, and what several folders take from one place."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from autoport import port
from autoport.workspace import Workspace
from hypothesis import settings

if TYPE_CHECKING:
    from smollm2 import SmolLM2

# A shell starts background jobs with SIGINT ignored, and children inherit that; tests that interrupt a child need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None, print_blob=True)  # one that is busy takes longer
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for the temporary files of the session and its children: vLLM leaves sockets behind."""
    folder = str(tmp_path_factory.mktemp("t"))
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    yield
    os.environ.pop("TMPDIR")
    if before[0] is not None:
        os.environ["TMPDIR"] = before[0]
    tempfile.tempdir = before[1]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A checkout with no port in it."""
    return Workspace.create(tmp_path / "workspace")


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves steps out of the workflow, by name; the order of the others, and of all afterwards, stays."""

    def leave_out(*names: str) -> None:
        kept = {name: step for name, step in port.STEPS.items() if name not in names}
        monkeypatch.setattr(port, "STEPS", kept)

    return leave_out


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SmolLM2"]:
    from smollm2 import SmolLM2

    folder = tmp_path_factory.mktemp("smollm2")
    yield SmolLM2(folder)
    shutil.rmtree(folder)  # 270 MB
