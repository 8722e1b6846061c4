"""Finding the decoder's config inside the config of a larger model."""

from collections.abc import Mapping
from typing import Any

TEXT_PATHS = (
    ("thinker_config", "text_config"),
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    ("thinker_config",),
)
VISION_PATHS = (("thinker_config", "vision_config"), ("vision_config",), ("vit_config",))


def find_text_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Path (``"text_config."``, or empty for a flat config) and config of the decoder; never of another tower."""
    return _find(config, TEXT_PATHS) or ("", config)


def find_vision_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Path and config of the vision tower, or None."""
    return _find(config, VISION_PATHS)


def _find(
    config: Mapping[str, Any], paths: tuple[tuple[str, ...], ...]
) -> tuple[str, Mapping[str, Any]] | None:
    for path in paths:
        part: Any = config
        for key in path:
            part = part.get(key) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and part:
            return ".".join(path) + ".", part
    return None
