"""The checkout a port is written into, and the port's own state inside it."""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

from autoport import __version__
from autoport.errors import Problem, Refusal, refuse
from autoport.resources import simulator_dir

PACKAGES = ("vllm_neuron", "private_vllm_neuron")
STATE_FOLDER = ".autoport"
STAGING = "staging"

T = TypeVar("T")


# --- Names ---

# Words of model names that the plugin writes in capitals; every other word is capitalised.
ACRONYMS = {
    "gpt": "GPT",
    "gptj": "GPTJ",
    "neox": "NeoX",
    "olmo": "OLMo",
    "moe": "Moe",
    "mpt": "MPT",
    "opt": "OPT",
}


LONGEST_NAME = 64
RESERVED_NAMES = {
    "registry", "kv_cache", "neuron_config", "interfaces", "synthetic",  # of the plugin's model package
    "torch", "transformers", "vllm", "vllm_neuron", "private_vllm_neuron", "numpy", "safetensors",
    "none", "true", "false",  # class prefixes None, True, False
}  # fmt: skip


def _snake_case(name: str) -> str:
    """The nearest name that can be used."""
    snake = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").lstrip("0123456789_")
    return snake if snake and not keyword.iskeyword(snake) and snake not in RESERVED_NAMES else "gpt_neox"


def check_model_name(name: str) -> str:
    """Return `name` if it can be a folder and module name under `model/`.

    Raises:
        Refusal: NAME-LONG, NAME-SNAKE for anything but lower-case snake_case, NAME-RESERVED for a Python keyword, a
            package that a port imports, or a name that the plugin's `model` package uses itself.
    """
    if len(name) > LONGEST_NAME:
        found = f"model name of {len(name)} characters: {name[:40]}..."
        raise refuse("NAME-LONG", found, "argument NAME", f"use at most {LONGEST_NAME} characters, e.g. 'yi'")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise refuse(
            "NAME-SNAKE",
            f"model name {name!r} is not snake_case",
            "argument NAME",
            "use lower-case letters, digits and single underscores, starting with a letter, "
            f"e.g. {_snake_case(name)!r}",
        )
    if keyword.iskeyword(name) or name in RESERVED_NAMES:
        raise refuse(
            "NAME-RESERVED",
            f"model name {name!r} is reserved",
            "argument NAME",
            f"choose another name, e.g. the family with its version, or '{name}_model'",
        )
    return name


def class_prefix(name: str) -> str:
    """PascalCase prefix of the generated classes: ``yi`` -> ``Yi``, ``gpt_neox`` -> ``GPTNeoX``."""
    return "".join(ACRONYMS.get(word, word[0].upper() + word[1:]) for word in name.split("_"))


# --- Atomic files ---


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_atomic(path: Path, data: bytes, staging: Path | None = None) -> None:
    """Write `data` to `path` so that a reader, or a kill at any moment, sees the old file or the new one.

    Args:
        staging: Folder on the same file system for the temporary file (default: beside the target).

    Raises:
        Refusal: WS-WRITE when the target cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "not writable", str(path))
        temporary = (staging or path.parent) / f".{path.name}.{os.getpid()}.part"
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.replace(temporary, path)
            except OSError as error:
                if error.errno != errno.EXDEV or staging is None:
                    raise
                write_atomic(path, data)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise refuse(
            "WS-WRITE",
            f"cannot write: {error.strerror or error}",
            path,
            "free space or change the folder's permissions, or pass another --workspace",
        ) from error


# --- Workspace ---


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

        Raises:
            Refusal: WS-EXISTS when the folder is not empty.
        """
        root = Path(path).expanduser().resolve()
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise refuse("WS-EXISTS", "not an empty folder", root, "pass a new folder")
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "py.typed", ".mypy_cache")
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(simulator_dir() / PACKAGES[0], root / PACKAGES[0], ignore=ignore)
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


# --- Port ---


class StepRecord(msgspec.Struct):
    """State of one step. `fingerprint` is a hash of everything the step read."""

    status: str
    fingerprint: str
    seconds: float
    finished: str
    summary: str = ""


class FileRecord(msgspec.Struct):
    """A file of the workspace that a step wrote. `pending` is set from just before a write until after it."""

    step: str
    sha256: str
    pending: str = ""


class Manifest(msgspec.Struct):
    """What is known of a port.

    Attributes:
        unregistered: The user left the architecture's row in registry.py to another model.
        incomplete: Sections of model.py that are still to be written by hand.
    """

    name: str
    source: str
    version: str = __version__
    unregistered: bool = False
    incomplete: list[str] = []
    steps: dict[str, StepRecord] = {}
    files: dict[str, FileRecord] = {}


class Port:
    """One model's port: its files in the workspace and its state in `.autoport/<name>/`.

    A local `source` is kept as an absolute path, so that the port can be resumed from any folder.
    """

    def __init__(self, workspace: Workspace, name: str, source: str = "", new_source: bool = False):
        self.workspace = workspace
        self.name = check_model_name(name)
        workspace.check_port(name)
        self.state_dir = workspace.root / STATE_FOLDER / name
        is_folder = bool(source) and Path(source).is_dir()
        self.manifest = self._load_manifest(str(Path(source).resolve()) if is_folder else source, new_source)

    @property
    def source(self) -> str:
        return self.manifest.source

    @property
    def exists(self) -> bool:
        """Whether a step of this port has run."""
        return self.has_state("port.json")

    def _load_manifest(self, source: str, new_source: bool) -> Manifest:
        path = self.state_dir / "port.json"
        if self.state_dir.exists() and not self.state_dir.is_dir():
            raise refuse("PORT-STATE", "is a file, not the folder of a port", self.state_dir, "move it away")
        if not path.is_file():
            return Manifest(name=self.name, source=source)
        manifest = read_json(path, Manifest)
        if source and manifest.source and source != manifest.source:
            if not new_source:
                raise refuse(
                    "PORT-SOURCE",
                    f"port {self.name!r} was started from {manifest.source!r}, not from {source!r}",
                    path,
                    "use another NAME; or start this port again from the new SOURCE, with --keep-edited to keep "
                    "the files that were edited, or --force to overwrite them",
                )
            manifest.source, manifest.steps = source, {}
        manifest.source = manifest.source or source
        return manifest

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the port's lock, with the manifest as the last holder left it and no leftovers of a killed run."""
        with self.workspace.lock(f"port-{self.name}"):
            if self.exists:
                on_disk = read_json(self.state_dir / "port.json", Manifest)
                if on_disk.source == self.source:
                    self.manifest = on_disk
            shutil.rmtree(self.state_dir / STAGING, ignore_errors=True)
            for left in self.state_dir.glob(".*.part"):
                left.unlink(missing_ok=True)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    (self.state_dir / STAGING).rmdir()

    def save(self) -> None:
        self.write_state("port.json", self.manifest)

    def write_state(self, filename: str, value: Any) -> Path:
        """Write a state file (json) atomically."""
        path = self.state_dir / filename
        write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        return path

    def has_state(self, filename: str) -> bool:
        return (self.state_dir / filename).is_file()

    def read_state(self, filename: str, kind: type[T], step: str) -> T:
        """Read a state file that step `step` writes.

        Raises:
            Refusal: PORT-NONE when there is no such port, PORT-ORDER when that step has not run yet, PORT-STATE
                when the file is damaged.
        """
        path = self.state_dir / filename
        if not path.is_file():
            if not self.exists and not self.source:
                raise self.no_such_port()
            raise refuse("PORT-ORDER", f"{filename} is missing", path, f"run '{self.command(step)}' first")
        return read_json(path, kind, f"run '{self.command(step)}' again")

    def command(self, step: str) -> str:
        """The command that runs a step of this port."""
        source = f" {shlex.quote(self.source) if self.source else 'SOURCE'}" if step == "research" else ""
        return f"autoport {step} {self.name}{source}"

    def file_status(self, relative: str) -> str:
        """``"missing"``, ``"ours"`` (as last written), ``"edited"`` (changed since) or ``"foreign"``."""
        path = self.workspace.root / relative
        if not path.exists():
            return "missing"
        record = self.manifest.files.get(relative)
        if record is None or not path.is_file():
            return "foreign"
        return "ours" if sha256(path.read_bytes()) in (record.sha256, record.pending) else "edited"

    def no_such_port(self) -> Refusal:
        there = ", ".join(self.workspace.ports()) or "none"
        return refuse(
            "PORT-NONE",
            f"no port named {self.name!r}; there are: {there}",
            self.workspace.root / STATE_FOLDER,
            f"name one of them, or start it: autoport port {self.name} SOURCE (a run that Step 1 refused left "
            "nothing here: mend what it named first)",
        )

    def write_files(
        self, step: str, files: dict[str, str], force: bool = False, keep_edited: bool = False
    ) -> "Written":
        """Write workspace files (path relative to the root -> text), all or none as far as refusals go.

        An edited file stays as it is where its text has not changed since it was last written.

        Args:
            force: Overwrite files that a person edited or that the port did not write.
            keep_edited: Leave edited files alone, and write a new text beside them, as ``<file>.new``.

        Raises:
            Refusal: PORT-EDITED for each edited file with a new text, PORT-FOREIGN for each file that is not the
                port's; all of them at once.
        """
        problems = []
        written = Written()
        texts = {}
        for relative, text in files.items():
            path = self.workspace.root / relative
            digest = sha256(text.encode())
            status = self.file_status(relative)
            if status != "missing" and path.is_file() and path.read_bytes() == text.encode():
                self.manifest.files[relative] = FileRecord(step=step, sha256=digest)
            elif status in ("missing", "ours") or force:
                written.changed.append(relative)
                texts[relative] = text
            elif status == "foreign":
                problems.append(_foreign(relative, path))
            elif self.manifest.files[relative].sha256 == digest:
                written.kept.append(relative)
            elif keep_edited:
                written.kept.append(relative)
                written.beside.append(f"{relative}.new")
                texts[f"{relative}.new"] = text
            else:
                problems.append(_edited(relative, path))
        if problems:
            raise Refusal(*problems)
        for relative in written.changed:
            record = self.manifest.files.get(relative) or FileRecord(step=step, sha256="")
            record.pending = sha256(texts[relative].encode())
            self.manifest.files[relative] = record
        self.save()
        for relative, text in texts.items():
            write_atomic(self.workspace.root / relative, text.encode(), staging=self.state_dir / STAGING)
            record = self.manifest.files[relative.removesuffix(".new")]
            record.sha256, record.pending = sha256(text.encode()), ""
        self.save()
        return written


class Written(msgspec.Struct):
    """What `Port.write_files` did: paths that changed, edited ones that were kept, new texts beside those."""

    changed: list[str] = []
    kept: list[str] = []
    beside: list[str] = []

    def __str__(self) -> str:
        text = f"; edited by hand and kept: {', '.join(self.kept)}" if self.kept else ""
        return text + (f"; to merge: {', '.join(self.beside)}" if self.beside else "")


def _edited(relative: str, path: Path) -> Problem:
    return Problem(
        "PORT-EDITED",
        f"{relative} was edited since it was generated, and its text would change",
        str(path),
        "pass --keep-edited to keep it and get the new text beside it (.new), or --force to overwrite it",
    )


def _foreign(relative: str, path: Path) -> Problem:
    return Problem(
        "PORT-FOREIGN",
        f"{relative} exists and was not written by this port",
        str(path),
        "use another NAME; --force overwrites it, and is right only where that file is to go",
    )


def read_json(path: Path, kind: type[T], next_step: str = "run the step that writes it again") -> T:
    """Decode a state file.

    Args:
        next_step: What to do about a file that cannot be read.

    Raises:
        Refusal: PORT-STATE when it cannot be read or does not match its type.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise refuse("PORT-STATE", f"cannot be read: {error}", path, next_step) from error


def now() -> str:
    """Current UTC time, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    return module in sys.modules or importlib.util.find_spec(module) is not None
