"""What was measured, for results.md: kept as data, so that writing the file again loses nothing."""

import msgspec

from autoport.codegen.features import model_hash
from autoport.port_state import Port

STATE_FILE = "results.json"
OFFLINE, ONLINE = "offline", "online"


class Measured(msgspec.Struct, frozen=True):
    """One section of results.md. Everything in it is data, also text that a model wrote.

    Attributes:
        verdict: ``"passed"`` or ``"failed"``.
        facts: (what, value): where and when it ran, on which checkpoint.
        checks: (check, status, what was found).
        numbers: (what, value with its unit).
        texts: (prompt, generated text).
    """

    verdict: str
    facts: list[tuple[str, str]]
    checks: list[tuple[str, str, str]]
    numbers: list[tuple[str, str]] = []
    texts: list[tuple[str, str]] = []


class Results(msgspec.Struct):
    """Sections by `OFFLINE` or `ONLINE`; they hold for the model's files with this hash only."""

    model_hash: str
    sections: dict[str, Measured]


def current_sections(port: Port) -> dict[str, Measured | None]:
    """What was measured with the model's files as they are now, None where nothing was."""
    sections: dict[str, Measured | None] = {OFFLINE: None, ONLINE: None}
    if port.has_state(STATE_FILE):
        recorded = port.read_state(STATE_FILE, Results, "smoke")
        if recorded.model_hash == model_hash(port):
            sections |= recorded.sections
    return sections


def keep_section(port: Port, name: str, measured: Measured) -> None:
    """Record a section; others keep what was recorded for the same files."""
    kept = {key: value for key, value in current_sections(port).items() if value is not None}
    port.write_state(STATE_FILE, Results(model_hash(port), kept | {name: measured}))
