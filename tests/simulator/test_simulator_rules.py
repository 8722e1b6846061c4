import pytest
import torch
from vllm_neuron.simulator import rules


@pytest.fixture(autouse=True)
def clean_records():
    rules.reset()
    yield
    rules.reset()


@rules.operator
def double(x):
    rules.require(x.shape[0] % 2 == 0, "double", "even", "rows must be even", ValueError, got=x.shape)
    rules.fallback(x.shape[0] > 4, "double", "more than 4 rows", got=x.shape[0])
    return x * 2


def test_require_raises_the_devices_error_with_the_value():
    with pytest.raises(ValueError, match=r"rows must be even, got \(3,\)"):
        double(torch.ones(3))
    assert rules.records() == []


def test_not_strict_records_and_goes_on(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_SIM_STRICT", "0")
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    double(torch.ones(3))
    assert rules.records() == [rules.Record("double", "error", "even", "rows must be even, got (3,)", 2)]


def test_fallback_is_recorded_once_with_a_count_and_never_raises():
    for _ in range(3):
        double(torch.ones(6))
    assert rules.records() == [rules.Record("double", "fallback", "slow-path", "more than 4 rows, got 6", 3)]
    double(torch.ones(4))
    assert len(rules.records()) == 1
    rules.reset()
    assert rules.records() == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_traced_without_a_graph_break(monkeypatch, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(double, fullgraph=True, backend="eager", dynamic=dynamic)
    assert torch.equal(compiled(torch.ones(6)), torch.full((6,), 2.0))
    compiled(torch.ones(6))
    assert [(r.message, r.count) for r in rules.records()] == [("more than 4 rows, got 6", 1)]
    with pytest.raises(Exception, match=r"rows must be even, got \(3,\)"):
        compiled(torch.ones(3))
    torch._dynamo.reset()
    monkeypatch.setenv("VLLM_NEURON_SIM_STRICT", "0")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert rules.records()[-1].kind == "error"


def test_inside_operator():
    seen = []

    @rules.operator
    def inner():
        seen.append(rules.inside_operator())
        raise RuntimeError

    @rules.operator
    def outer():
        with pytest.raises(RuntimeError):
            inner()
        seen.append(rules.inside_operator())

    assert not rules.inside_operator()
    outer()
    assert seen == [True, True]
    assert not rules.inside_operator()


def test_operator_keeps_name_and_signature():
    assert double.__name__ == "double"
