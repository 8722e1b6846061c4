"""Which chip the simulator stands for."""

import os

DEFAULT_PLATFORM_TARGET = "trn2"


def get_platform_target() -> str:
    """Platform name such as "trn2" or "trn3"; `NEURON_PLATFORM_TARGET_OVERRIDE` wins over the default."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "").strip().lower() or DEFAULT_PLATFORM_TARGET
