"""One model's port: its files in the workspace, and what is known of it in `.autoport/<name>/`."""

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from autoport import __version__
from autoport.errors import Problem, Refusal, refuse
from autoport.files import read_json, sha256, write_atomic
from autoport.naming import check_model_name
from autoport.workspace import STATE_FOLDER, Workspace

T = TypeVar("T")


STAGING = "staging"


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


Count = Annotated[int, msgspec.Meta(ge=1)]


class Chosen(msgspec.Struct, frozen=True):
    """Options of `autoport.step.Options` that a port keeps, so that a later command need not pass them again.

    None where nothing was chosen.
    """

    probe: bool | None = None
    incomplete: bool | None = None
    relax: list[str] | None = None
    context_length: Count | None = None
    batch_size: Count | None = None
    instance: str | None = None
    lnc: int | None = None
    tp_sizes: list[Count] | None = None

    def values(self) -> dict[str, Any]:
        """What was chosen."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Manifest(msgspec.Struct):
    """What is known of a port.

    Attributes:
        unregistered: The user left the architecture's row in registry.py to another model.
        incomplete: Sections of model.py that are still to be written by hand.
        command: What goes on with the last run of `autoport port`, with its options; empty after a step alone.
        chosen: What the steps were last run with.
    """

    name: str
    source: str
    version: str = __version__
    unregistered: bool = False
    incomplete: list[str] = []
    command: str = ""
    chosen: Chosen = Chosen()
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
        is_folder = os.path.isdir(source)
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
                    "use another NAME; or start this port again from the new SOURCE with 'autoport port', which "
                    "takes --keep-edited to keep the files that were edited, or --force to overwrite them; or delete "
                    f"{self.state_dir} to forget the old one",
                )
            manifest.source, manifest.steps, manifest.chosen = source, {}, Chosen()
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
        """The command that runs a step of this port from any folder."""
        source = f" {shlex.quote(self.source) if self.source else 'SOURCE'}" if step == "research" else ""
        return f"autoport {step} {self.name}{source} --workspace {shlex.quote(str(self.workspace.root))}"

    def file_status(self, relative: str) -> str:
        """``"missing"``, ``"ours"`` (as last written), ``"edited"`` (changed since) or ``"foreign"``."""
        path = self.workspace.root / relative
        if not path.exists():
            return "missing"
        record = self.manifest.files.get(relative)
        if record is None or not path.is_file():
            return "foreign"
        return "ours" if sha256(path.read_bytes()) in (record.sha256, record.pending) else "edited"

    def files_by_hand(self) -> list[str]:
        """Python files of a model that no step wrote, below the workspace."""
        root = self.workspace.root
        files = [
            str(path.relative_to(root)) for path in sorted(self.workspace.model_dir(self.name).glob("*.py"))
        ]
        return files if self.manifest.files.keys().isdisjoint(files) else []

    def no_such_port(self) -> Refusal:
        if self.files_by_hand():
            return refuse(
                "PORT-NONE",
                f"{self.name!r} was written by hand, or elsewhere: no step ran here",
                self.workspace.model_dir(self.name),
                f"{self.command('review')}; to analyse and prove it, begin with: {self.command('research')}",
            )
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
