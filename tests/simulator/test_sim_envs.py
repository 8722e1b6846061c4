import pytest
from vllm_neuron import envs


def test_variables_are_read_at_every_access(monkeypatch):
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE", raising=False)
    assert envs.VLLM_NEURON_CPU_MODE is False
    assert not envs.is_set("VLLM_NEURON_CPU_MODE")
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    assert envs.VLLM_NEURON_CPU_MODE is True
    assert envs.is_set("VLLM_NEURON_CPU_MODE")


def test_unknown_variables_are_an_error():
    with pytest.raises(AttributeError, match="VLLM_NEURON_NO_SUCH"):
        _ = envs.VLLM_NEURON_NO_SUCH
