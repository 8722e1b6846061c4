"""What each backend refuses, and the environment that it gives."""

import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from autoport.errors import Refusal
from autoport.validation import backends
from autoport.validation.backends import command_line, environment, open_backend, unavailable
from autoport.validation.smoke import needs_expert_parallel
from autoport.workspace import Workspace


@pytest.fixture
def simulated(tmp_path):
    return Workspace.create(tmp_path / "simulated")


@pytest.fixture
def plugin(tmp_path):
    """A checkout whose package is not the simulator."""
    (tmp_path / "plugin" / "vllm_neuron" / "model").mkdir(parents=True)
    (tmp_path / "plugin" / "vllm_neuron" / "__init__.py").write_text("")
    return Workspace.find(tmp_path / "plugin")


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(backends, "devices", lambda: [Path("/dev/neuron0")])


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda package: True)
    entry = EntryPoint("neuron", "vllm_neuron:register", backends.PLUGIN_GROUP)
    monkeypatch.setattr(backends.importlib.metadata, "entry_points", lambda group: [entry])


def reasons(name, workspace):
    return [problem.found for problem in unavailable(name, workspace)]


def test_without_vllm_there_is_no_simulator(simulated, monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda package: package != "vllm")
    with pytest.raises(Refusal, match=r"BACKEND: simulator: package vllm is not installed \(import vllm\)"):
        open_backend("simulator", simulated, False)


def test_everything_that_is_missing_for_a_device_is_named_at_once(simulated, monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda package: False)
    monkeypatch.setattr(backends, "devices", list)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    found = " | ".join(reasons("trn2", simulated))
    for part in ("import torch", "import vllm", "import libtorch_neuronx_lite", "no Neuron device"):
        assert part in found
    assert "CPU mode" in found
    assert "is the simulator" in found


def test_cpu_mode_needs_no_device(simulated, monkeypatch, all_installed):
    monkeypatch.setattr(backends, "devices", list)
    assert reasons("cpu-mode", simulated) == ["cpu-mode: this workspace's vllm_neuron is the simulator"]


def test_a_checkout_that_is_not_installed(plugin, device, monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda package: True)
    monkeypatch.setattr(backends.importlib.metadata, "entry_points", lambda group: [])
    assert reasons("trn2", plugin) == ["trn2: no installed package gives vLLM the platform of vllm_neuron"]


def test_the_import_that_fails_is_named(plugin, device, all_installed):
    [found] = reasons("trn2", plugin)
    assert "No module named 'libtorch_neuronx_lite'" in found


def test_a_complete_installation_is_available(plugin, device, all_installed, monkeypatch):
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(backends.subprocess, "run", lambda *args, **options: done)
    backend = open_backend("trn2", plugin, expert_parallel=True)
    assert backend.environment == {"NEURON_SKIP_EFA_AFFINITY": "1", "VLLM_NEURON_SWITCH_CC": "1"}
    assert backend.place == "trn2, 1 Neuron devices"


def test_environments(simulated):
    before = list(sys.path)
    found = environment("simulator", simulated, True)
    assert found["VLLM_NEURON_SIM_WORKSPACE"] == str(simulated.root)
    assert "VLLM_NEURON_SWITCH_CC" not in environment("trn2", simulated, False)
    assert environment("cpu-mode", simulated, False)["VLLM_NEURON_CPU_MODE"] == "1"
    assert sys.path == before


def test_a_command_line_can_be_typed():
    assert command_line({"A": "x y"}, ["run", "it's"]) == """A='x y' run 'it'"'"'s'"""


@pytest.mark.parametrize(
    ("tp_size", "sub_group", "expected"),
    [
        (8, 4, False),
        (None, 4, True),
        (None, None, False),
        (8, "no experts", False),
        (None, "no experts", False),
    ],
)
def test_experts_are_spread_over_the_ranks_only_where_no_tp_size_holds_them(tp_size, sub_group, expected):
    ep = None if sub_group == "no experts" else types.SimpleNamespace(recommended=sub_group)
    plan = types.SimpleNamespace(tp=types.SimpleNamespace(recommended=tp_size), ep=ep)
    assert needs_expert_parallel(types.SimpleNamespace(read_state=lambda *_: plan)) is expected
