"""Finds known failures in a log of any size, and the likely place in a port.

The log is read in blocks with a little overlap, so memory does not grow with it. A block is searched for each
signature's literal text; only the lines found are looked at more closely.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from autoport.errors import refuse
from autoport.resources import references_dir
from autoport.review.step import Review

BLOCK_BYTES = 1 << 20
CONTEXT_BYTES = 8 << 10
LINE_BYTES = 4 << 10

ROW_RULE = "REG-ROW"
# A frame of a traceback in a model's file, in a checkout or in an installed plugin.
FRAME = re.compile(rb'File "(?:[^"\n]*/)?((?:private_)?vllm_neuron/model/[^"\n]+\.py)", line (\d+)')


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text of one line: one of the literals in `contains`, and `regex` where it is given."""

    contains: str | list[str]
    regex: str = ""

    @property
    def literals(self) -> list[str]:
        return [self.contains] if isinstance(self.contains, str) else self.contains


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A known failure.

    Attributes:
        rules: Rules of the self-review whose failed places are the likely cause in a port.
        next: The next command; by default the review and the proof of the port.
        wrapper: The message only passes on what went wrong elsewhere.
    """

    id: str
    section: str
    title: str
    signatures: list[Signature]
    cause: str
    fix: str
    rules: list[str]
    next: str = ""
    wrapper: bool = False


class Narrowing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to go on when nothing is known: a page of the references, for logs with one of these texts."""

    contains: list[str]
    page: str
    text: str


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sections: dict[str, str]
    failures: list[Failure]
    narrowing: list[Narrowing]


class Match(msgspec.Struct):
    """A known failure found in the log.

    Attributes:
        line: Number of the first line with it, from 1.
        text: That line.
        count: Lines with it.
        frame: The nearest traceback frame in a model's file, as ``path:line``, empty when there is none near.
        places: Failed places of the port under review, as ``path:line text``.
    """

    failure: Failure
    line: int
    text: str
    count: int = 1
    frame: str = ""
    places: list[str] = []


class Diagnosis(msgspec.Struct):
    """What is known about a log, in the order of first occurrence, wrappers last.

    Attributes:
        notes: What is wrong with the port whatever the log says.
        go_on_at: Page of the references that narrows an unknown failure down, empty when something matched.
        because: What the log has that leads there.
    """

    matches: list[Match]
    lines: int
    notes: list[str] = []
    go_on_at: str = ""
    because: str = ""


def load_catalogue(path: Path | None = None) -> Catalogue:
    """Read the known failures.

    Raises:
        Refusal: DIAG-CATALOGUE when the file is damaged or names a section that it does not define.
    """
    path = path or references_dir() / "failures.yaml"
    try:
        catalogue = msgspec.yaml.decode(path.read_bytes(), type=Catalogue)
        unknown = {failure.section for failure in catalogue.failures} - set(catalogue.sections)
        if unknown:
            raise ValueError(f"unknown section {', '.join(sorted(unknown))}")
    except (OSError, ValueError) as error:
        raise refuse("DIAG-CATALOGUE", f"cannot be read: {error}", path, "reinstall the bundle") from error
    return catalogue


def diagnose(log: BinaryIO, catalogue: Catalogue) -> Diagnosis:
    """Search a log; it is read once, from where it stands to its end."""
    matches: dict[str, Match] = {}
    hints: set[str] = set()
    lines = 0
    for block in blocks(log):
        for failure in catalogue.failures:
            for position, text in occurrences(failure, block):
                match = matches.get(failure.id)
                if match is None:
                    line = block.first_line + block.data.count(b"\n", block.start, position)
                    matches[failure.id] = match = Match(failure, line, text)
                else:
                    match.count += 1
                match.frame = match.frame or nearest_frame(block.data, position)
        hints |= {h for entry in catalogue.narrowing for h in entry.contains if h.encode() in block.data}
        lines = block.first_line + block.data.count(b"\n", block.start, block.end - 1)
    found = sorted(matches.values(), key=lambda match: (match.failure.wrapper, match.line))
    if any(not match.failure.wrapper for match in found):
        return Diagnosis(found, lines)
    entry = next(e for e in catalogue.narrowing if not e.contains or hints.intersection(e.contains))
    return Diagnosis(found, lines, go_on_at=f"references/{entry.page}", because=entry.text)


# --- Reading ----------------------------------------------------------------------------------------


class Block(msgspec.Struct):
    """A part of the log: ``data[start:end]`` belongs to it, the rest of `data` is context.

    Attributes:
        first_line: Number of the line at `start`, from 1.
    """

    data: bytes
    start: int
    end: int
    first_line: int


def blocks(log: BinaryIO) -> Iterator[Block]:
    """Cut the log at ends of lines into blocks with up to `CONTEXT_BYTES` of context on both sides."""
    before, pending, first_line = b"", log.read(BLOCK_BYTES), 1
    while pending:
        following = log.read(BLOCK_BYTES)
        # A line that fills the whole block is cut.
        end = (pending.rfind(b"\n") + 1 or len(pending)) if following else len(pending)
        rest = pending[end:] + following
        data = before + pending[:end] + rest[:CONTEXT_BYTES]
        yield Block(data, len(before), len(before) + end, first_line)
        first_line += pending.count(b"\n", 0, end)
        before, pending = (before + pending[:end])[-CONTEXT_BYTES:], rest


def occurrences(failure: Failure, block: Block) -> Iterator[tuple[int, str]]:
    """Lines of the block with one of the failure's signatures, each once: (position of its start, text)."""
    seen = set()
    for signature in failure.signatures:
        for literal in signature.literals:
            wanted = literal.encode()
            position = block.data.find(wanted, block.start, block.end + len(wanted) - 1)
            while position >= 0:
                start, text = _line_around(block.data, position)
                if start not in seen and (not signature.regex or re.search(signature.regex, text)):
                    seen.add(start)
                    yield start, text
                position = block.data.find(wanted, position + len(wanted), block.end + len(wanted) - 1)


def _line_around(data: bytes, position: int) -> tuple[int, str]:
    """Start and text of the line at `position`, cut to `LINE_BYTES` on each side."""
    earliest = max(0, position - LINE_BYTES)
    start = data.rfind(b"\n", earliest, position) + 1 or earliest
    end = data.find(b"\n", position, position + LINE_BYTES)
    return start, data[start : end if end >= 0 else position + LINE_BYTES].decode(errors="replace").strip()


def nearest_frame(data: bytes, position: int) -> str:
    """The traceback frame in a model's file that stands nearest to `position`, as ``path:line``."""
    earliest = max(0, position - CONTEXT_BYTES)
    frames = list(FRAME.finditer(data, earliest, position + CONTEXT_BYTES))
    if not frames:
        return ""
    frame = min(frames, key=lambda match: abs(match.start() - position))
    return f"{frame[1].decode(errors='replace')}:{frame[2].decode()}"


# --- Places in a port -------------------------------------------------------------------------------


def add_places(diagnosis: Diagnosis, review: Review) -> None:
    """Point each match at the places that the self-review found for the failure's rules; note a missing row."""
    results = {result.id: result for result in review.rules}
    if results[ROW_RULE].status == "fail":
        diagnosis.notes.append(
            f"{review.name} is not in registry.py, so the plugin does not run it: autoport register {review.name}"
        )
    for match in diagnosis.matches:
        for rule in match.failure.rules:
            wanted = ("fail", "judge") if results[rule].status == "judge" else ("fail",)
            findings = [finding for finding in results[rule].findings if finding.status in wanted]
            match.places += [f"{finding.where} {finding.text} ({rule})" for finding in findings]
