"""How a process is set up so that the vLLM engine in it, and in its children, runs on the simulator."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_neuron.simulator.registration import PACKAGE, WORKSPACE

# Beside the package lies the metadata of a distribution, whose entry points vLLM finds on the path.
SIMULATOR_DIR = Path(__file__).resolve().parents[2]


def environment(
    workspace: str | os.PathLike[str] | None = None,
    package: str = "vllm_neuron",
    plugins: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment variables for a process that runs the vLLM engine on the simulator.

    They reach its engine core and workers too, forked or spawned. Nothing has to be installed.

    Args:
        workspace: Folder that contains `package`, whose models are laid over the simulator's; None for the
            simulator's alone.
        package: ``"vllm_neuron"`` or ``"private_vllm_neuron"``.
        plugins: Further general plugins of vLLM's: folder that has the package and its metadata, by entry point.
    """
    plugins = plugins or {}
    paths = [str(SIMULATOR_DIR), *plugins.values()]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *paths)]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        WORKSPACE: str(Path(workspace).resolve()) if workspace is not None else "",
        PACKAGE: package,
        "VLLM_NEURON_CPU_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Not all plug-ins: two platforms cannot be active. Naming this one here admits its models as well.
        "VLLM_PLUGINS": ",".join(("neuron", *plugins)),
        # vLLM's default. With "cpu" it does not look for plug-ins.
        "VLLM_TARGET_DEVICE": "cuda",
        # The server would choose "spawn", which takes seconds more for each process.
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        # A fork of a process with OpenMP threads hangs in its first parallel operation.
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def activate_engine(workspace: str | os.PathLike[str] | None = None, package: str = "vllm_neuron") -> None:
    """Set up this process; arguments as for `environment`. ``vllm.LLM`` then runs on the simulator.

    It can be called again for another workspace, between two engines.
    """
    os.environ.update(environment(workspace, package))
    if str(SIMULATOR_DIR) not in sys.path:
        sys.path.insert(0, str(SIMULATOR_DIR))
    from vllm_neuron.simulator.activate import set_platform

    set_platform()
