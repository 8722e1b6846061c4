"""A Python package of its own for one port, outside the plugin's checkout."""

from pathlib import Path

import msgspec

from autoport.errors import Refusal, refuse
from autoport.files import read_json, write_atomic
from autoport.naming import check_model_name
from autoport.resources import simulator_dir
from autoport.workspace import PACKAGES, STATE_FOLDER, Workspace, plugin_package

PLUGIN_GROUP = "vllm.general_plugins"  # entry points that vLLM calls in every process


class PackageRecord(msgspec.Struct, frozen=True):
    """What `.autoport/package.json` of a package says: its port, and the plugin that it was made for."""

    name: str
    plugin_root: str
    plugin_package: str


class PackageWorkspace(Workspace):
    """A Python package of its own for one port, outside the plugin's checkout, which is only read.

    Attributes:
        name: The port.
        module: Import name of the package, e.g. ``"vllm_neuron_yi"``.
        lost_plugin: The plugin that it was made for is not where it was; the bundled simulator has the same API.
    """

    RECORD = f"{STATE_FOLDER}/package.json"

    def __init__(self, root: Path, record: PackageRecord):
        self.lost_plugin = not plugin_package(Path(record.plugin_root))
        super().__init__(root, PACKAGES[0] if self.lost_plugin else record.plugin_package)
        self.plugin_root = simulator_dir() if self.lost_plugin else Path(record.plugin_root)
        self.name = record.name
        self.module = f"vllm_neuron_{record.name}"

    @classmethod
    def load(cls, root: Path) -> "PackageWorkspace":
        try:
            record = read_json(root / cls.RECORD, PackageRecord)
        except Refusal as refusal:
            [problem] = refusal.problems
            next_step = "restore it, or begin the package again in a new folder"
            raise refuse(problem.rule, problem.found, root / cls.RECORD, next_step) from refusal
        return cls(root, record)

    @classmethod
    def open(cls, path: Path, name: str, plugin: Path | None) -> "PackageWorkspace":
        """Go on with the package in a folder, or begin one there.

        Args:
            plugin: The plugin's checkout, or the folder that it is installed in; None for the current folder where
                that is one, else for the bundled simulator. A package that was begun keeps the one that it was begun
                with, until another is named before it is planned.

        Raises:
            Refusal: OOT-FILE when the path is or goes through a file, WS-MISSING when `plugin` has no plugin,
                OOT-CHECKOUT when the folder is the plugin's, OOT-OTHER when it holds the package of another port,
                OOT-PLUGIN when it was made for another plugin, WS-WRITE.
        """
        check_model_name(name)
        root = path.expanduser().resolve()
        file = next((place for place in (root, *root.parents) if place.is_file()), None)
        if file:
            raise refuse(
                "OOT-FILE",
                f"{file} is a file, and the package is a folder",
                root,
                "pass a new or empty folder, or that of this port's package, with --out-of-tree DIR",
            )
        inside = next((place for place in (root, *root.parents) if plugin_package(place)), None)
        if inside:
            raise refuse(
                "OOT-CHECKOUT",
                f"the folder belongs to the plugin's checkout {inside}",
                root,
                "pass a folder outside it, or leave --out-of-tree away to port into the checkout",
            )
        if (root / cls.RECORD).is_file():
            workspace = cls.load(root)
            if workspace.is_begun:
                workspace.check_port(name)
                if plugin is None:
                    return workspace
                if workspace.is_planned and not workspace.lost_plugin:
                    workspace.check_plugin(plugin)
                    return workspace
        if plugin is None and plugin_package(Path.cwd()):
            plugin = Path.cwd()
        plugin_root = simulator_dir() if plugin is None else plugin.expanduser().resolve()
        package = plugin_package(plugin_root)
        if not package:
            raise refuse(
                "WS-MISSING",
                "no vllm_neuron/ or private_vllm_neuron/ package with a model/ folder",
                plugin_root,
                "pass the plugin's checkout with --workspace, or leave it away to take the bundled simulator",
            )
        record = PackageRecord(name, str(plugin_root), package)
        data = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
        write_atomic(root / cls.RECORD, data)
        write_atomic(root / STATE_FOLDER / ".gitignore", b"*\n")
        return cls(root, record)

    @property
    def is_begun(self) -> bool:
        """Whether a step has run; one that refused leaves nothing but the record."""
        return self.is_planned or (self.root / STATE_FOLDER / self.name / "port.json").exists()

    @property
    def is_planned(self) -> bool:
        """Whether Step 2 has run, which it does only where the plugin leaves the architecture to the package."""
        return self.is_written or (self.root / STATE_FOLDER / self.name / "plan.json").exists()

    @property
    def is_written(self) -> bool:
        """Whether the package's code is there."""
        return (self.root / self.module).exists()

    def check_plugin(self, plugin: Path) -> None:
        """Check that the package was made for this plugin.

        Raises:
            Refusal: OOT-PLUGIN.
        """
        if plugin.expanduser().resolve() != self.plugin_root:
            raise refuse(
                "OOT-PLUGIN",
                f"the package was made for the plugin in {self.plugin_root}, not for that in {plugin}",
                self.root / self.RECORD,
                "leave --workspace away to go on with this package; for the other plugin, make one in a new folder "
                "with --out-of-tree DIR",
            )

    def check_port(self, name: str) -> None:
        """Check that the package is the one of this port.

        Raises:
            Refusal: OOT-OTHER.
        """
        if name != self.name:
            raise refuse(
                "OOT-OTHER",
                f"the folder holds the package of port {self.name!r}, not of {name!r}",
                self.root,
                f"name {self.name!r}, or pass another folder: a package holds one port"
                + (
                    ""
                    if self.is_written
                    else f"; as nothing is generated yet, {STATE_FOLDER}/ in it may be deleted"
                ),
            )

    @property
    def distribution(self) -> str:
        """Name of the package for pip."""
        return self.module.replace("_", "-")

    def development_install(self) -> Path:
        """Folder that gives a process the package with its entry point, as an editable installation would."""
        site = self.root / STATE_FOLDER / "site"
        metadata = f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: 0\n"
        entry_points = f"[{PLUGIN_GROUP}]\n{self.module} = {self.module}:register\n"
        information = site / f"{self.module}-0.dist-info"
        write_atomic(information / "METADATA", metadata.encode())
        write_atomic(information / "entry_points.txt", entry_points.encode())
        link = site / self.module
        if not link.is_symlink():
            link.symlink_to(self.root / self.module)
        return site

    @property
    def registration_path(self) -> Path:
        return self.root / "pyproject.toml"

    def model_module(self, name: str) -> str:
        return self.module

    def readme(self, name: str) -> str:
        return "README.md"

    def run_script(self, name: str) -> str:
        return "examples/run.py"

    def variant_tests(self, name: str) -> str:
        return "tests"

    def logit_test(self, name: str) -> str:
        return "tests/test_logits.py"
