"""The stamp in an installed skill's folder, and what it says about the folder's files."""

from pathlib import Path, PurePosixPath

import msgspec

from autoport import __version__
from autoport.errors import refuse
from autoport.files import sha256
from autoport.install.bundle import MAIN_SKILL

STAMP = ".autoport-install.json"


class Stamp(msgspec.Struct):
    """Written last by an installation; a folder without it is not ours.

    Attributes:
        files: SHA-256 of every installed file, by path inside the skill's folder.
    """

    skill: str
    files: dict[str, str]
    version: str = __version__
    bundle: str = MAIN_SKILL


def read_stamp(folder: Path) -> Stamp | None:
    """Return the stamp of `folder`, or None where there is none.

    Raises:
        Refusal: INSTALL-STAMP when it is damaged, or names files outside the folder.
    """
    path = folder / STAMP
    if not path.is_file():
        return None
    try:
        stamp = msgspec.json.decode(path.read_bytes(), type=Stamp)
    except (OSError, msgspec.MsgspecError) as error:
        raise refuse("INSTALL-STAMP", f"cannot be read: {error}", path, f"remove {folder} by hand") from error
    root = folder.resolve()
    for file in stamp.files:
        inner = PurePosixPath(file)
        inside = not inner.is_absolute() and ".." not in inner.parts
        if not inside or not (folder / inner).parent.resolve().is_relative_to(root):
            raise refuse(
                "INSTALL-STAMP", f"names a file outside the skill: {file!r}", path, f"remove {folder} by hand"
            )
    return stamp


def file_hash(path: Path) -> str | None:
    """Return the SHA-256 of a file, or None where there is no file."""
    return sha256(path.read_bytes()) if path.is_file() else None
