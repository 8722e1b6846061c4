"""Modules, process groups and a model over two ranks."""

import pytest
import simulator_ranks
import torch
from autoport.validation import ranks
from toy_model import reference, save_toy
from vllm_neuron.parallel import neuron_parallel_state as state
from vllm_neuron.simulator.activate import activate, deactivate


def test_modules_over_two_ranks(tmp_path):
    results = ranks.run(simulator_ranks.modules, 2, log_dir=tmp_path, timeout=120)
    failed = [
        f"{part}: {name}" for part, (checks, _) in results.items() for name, ok in checks.items() if not ok
    ]
    assert failed == []
    assert {part: errors for part, (_, errors) in results.items() if errors} == {
        "linear": {
            "features": "AssertionError",
            "bias dtype": "NotImplementedError",
            "no bias dtype": "NotImplementedError",
        },
        "embedding": {"2-D": "ValueError", "odd": "AssertionError"},
        "sampler": {"no rank": "ValueError", "width": "ValueError"},
    }


def test_a_model_over_two_ranks(tmp_path):
    prompts = [[1, 2, 3, 4, 5], list(range(40))]
    prefill, decode, reports = ranks.run(
        simulator_ranks.toy_model, 2, save_toy(tmp_path), prompts, log_dir=tmp_path / "log", timeout=120
    )
    expected = torch.stack([reference(prompt)[-1] for prompt in prompts])
    assert torch.allclose(prefill, expected, atol=1e-4)
    expected = torch.stack([reference([*prompt, i + 1])[-1] for i, prompt in enumerate(prompts)])
    assert torch.allclose(decode, expected, atol=1e-4)
    per_forward = {"all_reduce": 2, "all_gather": 1}  # embedding, attention; head
    assert reports == {
        ("prefill", 32): per_forward,
        ("prefill", 128): per_forward,
        ("decode", 2): per_forward,
    }


def test_one_rank_with_every_feature_off(tmp_path):
    with pytest.raises(AssertionError, match="not initialized"):
        state.get_neuron_attention_tp_group()
    activate(1, 0, tmp_path / "a")
    with pytest.raises(RuntimeError, match="a rank already"):
        activate(1, 0, tmp_path / "b")
    assert (state.get_neuron_ep_degree(), state.get_neuron_ep_rank()) == (1, 0)
    assert (state.get_neuron_attention_dp_size(), state.get_neuron_mlp_dp_rank()) == (1, 0)
    assert state.get_neuron_lm_head_tp_group().world_size == 1
    assert state.get_neuron_vision_dp_group() is None
    for getter in (state.get_neuron_ep_group, state.get_neuron_ep_tp_group, state.get_wide_ep_group):
        with pytest.raises(AssertionError, match="expert"):
            getter()
    deactivate()
    assert not state.is_initialized()
    activate(1, 0, tmp_path / "c")
    deactivate()


def test_expert_mesh(monkeypatch):
    assert state.expert_mesh(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="8 is not divisible by ep_degree 3"):
        state.expert_mesh(8, 3)
    # 8 rows of 8 follow the topology of the device, unless the switch is used.
    monkeypatch.delenv("VLLM_NEURON_SWITCH_CC", raising=False)
    rows = state.expert_mesh(64, 8)
    assert rows[:3] == [
        [0, 1, 2, 3, 12, 13, 14, 15],
        [4, 5, 6, 7, 8, 9, 10, 11],
        [16, 17, 18, 19, 28, 29, 30, 31],
    ]
    assert sorted(rank for row in rows for rank in row) == list(range(64))
    monkeypatch.setenv("VLLM_NEURON_SWITCH_CC", "1")
    assert state.expert_mesh(64, 8)[0] == list(range(8))
