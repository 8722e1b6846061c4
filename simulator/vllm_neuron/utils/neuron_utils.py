"""Questions that model code asks about where it runs."""

import contextlib
import os
from typing import Any

import torch

from vllm_neuron import envs


def can_run_kernel(device: torch.Tensor | str = "") -> bool:
    """Whether the plugin would take a kernel for a tensor, or for a device string, instead of torch code.

    The simulator's operators have no kernels and do not ask; this is for model code that does.
    """
    if envs.VLLM_NEURON_DISABLE_NKI_KERNELS:
        return False
    if envs.VLLM_NEURON_CPU_MODE:
        return os.environ.get("NKI_SIMULATOR") == "1"
    name = str(device.device) if isinstance(device, torch.Tensor) else device
    return name != "cpu"


def values_are_readable(tensor: torch.Tensor) -> bool:
    """False where a tensor has no values to look at: while tracing, and for fake and meta tensors."""
    if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
        return False
    return not (tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor))


def model_forward_context(vllm_config: Any) -> contextlib.AbstractContextManager[Any]:
    """Context of every forward of the model runner: after warm-up a new shape is an error.

    Eager mode, which only CPU mode has, allows every shape.
    """
    if envs.VLLM_NEURON_CPU_MODE and vllm_config.model_config.enforce_eager:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("fail_on_recompile")
