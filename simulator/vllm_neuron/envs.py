"""Environment variables, read at every access: ``envs.VLLM_NEURON_CPU_MODE``.

Booleans are ``0`` or ``1``. Besides the plugin's own variables there are those of the simulator:

- ``VLLM_NEURON_SIM_STRICT`` (default 1): whether breaking a rule of the device raises or is recorded.
- ``VLLM_NEURON_SIM_WORKSPACE`` and ``VLLM_NEURON_SIM_PACKAGE``, see `vllm_neuron.simulator.process`.
- ``VLLM_NEURON_SIM_RECORDS``, see `vllm_neuron.simulator.recording`.
"""

import os
from collections.abc import Callable
from typing import Any


def _flag(name: str, default: bool) -> Callable[[], bool]:
    return lambda: bool(int(os.environ.get(name, str(int(default)))))


_VARIABLES: dict[str, Callable[[], Any]] = {
    "VLLM_NEURON_CPU_MODE": _flag("VLLM_NEURON_CPU_MODE", False),
    "VLLM_NEURON_DEBUG_MODE": _flag("VLLM_NEURON_DEBUG_MODE", False),
    "VLLM_NEURON_DISABLE_NKI_KERNELS": _flag("VLLM_NEURON_DISABLE_NKI_KERNELS", False),
    "VLLM_NEURON_LOG_LEVEL": lambda: os.environ.get("VLLM_NEURON_LOG_LEVEL", "INFO"),
    "VLLM_NEURON_SIM_STRICT": _flag("VLLM_NEURON_SIM_STRICT", True),
    "VLLM_NEURON_SWITCH_CC": _flag("VLLM_NEURON_SWITCH_CC", False),
}


def __getattr__(name: str) -> Any:
    if name in _VARIABLES:
        return _VARIABLES[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_set(name: str) -> bool:
    """Whether the variable is in the environment."""
    return name in os.environ
