"""Import a workspace's models on the simulator, with nothing installed.

``vllm_neuron.model.<name>`` is taken from the workspace when it has that model; all the rest of
``vllm_neuron`` stays the simulator. In a workspace whose package is ``private_vllm_neuron``, that name is
another one for the same modules: ``private_vllm_neuron.x`` is ``vllm_neuron.x``.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import vllm_neuron

MODELS = "vllm_neuron.model."


def overlay(workspace_root: str | Path, package: str) -> None:
    """Lay the models of a workspace over the simulator's, in place of any earlier workspace.

    Args:
        workspace_root: Folder that contains `package`.
        package: ``"vllm_neuron"`` or ``"private_vllm_neuron"``.

    Raises:
        RuntimeError: ``vllm_neuron`` was imported from the workspace, so it is not the simulator.
    """
    root = Path(workspace_root).resolve()
    if Path(vllm_neuron.__file__).resolve().is_relative_to(root):
        raise RuntimeError(
            f"vllm_neuron was imported from the workspace {root}; put the simulator first on sys.path"
        )
    remove_overlay()
    sys.meta_path.insert(0, _WorkspaceFinder(root / package / "model", MODELS))
    alias_package(package)


def overlay_package(folder: str | Path, module: str, package: str) -> None:
    """Make a package outside the plugin importable, in place of any earlier workspace.

    Args:
        folder: Folder that contains the package.
        module: Its import name.
        package: What it imports the plugin as, ``"vllm_neuron"`` or ``"private_vllm_neuron"``.
    """
    remove_overlay()
    sys.meta_path.insert(0, _WorkspaceFinder(Path(folder).resolve(), "", only=module))
    alias_package(package)


def alias_package(package: str) -> None:
    """Let the plugin be imported under its other name, too."""
    if package != "vllm_neuron":
        sys.meta_path.insert(0, _AliasFinder(package))


def current_overlay() -> tuple[Path, str] | None:
    """Root and package of the workspace that is laid over the simulator, None when there is none."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, _WorkspaceFinder) and not finder.only]
    return (finders[0].folder.parents[1], finders[0].folder.parent.name) if finders else None


def remove_overlay() -> None:
    """Take the workspace's models and the other package name away again."""
    for finder in [f for f in sys.meta_path if isinstance(f, _WorkspaceFinder | _AliasFinder)]:
        sys.meta_path.remove(finder)
        if isinstance(finder, _AliasFinder):
            _forget(finder.package)
        elif finder.only:
            _forget(finder.only)
    parent = sys.modules.get("vllm_neuron.model")
    for name in [name for name in sys.modules if name.startswith(MODELS)]:
        model = name.removeprefix(MODELS).split(".")[0]
        if hasattr(sys.modules.get(MODELS + model), "__path__"):
            _forget(MODELS + model)
            if parent is not None and hasattr(parent, model):
                delattr(parent, model)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
        del sys.modules[name]


class _WorkspaceFinder(MetaPathFinder):
    """Finds packages and their modules in a folder: ``vllm_neuron.model.<name>`` in that of the models.

    Args:
        folder: Folder of the packages.
        prefix: What stands before the name of a package.
        only: The one package that is found, any if empty.
    """

    def __init__(self, folder: Path, prefix: str, only: str = ""):
        self.folder = folder
        self.prefix = prefix
        self.only = only

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        parts = fullname.removeprefix(self.prefix).split(".")
        if self.only not in ("", parts[0]) or not (self.folder / parts[0] / "__init__.py").is_file():
            return None
        place = self.folder.joinpath(*parts)
        is_package = (place / "__init__.py").is_file()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        if not file.is_file():
            return None
        return spec_from_file_location(
            fullname,
            file,
            loader=_UncachedLoader(fullname, str(file)),
            submodule_search_locations=[str(place)] if is_package else None,
        )


class _UncachedLoader(SourceFileLoader):
    """Compiles the source every time.

    Bytecode files are compared by size and whole seconds, so one could stand for a file that was just edited,
    and they do not belong in a user's checkout.
    """

    def path_stats(self, path: Any) -> Any:
        raise OSError("bytecode is neither read nor written")


class _AliasFinder(MetaPathFinder, Loader):
    """Gives ``<package>`` and everything below it the modules of ``vllm_neuron``."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.package and not fullname.startswith(self.package + "."):
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module("vllm_neuron" + spec.name.removeprefix(self.package))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already; give it back the spec that the import of its other name replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
