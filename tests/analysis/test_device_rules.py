"""Sizes that fused operators refuse: the plan says so where the simulator does."""

import itertools

import pytest
import torch
from autoport.analysis.device_rules import device_violations, slow_paths
from autoport.analysis.dimensions import Dimensions
from autoport.analysis.tensor_parallel import plan_tensor_parallel
from autoport.schema import WeightBytes
from vllm_neuron.functional.attention import _decode_rules, qkv
from vllm_neuron.functional.attention.qkv import QKVOutputLayout


def dimensions(**changes):
    sizes = {
        "num_layers": 2, "hidden_size": 3200, "num_heads": 32, "num_kv_heads": 32, "head_dim": 100,
        "intermediate_size": 8640, "vocab_size": 32000,
    }  # fmt: skip
    return Dimensions(**(sizes | changes))


def plan(size):
    return {
        item.tp_size: item
        for item in plan_tensor_parallel(size, {"all": WeightBytes(split=10**9)}, 128, 1).candidates
    }


def test_an_odd_number_of_partitions_is_excluded_where_the_kernel_would_run():
    candidates = plan(dimensions())
    assert candidates[2].valid  # 4800 columns: too many for the kernel, so the slow path takes it
    assert [item.rule for item in candidates[4].violations] == ["DEV-HIDDEN"]
    assert "3200 / 128 = 25 is odd" in candidates[4].violations[0].text
    assert all(item.valid for item in plan(dimensions(fused=False)).values() if item.tp_size in (1, 2, 4, 8))


@pytest.mark.parametrize("hidden", [1024, 1152, 3200, 4096, 576])
def test_plan_and_simulator_refuse_the_same_sizes(hidden):
    for heads, kv_heads, head_dim, tp in itertools.product((4, 8, 32), (1, 4, 8), (64, 128), (1, 2, 4)):
        if heads % kv_heads or heads % tp or (kv_heads % tp and tp % kv_heads):
            continue
        size = dimensions(hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        local = max(1, kv_heads // tp)
        weight = torch.empty(hidden, (heads // tp + 2 * local) * head_dim, device="meta")
        x = torch.empty(1, 64, hidden, device="meta")
        refused = False
        try:
            qkv._check_sizes(x, weight, QKVOutputLayout.BSD, head_dim, False, None)
            _decode_rules.check_sizes(x[:, :1], weight, head_dim, local, False, True)
        except AssertionError:
            refused = True
        assert bool([*device_violations(size, tp)]) == refused, (heads, kv_heads, head_dim, tp)


def test_slow_paths_are_named_and_do_not_exclude():
    rules = {item.rule: item.text for item in slow_paths(dimensions(hidden_size=4096, num_kv_heads=8), 2)}
    assert "4 KV heads per rank" in rules["PERF-KV-HEADS"]
    assert "TP 8 has one" in rules["PERF-KV-HEADS"]
    assert "PERF-HIDDEN" not in rules
    assert "PERF-HIDDEN" in {item.rule for item in slow_paths(dimensions(hidden_size=2880), 2)}


def test_experts_whose_share_is_no_multiple_of_16():
    size = dimensions(hidden_size=4096, expert_sizes={"an expert's intermediate size": 1416})
    assert [item.rule for item in device_violations(size, 2)] == ["DEV-INNER"]  # 708 per rank
    assert not [*device_violations(size, 12)]  # 118: below a partition, the slow path takes it
