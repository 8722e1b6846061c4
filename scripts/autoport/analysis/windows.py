"""Whether a window ever hides a token."""

from autoport.schema.architecture import Architecture


def binds(window: int | None, architecture: Architecture) -> bool:
    """Whether a window of so many tokens is shorter than the longest context of the model."""
    return window is not None and 0 < window < architecture.max_position_embeddings
