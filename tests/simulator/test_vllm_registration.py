"""Rows of a workspace's registry, and the environment that carries the workspace into other processes."""

import os
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from vllm_neuron.simulator import environment
from vllm_neuron.simulator.process import SIMULATOR_DIR
from vllm_neuron.simulator.registration import read_rows

PLAIN = """
from vllm_neuron.model.llama3 import LlamaForCausalLM
from .yi import YiForCausalLM as Yi
from .broken import nothing

def get_models() -> list[tuple[str, type]]:
    models = [("LlamaForCausalLM", LlamaForCausalLM)]
    models.append(("YiForCausalLM", Yi))
    return models
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "registry.py"
    file.write_text(text)
    return file


def test_rows_are_read_and_nothing_is_imported(tmp_path):
    assert read_rows(write(tmp_path, PLAIN), "private_vllm_neuron") == [
        ("LlamaForCausalLM", "vllm_neuron.model.llama3", "LlamaForCausalLM"),
        ("YiForCausalLM", "private_vllm_neuron.model.yi", "YiForCausalLM"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_models(:", "invalid syntax"),
        ("rows = []", "0 functions"),
        (
            "def get_models():\n    return [('Yi', make())]",
            "registry.py:2: the class of 'Yi' is not imported",
        ),
        ("def get_models():\n    return [('Yi', Yi)]", "the class of 'Yi' is not imported"),
    ],
)
def test_a_registry_that_cannot_be_read(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_rows(write(tmp_path, text), "vllm_neuron")


def test_a_missing_registry(tmp_path):
    with pytest.raises(ValueError, match=r"registry\.py"):
        read_rows(tmp_path / "registry.py", "vllm_neuron")


def test_entry_points_beside_the_package_are_those_of_the_distribution():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")
    project = tomllib.loads((SIMULATOR_DIR / "pyproject.toml").read_text())["project"]
    [folder] = SIMULATOR_DIR.glob("*.dist-info")
    found = PathDistribution(folder)
    assert (found.metadata["Name"], found.version) == (project["name"], project["version"])
    points = {(point.group, point.name): point.value for point in found.entry_points}
    assert points == {
        (group, name): value
        for group, values in project["entry-points"].items()
        for name, value in values.items()
    }


def test_the_environment_puts_the_simulator_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/somewhere{os.pathsep}{SIMULATOR_DIR}")
    variables = environment(tmp_path, "private_vllm_neuron")
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(SIMULATOR_DIR), "/somewhere"]
    assert variables["VLLM_NEURON_SIM_WORKSPACE"] == str(tmp_path)
    assert variables["VLLM_NEURON_SIM_PACKAGE"] == "private_vllm_neuron"
    assert environment()["VLLM_NEURON_SIM_WORKSPACE"] == ""


@pytest.mark.parametrize("package", ["vllm_neuron", "private_vllm_neuron"])
def test_models_of_a_workspace_are_registered_with_vllm(tmp_path, monkeypatch, package):
    from engines import simulated
    from vllm_neuron.simulator.registration import register_models

    for name, answer in (("one", 1), ("two", 2)):
        model = tmp_path / name / package / "model"
        (model / "yi").mkdir(parents=True)
        (model / "yi" / "__init__.py").write_text(f"class YiForCausalLM:\n    answer = {answer}\n")
        write(
            model,
            "from .yi import YiForCausalLM\n\ndef get_models():\n    return [('YiForCausalLM', YiForCausalLM)]\n",
        )
        with simulated(tmp_path / name, package):
            from vllm import ModelRegistry

            register_models()
            row = ModelRegistry.models["YiForCausalLM"]
            assert row.load_model_cls().answer == answer
            assert row.inspect_model_cls().is_text_generation_model
            assert "LlamaForCausalLM" in ModelRegistry.models
