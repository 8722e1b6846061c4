"""Where a model is read from: a local folder or a hub repository, its files read by byte range."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoport.errors import refuse

TRANSPORTS = ("http", "requests", "urllib3")  # modules whose errors the hub client lets through
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG_NAME = "config.json"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
PIECE_BYTES = 1024 * 1024
ATTEMPTS = 3  # each of which is retried by the hub client where no byte came
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 8.0


class Source:
    """Top-level files of a model.

    Attributes:
        name: What the user gave.
        sizes: Size in bytes by file name.
        contents: What tells the content of a file apart from any other, by file name; empty for a local folder.
        bytes_read: Bytes read so far.
        first_read: How many bytes of a file to read when it is not known yet how many are needed.
    """

    first_read = 100_000  # one request then gets the whole header of most safetensors files

    def __init__(self, name: str, sizes: dict[str, int]):
        self.name = name
        self.sizes = sizes
        self.contents: dict[str, str] = {}
        self.bytes_read = 0

    @property
    def config_name(self) -> str:
        """Name of the config file: config.json, unless the source is one other json file."""
        only = next(iter(self.sizes), "")
        return only if len(self.sizes) == 1 and only.endswith(".json") else CONFIG_NAME

    @property
    def config_file(self) -> str:
        """Full name of the config file, for messages."""
        return self.where(self.config_name)

    def where(self, filename: str) -> str:
        """How messages name the file."""
        return f"{self.name}/{filename}"

    def read(self, filename: str, start: int, length: int) -> bytes:
        """Return up to `length` bytes of the file from offset `start`.

        Raises:
            Refusal: SRC-READ when the file cannot be read, SRC-LFS when it is a git-lfs pointer, SRC-HUB when the
                hub does not answer.
        """
        data = self._read(filename, start, length)
        self.bytes_read += len(data)
        if start == 0 and data.startswith(LFS_POINTER[: max(8, len(data))]):
            raise refuse(
                "SRC-LFS",
                "is a git-lfs pointer, not the file itself",
                self.where(filename),
                "run 'git lfs install && git lfs pull' in the clone, or download the model from the hub",
            )
        return data

    def _read(self, filename: str, start: int, length: int) -> bytes:
        raise NotImplementedError


class LocalSource(Source):
    """A folder; `only` narrows it to one file."""

    first_read = 8

    def __init__(self, name: str, folder: Path, only: str | None = None):
        self.folder = folder
        try:
            entries = [entry for entry in os.scandir(folder) if entry.is_file()]
            sizes = {entry.name: entry.stat().st_size for entry in entries if only in (None, entry.name)}
        except OSError as error:
            raise refuse(
                "SRC-READ", f"cannot list: {error.strerror}", folder, "check its permissions"
            ) from error
        super().__init__(name, sizes)

    def where(self, filename: str) -> str:
        return str(self.folder / filename)

    def _read(self, filename: str, start: int, length: int) -> bytes:
        try:
            with open(self.folder / filename, "rb") as file:
                file.seek(start)
                return file.read(length)
        except OSError as error:
            raise refuse(
                "SRC-READ", f"cannot read: {error.strerror}", self.where(filename), "check its permissions"
            ) from error


class HubSource(Source):
    """A model repository on the hub (`HF_ENDPOINT` and `HF_TOKEN` are honoured), read by ranged requests.

    Attributes:
        retries: Requests that failed and were made again.
    """

    def __init__(self, repo_id: str):
        from huggingface_hub import HfFileSystem

        self.retries = 0
        self.files = HfFileSystem(skip_instance_cache=True)
        with hub_errors(repo_id):
            entries: list[dict[str, Any]] = self.files.ls(repo_id, detail=True)
        names = {entry["name"].rpartition("/")[2]: entry for entry in entries if entry["type"] == "file"}
        super().__init__(repo_id, {name: int(entry["size"]) for name, entry in names.items()})
        self.contents = {name: str(entry["blob_id"]) for name, entry in names.items()}

    def _read(self, filename: str, start: int, length: int) -> bytes:
        """Read in pieces, so that a dropped connection costs one piece and reading goes on where it stopped."""
        end = min(start + length, self.sizes[filename])
        data = bytearray()
        with hub_errors(self.name), self.files.open(self.where(filename), "rb", cache_type="none") as file:
            while start + len(data) < end:
                position = start + len(data)
                data += self._piece(file, position, min(end, position + PIECE_BYTES))
        return bytes(data)

    def _piece(self, file: Any, start: int, end: int) -> bytes:
        """Bytes from `start` on, at most up to `end`; tries again while the connection fails."""
        for attempt in range(ATTEMPTS):
            try:
                file.seek(start)
                piece = bytes(file.read(end - start))
            except Exception as error:
                if attempt == ATTEMPTS - 1 or not _is_passing(error):
                    raise
                reason = str(error)
            else:
                if len(piece) > end - start:
                    raise OSError(f"{self.name} does not serve ranges: {len(piece)} bytes for {end - start}")
                if piece:
                    return piece
                reason = "no bytes"
            self.retries += 1
            time.sleep(min(FIRST_WAIT_SECONDS * 2**attempt, LONGEST_WAIT_SECONDS))
        raise OSError(f"gave up after {ATTEMPTS} attempts at byte {start}: {reason}")


def _is_passing(error: Exception) -> bool:
    """Whether a failure may be gone at the next attempt: the connection, or a server that is busy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 429) or status >= 500
    return isinstance(error, (OSError, TimeoutError)) or type(error).__module__.startswith(TRANSPORTS)


@contextlib.contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Turn the hub client's errors into a refusal."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise refuse(
            "SRC-HUB", f"{repo_id} is gated", repo_id, "accept its licence and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, FileNotFoundError) as error:
        raise refuse(
            "SRC-MISSING",
            f"no folder {repo_id!r} here, and no such model on the hub",
            repo_id,
            "check the spelling; a private model needs HF_TOKEN",
        ) from error
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        raise _unreachable(repo_id, error) from error
    except Exception as error:
        if not type(error).__module__.startswith(TRANSPORTS):
            raise
        raise _unreachable(repo_id, error) from error


def _unreachable(repo_id: str, error: Exception) -> Exception:
    from huggingface_hub import constants

    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return refuse(
        "SRC-HUB",
        f"no folder {repo_id!r} here, and the hub cannot be read: {reason}",
        f"hub at {constants.ENDPOINT}",
        "check the network, or download the model and pass its folder",
    )


def open_model(source: str) -> Source:
    """Open a local folder or a hub id, as `open_source` does, and not a single file.

    Raises:
        Refusal: SRC-FILE for a file; what `open_source` refuses.
    """
    path = _path(source)
    if os.path.isfile(path):
        raise refuse(
            "SRC-FILE",
            f"{source} is one file of a model",
            path,
            f"pass the folder that holds it: {path.parent}",
        )
    return open_source(source)


def open_source(source: str) -> Source:
    """Open a local folder, a single file in it, or a hub id.

    Raises:
        Refusal: SRC-MISSING when there is no such folder and it is no hub id (or the hub has no such model),
            SRC-HUB when the hub does not answer.
    """
    path = _path(source)
    if source and os.path.isdir(path):
        return LocalSource(source, path)
    if os.path.isfile(path):
        return LocalSource(source, path.parent, only=path.name)
    if HUB_ID.fullmatch(source):
        return HubSource(source)
    raise refuse(
        "SRC-MISSING",
        f"no file or folder {source!r}",
        path,
        "pass a checkpoint folder or a hub id (owner/model)",
    )


def _path(source: str) -> Path:
    """The path that a source is; `os.path` takes any text, `Path` raises on a name too long and an unknown user."""
    return Path(os.path.expanduser(source))
