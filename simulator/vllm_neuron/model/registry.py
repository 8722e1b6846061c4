"""Architectures that the plugin registers with vLLM."""


def get_models() -> list[tuple[str, type]]:
    """Return (Hugging Face architecture string, factory class) pairs."""
    return []
