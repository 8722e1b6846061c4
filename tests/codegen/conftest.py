"""Fixtures of the tests of code generation."""

from pathlib import Path

import pytest
from autoport.port_state import Port
from autoport.workspace import Workspace


@pytest.fixture
def port(tmp_path: Path) -> Port:
    """A port named yi in a workspace that has nothing but the plugin's folders."""
    model = tmp_path / "vllm_neuron" / "model"
    model.mkdir(parents=True)
    (tmp_path / "vllm_neuron" / "__init__.py").touch()
    return Port(Workspace.find(tmp_path), "yi", "01-ai/Yi-6B")
