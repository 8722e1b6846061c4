"""Numbers and times as text."""

import datetime


def size_text(size: int) -> str:
    """Bytes in the largest decimal unit of which there is one: ``13.91 GB``, ``2.10 MB``, ``64.00 kB``, ``12 B``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def number_text(value: float) -> str:
    """A number of a config with its digits, up to ten: ``1000000``, ``999999.442``, ``1e-05``, ``false``."""
    return str(value).lower() if isinstance(value, bool) else f"{value:.10g}"


def now() -> str:
    """Current UTC time, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
