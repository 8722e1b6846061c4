"""A workspace's models on top of the simulator's."""

import importlib
import sys

import pytest
import vllm_neuron.model.kv_cache
import vllm_neuron.utils.weight_loader
from vllm_neuron.simulator.overlay import overlay, overlay_package, remove_overlay


@pytest.fixture(autouse=True)
def clean():
    yield
    remove_overlay()


def write(root, package, files):
    for name, text in {"__init__.py": "", "model/__init__.py": "", **files}.items():
        path = root / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def model(package, value):
    return {
        "model/yi/__init__.py": (
            f"from {package}.model.yi.model import VALUE, KVSpec\nfrom .model import nn_util\n"
        ),
        "model/yi/model.py": (
            f"from {package}.model.kv_cache import KVSpec\n"
            f"import {package}.utils.weight_loader as nn_util\n"
            f"VALUE = {value}\n"
        ),
        # The workspace's own copy of the plugin is not used.
        "model/kv_cache.py": "raise RuntimeError('the plugin, not the simulator')\n",
        "utils/__init__.py": "raise RuntimeError('the plugin, not the simulator')\n",
    }


@pytest.mark.parametrize("package", ["vllm_neuron", "private_vllm_neuron"])
def test_the_model_is_the_workspaces_and_the_rest_is_the_simulators(tmp_path, package):
    overlay(write(tmp_path, package, model(package, 1)), package)
    yi = importlib.import_module(f"{package}.model.yi")
    assert yi.VALUE == 1
    assert yi.__file__ == str(tmp_path / package / "model/yi/__init__.py")
    assert yi.KVSpec is vllm_neuron.model.kv_cache.KVSpec
    assert yi.nn_util is vllm_neuron.utils.weight_loader


def test_both_names_are_one_module(tmp_path):
    overlay(write(tmp_path, "private_vllm_neuron", model("private_vllm_neuron", 1)), "private_vllm_neuron")
    private = importlib.import_module("private_vllm_neuron.model.yi.model")
    assert private is importlib.import_module("vllm_neuron.model.yi.model")
    assert private.__spec__.name == "vllm_neuron.model.yi.model"
    assert importlib.import_module("private_vllm_neuron") is vllm_neuron


def test_a_later_workspace_takes_the_place_of_the_earlier_one(tmp_path):
    overlay(write(tmp_path / "a", "vllm_neuron", model("vllm_neuron", 1)), "vllm_neuron")
    assert importlib.import_module("vllm_neuron.model.yi").VALUE == 1
    overlay(write(tmp_path / "b", "vllm_neuron", model("vllm_neuron", 2)), "vllm_neuron")
    assert importlib.import_module("vllm_neuron.model.yi").VALUE == 2
    remove_overlay()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vllm_neuron.model.yi")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("private_vllm_neuron")


def test_an_edited_model_is_seen_at_once_and_leaves_no_bytecode(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    root = write(tmp_path, "vllm_neuron", model("vllm_neuron", 1))
    overlay(root, "vllm_neuron")
    assert importlib.import_module("vllm_neuron.model.yi").VALUE == 1
    write(root, "vllm_neuron", model("vllm_neuron", 2))  # same size, same second
    overlay(root, "vllm_neuron")
    assert importlib.import_module("vllm_neuron.model.yi").VALUE == 2
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_bundled_model_is_hidden_and_comes_back(tmp_path):
    bundled = importlib.import_module("vllm_neuron.model.llama3")
    overlay(write(tmp_path, "vllm_neuron", {"model/llama3/__init__.py": "VALUE = 1\n"}), "vllm_neuron")
    assert importlib.import_module("vllm_neuron.model.llama3").VALUE == 1
    remove_overlay()
    assert importlib.import_module("vllm_neuron.model.llama3").__file__ == bundled.__file__


def test_a_model_that_the_workspace_lacks_is_the_bundled_one(tmp_path):
    overlay(write(tmp_path, "vllm_neuron", {}), "vllm_neuron")
    assert "simulator" in importlib.import_module("vllm_neuron.model.llama3").__file__


def test_the_workspaces_plugin_in_place_of_the_simulator_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_neuron, "__file__", str(tmp_path / "vllm_neuron/__init__.py"))
    with pytest.raises(RuntimeError, match=r"put the simulator first on sys\.path"):
        overlay(write(tmp_path, "vllm_neuron", {}), "vllm_neuron")
    assert not any(type(finder).__name__ == "_WorkspaceFinder" for finder in sys.meta_path)


@pytest.mark.parametrize("plugin", ["vllm_neuron", "private_vllm_neuron"])
def test_a_package_of_its_own_is_found_alone_and_takes_the_simulator_for_the_plugin(tmp_path, plugin):
    for value in (1, 2):
        folder = tmp_path / str(value)
        for module in ("vllm_neuron_yi", "other"):
            (folder / module).mkdir(parents=True)
            (folder / module / "__init__.py").touch()
        text = f"from {plugin}.model.kv_cache import KVSpec\nVALUE = {value}\n"
        (folder / "vllm_neuron_yi" / "model.py").write_text(text)
        overlay_package(folder, "vllm_neuron_yi", plugin)
        model = importlib.import_module("vllm_neuron_yi.model")
        assert (model.VALUE, model.KVSpec) == (value, vllm_neuron.model.kv_cache.KVSpec)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("other")
    assert not list(tmp_path.rglob("__pycache__"))
