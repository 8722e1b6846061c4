"""Make this process a rank of the simulated device."""

import logging
import os
import sys
import warnings
from pathlib import Path

import torch


def activate(tp_size: int, rank: int, init_file: str | os.PathLike[str], ep_degree: int = 1) -> None:
    """Set vLLM's platform and create the process groups of this rank. All ranks call it together.

    Args:
        tp_size: Ranks of the tensor-parallel group, which is the world.
        rank: This process, 0 to ``tp_size - 1``.
        init_file: A path that does not exist yet, the same for all ranks, through which they find each other.
        ep_degree: Expert partitions; 1 is off.

    Raises:
        RuntimeError: The process is a rank already.
        ValueError: `tp_size` does not divide by `ep_degree`.
    """
    torch.set_num_threads(1)
    quiet()
    set_platform()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from vllm_neuron.parallel.neuron_parallel_state import initialize_neuron_parallel_state

    if torch.distributed.is_initialized():
        raise RuntimeError("this process is a rank already; call deactivate() first")
    with set_current_vllm_config(VllmConfig()):
        method = f"file://{Path(init_file).resolve()}"
        parallel_state.init_distributed_environment(tp_size, rank, method, rank, "gloo")
        parallel_state.ensure_model_parallel_initialized(tp_size, 1)
        initialize_neuron_parallel_state(ep_degree=ep_degree)
    # Shared memory that only the engine's executor uses, and that a rank which is killed would leave behind.
    parallel_state.get_tp_group().mq_broadcaster = None


def deactivate() -> None:
    """Destroy the process groups; the platform stays. All ranks call it together."""
    from vllm.distributed import parallel_state

    from vllm_neuron.parallel.neuron_parallel_state import destroy_neuron_parallel_state

    destroy_neuron_parallel_state()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def set_platform() -> None:
    """Make the simulated device vLLM's platform, also in modules that took another one when imported."""
    import vllm.platforms

    from vllm_neuron.vllm.platform import NeuronPlatform

    before = vllm.platforms._current_platform
    if isinstance(before, NeuronPlatform):
        return
    platform = vllm.platforms._current_platform = NeuronPlatform()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and before is not None and vars(module).get("current_platform") is before:
            vars(module)["current_platform"] = platform


def quiet() -> None:
    """Keep vLLM and gloo from printing: standard output is for data."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # vLLM calls collectives under names that newer versions of torch warn about.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
