"""Files that are whole at every moment, and the json of the port's state."""

import errno
import hashlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from autoport.errors import refuse

T = TypeVar("T")


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
