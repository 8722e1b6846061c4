"""Where a port can be run: the bundled simulator, the real plugin on the CPU, or a trn2 instance."""

import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from autoport.doctor import devices
from autoport.errors import Problem, Refusal
from autoport.modules import installed
from autoport.package_workspace import PLUGIN_GROUP as GENERAL_GROUP
from autoport.package_workspace import PackageWorkspace
from autoport.resources import simulator_dir
from autoport.validation.ranks import INSTALL
from autoport.workspace import Workspace

BackendName = Literal["simulator", "cpu-mode", "trn2"]
PLUGIN_GROUP = "vllm.platform_plugins"
DEVICE_COMPILER = "libtorch_neuronx_lite"
IMPORT_SECONDS = 120.0
# Compilation takes most of the time on a device; the simulator has nothing to compile.
START_SECONDS = {"simulator": 600.0, "cpu-mode": 1800.0, "trn2": 7200.0}
INSTALL_PLUGIN = (
    "install the plugin from its checkout (pip install -e DIR) in the environment of the Neuron SDK"
)


class Backend(msgspec.Struct, frozen=True):
    """A place to run a port in, see `open_backend`.

    Attributes:
        environment: Variables that a run needs there.
        place: Text for reports, e.g. ``"simulator on 2 CPU cores"``.
        start_seconds: Time limit for an engine to start.
    """

    name: BackendName
    environment: dict[str, str]
    place: str
    start_seconds: float

    @property
    def is_simulated(self) -> bool:
        return self.name == "simulator"


def open_backend(
    name: BackendName, workspace: Workspace, expert_parallel: bool, start_seconds: float | None = None
) -> Backend:
    """Return the backend if it can be used here.

    Args:
        start_seconds: Time limit for an engine to start; None for the usual one there.

    Raises:
        Refusal: BACKEND with everything that is missing.
    """
    problems = unavailable(name, workspace)
    if problems:
        raise Refusal(*problems)
    return Backend(
        name,
        environment(name, workspace, expert_parallel),
        describe_place(name),
        start_seconds or START_SECONDS[name],
    )


def best_backend() -> BackendName:
    """The device where there is one, else the simulator."""
    return "trn2" if devices() else "simulator"


def environment(name: BackendName, workspace: Workspace, expert_parallel: bool) -> dict[str, str]:
    """Variables that a run needs on that backend; on the device those of the plugin's guide."""
    if name == "simulator":
        sys.path.append(str(simulator_dir()))  # the set-up imports neither torch nor vLLM
        try:
            from vllm_neuron.simulator.process import environment as simulated
        finally:
            sys.path.pop()
        if isinstance(workspace, PackageWorkspace):
            return simulated(
                None, workspace.package, {workspace.module: str(workspace.development_install())}
            )
        return simulated(workspace.root, workspace.package)
    variables = {"NEURON_SKIP_EFA_AFFINITY": "1"}
    if expert_parallel:
        variables["VLLM_NEURON_SWITCH_CC"] = "1"
    if name == "cpu-mode":
        variables["VLLM_NEURON_CPU_MODE"] = "1"
    return variables


def command_line(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """The command as a person would type it."""
    settings = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
    return " ".join([*settings, shlex.join(command)])


# --- What is missing --------------------------------------------------------------------------------------


def unavailable(name: BackendName, workspace: Workspace) -> list[Problem]:
    """Why the backend cannot be used here; empty when it can. Nothing big is imported into this process."""
    packages = ["torch", "vllm"] if name == "simulator" else ["torch", "vllm", DEVICE_COMPILER]
    problems = [
        Problem(
            "BACKEND",
            f"{name}: package {package} is not installed (import {package})",
            sys.executable,
            INSTALL_PLUGIN if package == DEVICE_COMPILER else INSTALL,
        )
        for package in packages
        if not installed(package)
    ]
    if name == "simulator":
        return problems
    if name == "trn2" and not devices():
        problems.append(
            Problem(
                "BACKEND",
                "trn2: no Neuron device",
                "/dev/neuron*",
                "run this command on a trn2 instance, or pass --on simulator",
            )
        )
    if name == "trn2" and os.environ.get("VLLM_NEURON_CPU_MODE", "0") not in ("", "0"):
        where = "variable VLLM_NEURON_CPU_MODE"
        problems.append(Problem("BACKEND", "trn2: the plugin is set to its CPU mode", where, "unset it"))
    problems += _plugin_problems(name, workspace)
    return problems or _import_problems(name, workspace)


def _plugin_problems(name: BackendName, workspace: Workspace) -> list[Problem]:
    """The workspace has to be the real plugin's checkout, and vLLM has to know the plugin."""
    init = workspace.plugin_root / workspace.package / "__init__.py"
    if "__simulator__" in init.read_text(errors="replace"):
        return [
            Problem(
                "BACKEND",
                f"{name}: this workspace's {workspace.package} is the simulator",
                str(init),
                "pass the plugin's checkout with --workspace, or --on simulator",
            )
        ]
    problems = []
    if isinstance(workspace, PackageWorkspace) and workspace.module not in {
        entry.name for entry in importlib.metadata.entry_points(group=GENERAL_GROUP)
    }:
        text = f"{name}: the port's package {workspace.distribution} is not installed"
        where = f"entry points {GENERAL_GROUP} of {sys.executable}"
        problems.append(
            Problem("BACKEND", text, where, f"python -m pip install {shlex.quote(str(workspace.root))}")
        )
    entries = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    if not any(entry.value.split(":")[0].split(".")[0] == workspace.package for entry in entries):
        problems.append(
            Problem(
                "BACKEND",
                f"{name}: no installed package gives vLLM the platform of {workspace.package}",
                f"entry points {PLUGIN_GROUP} of {sys.executable}",
                INSTALL_PLUGIN,
            )
        )
    return problems


def _import_problems(name: BackendName, workspace: Workspace) -> list[Problem]:
    """Import the plugin in a process of its own."""
    code = f"import {DEVICE_COMPILER}, {workspace.package}.vllm.platform"
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            cwd=workspace.root,
            env=os.environ | environment(name, workspace, False),
        )
    except subprocess.TimeoutExpired:
        text = f"{name}: not imported within {IMPORT_SECONDS:.0f} s"
        return [Problem("BACKEND", text, f"{sys.executable} -c {code!r}", INSTALL_PLUGIN)]
    if result.returncode == 0:
        return []
    reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    return [Problem("BACKEND", f"{name}: {reason}", f"{sys.executable} -c {code!r}", INSTALL_PLUGIN)]


def describe_place(name: BackendName) -> str:
    """Where numbers are measured, for reports."""
    cores = len(os.sched_getaffinity(0))
    if name == "trn2":
        return f"trn2, {len(devices())} Neuron devices"
    what = "simulator" if name == "simulator" else "the plugin in CPU mode"
    return f"{what} on {cores} CPU cores ({cpu_model()})"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown CPU"
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "unknown CPU")
