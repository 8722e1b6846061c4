"""The checkout that a port is written into."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from autoport.errors import refuse
from autoport.files import write_atomic
from autoport.resources import simulator_dir

PACKAGES = ("vllm_neuron", "private_vllm_neuron")


STATE_FOLDER = ".autoport"


class Workspace:
    """A checkout that contains `vllm_neuron/` (or `private_vllm_neuron/`).

    Attributes:
        root: Absolute path of the checkout.
        package: Name of the plugin's package in it.
        plugin_root: Folder that holds the plugin's package; the checkout itself, unless it is a
            `autoport.package_workspace.PackageWorkspace`.
    """

    def __init__(self, root: Path, package: str):
        self.root = root
        self.package = package
        self.plugin_root = root

    @classmethod
    def find(cls, path: str | os.PathLike[str], writable: bool = True) -> "Workspace":
        """Look for the plugin's package in `path`, or for a package that was made out of tree.

        Nothing is imported.

        Args:
            writable: Refuse a folder that cannot be written.

        Raises:
            Refusal: WS-MISSING when the folder or the package is not there, WS-WRITE when it is read-only.
        """
        from autoport.package_workspace import PackageWorkspace

        root = Path(path).expanduser().resolve()
        out_of_tree = (root / PackageWorkspace.RECORD).is_file()
        package = "" if out_of_tree else plugin_package(root)
        if writable and (out_of_tree or package) and not os.access(root, os.W_OK):
            raise refuse(
                "WS-WRITE",
                "the workspace is not writable",
                root,
                "change its permissions or pass another --workspace",
            )
        if out_of_tree:
            return PackageWorkspace.load(root)
        if package:
            return cls(root, package)
        raise refuse(
            "WS-MISSING",
            "no vllm_neuron/ or private_vllm_neuron/ package with a model/ folder",
            root,
            "pass the plugin's checkout with --workspace, or make one: autoport init-workspace DIR",
        )

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> "Workspace":
        """Make a workspace from the bundled simulator, with an empty registry.

        The packages that a real plugin finds installed come with it, so that generated tests run from its root.

        Raises:
            Refusal: WS-EXISTS when the folder is not empty.
        """
        root = Path(path).expanduser().resolve()
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise refuse("WS-EXISTS", "not an empty folder", root, "pass a new folder")
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "py.typed", ".mypy_cache")
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for init in simulator_dir().glob("*/__init__.py"):
                shutil.copytree(init.parent, root / init.parent.name, ignore=ignore)
        except OSError as error:
            raise refuse(
                "WS-WRITE", f"cannot create: {error.strerror or error}", root, "pass another folder"
            ) from error
        write_atomic(root / PACKAGES[0] / "model" / "registry.py", EMPTY_REGISTRY.encode())
        return cls(root, PACKAGES[0])

    def check_port(self, name: str) -> None:
        """Check that a port of this name can be here; a checkout holds any."""

    @property
    def registry_path(self) -> Path:
        """The plugin's registry."""
        return self.plugin_root / self.package / "model" / "registry.py"

    @property
    def registration_path(self) -> Path:
        """The file in which Step 5 registers a port."""
        return self.registry_path

    def model_module(self, name: str) -> str:
        """Dotted name of the package of a model."""
        return f"{self.package}.model.{name}"

    def model_dir(self, name: str) -> Path:
        return self.root.joinpath(*self.model_module(name).split("."))

    def readme(self, name: str) -> str:
        """Path of the model's README below the workspace; likewise `run_script` and `logit_test`."""
        return f"{self.package}/model/{name}/README.md"

    def run_script(self, name: str) -> str:
        return f"examples/vllm_neuron/models/{name}/run.py"

    def variant_tests(self, name: str) -> str:
        """Folder of the tests of a model's variants, below the workspace."""
        return f"test/{self.package}/model/{name}"

    def logit_test(self, name: str) -> str:
        return f"test/vllm_neuron/model/{name}/bf16/e2e/test_logits.py"

    def ports(self) -> list[str]:
        """Names of the ports that were started here."""
        return sorted(path.parent.name for path in (self.root / STATE_FOLDER).glob("*/port.json"))

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold an exclusive lock; the system releases it when the process dies, and the next holder tidies up."""
        path = self.root / STATE_FOLDER / f"{name}.lock"
        try:
            file = _locked(path)
        except OSError as error:
            raise refuse(
                "WS-WRITE", f"cannot write: {error.strerror}", path.parent, "change the folder's permissions"
            ) from error
        with file:
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty, as soon as a port was started
                    path.parent.rmdir()


def _locked(path: Path) -> TextIO:
    """Open and lock a file; once more where another holder has removed it, or its folder, meanwhile."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir()
        try:
            file = open(path, "w")  # noqa: SIM115
        except FileNotFoundError:
            continue
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def plugin_package(root: Path) -> str:
    """Name of the plugin's package in a folder, empty when it has none."""
    found = (p for p in PACKAGES if (root / p / "model").is_dir() and (root / p / "__init__.py").is_file())
    return next(found, "")


EMPTY_REGISTRY = '''\
"""Architectures that the plugin registers with vLLM."""


def get_models() -> list[tuple[str, type]]:
    """Return (Hugging Face architecture string, factory class) pairs."""
    return []
'''
