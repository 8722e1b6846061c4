"""Where a config class has a field that it does not simply hold: by model type, as expressions.

Each is what the class's modeling or configuration file computes, see `autoport.expressions`. A number that the
code fixes stands here as a literal.
"""

READINGS: dict[str, dict[str, str]] = {}


def reading(model_type: str, field: str) -> str | None:
    """The expression for a field of `Facts`, or None when it is the attribute of one of the usual names."""
    return READINGS.get(model_type, {}).get(field)
