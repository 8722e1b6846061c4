"""Sizes that fused operators refuse: the plan says so where the simulator does."""

import itertools

import pytest
import torch
from autoport.analysis.architecture import describe_architecture
from autoport.analysis.device_rules import device_violations, slow_paths
from autoport.analysis.dimensions import EXPERT, Dimensions
from autoport.research.step import research
from checkpoints import small_config, write_checkpoint
from vllm_neuron.functional.attention import _decode_rules, qkv
from vllm_neuron.functional.attention.qkv import QKVOutputLayout
from vllm_neuron.functional.mlp import _check_sizes
from vllm_neuron.functional.moe import moe_block_tkg
from vllm_neuron.simulator import rules


def dimensions(**changes):
    sizes = {
        "num_layers": 2, "hidden_size": 3200, "num_heads": 32, "num_kv_heads": 32, "head_dim": 100,
        "intermediate_size": 8640, "vocab_size": 32000,
    }  # fmt: skip
    return Dimensions(**(sizes | changes))


def test_the_plan_composes_where_the_simulator_refuses_and_only_there(tmp_path):
    """Fused attention on the simulator's own rules, for sizes around the multiples of 128."""
    for hidden, kv_heads, tp in itertools.product((896, 1024, 1152, 3200), (1, 2, 4), (1, 2, 4)):
        config = small_config(
            hidden_size=hidden, num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=hidden // 8
        )
        composed = describe_architecture(
            *research(str(write_checkpoint(tmp_path, config)))
        ).attention.composed
        local, head_dim = max(1, kv_heads // tp), hidden // 8
        if head_dim > 128:
            continue
        weight = torch.empty(hidden, (8 // tp + 2 * local) * head_dim, device="meta")
        x = torch.empty(1, 64, hidden, device="meta")
        refused = False
        try:
            qkv._check_sizes(x, weight, QKVOutputLayout.BSD, head_dim, False, None)
            _decode_rules.check_sizes(x[:, :1], weight, head_dim, local, False, True)
        except AssertionError:
            refused = True
        assert composed or not refused, (hidden, kv_heads, tp)
        assert bool(composed) == (hidden in (896, 1152, 3200))


def test_slow_paths_are_named_and_do_not_exclude():
    named = {item.rule: item.text for item in slow_paths(dimensions(hidden_size=4096, num_kv_heads=8), 2)}
    assert "4 KV heads per rank" in named["PERF-KV-HEADS"]
    assert "TP 8 has one" in named["PERF-KV-HEADS"]
    odd = [item.text for item in slow_paths(dimensions(hidden_size=3584, num_heads=28, num_kv_heads=4), 2)]
    assert not any("has one" in text for text in odd)  # TP 4 breaks R2
    assert "PERF-HIDDEN" not in named
    assert "PERF-HIDDEN" in {item.rule for item in slow_paths(dimensions(hidden_size=2880), 2)}


@pytest.mark.parametrize("hidden", [2048, 8192, 2944, 2880])
@pytest.mark.parametrize(("intermediate", "tp"), [(4096, 1), (4112, 1), (8192, 2), (11008, 2), (11008, 4)])
def test_the_prefill_of_the_mlp_is_slow_where_the_simulator_says_so(hidden, intermediate, tp):
    """A hidden size that is no multiple of 128 has a row of its own."""
    size = dimensions(hidden_size=hidden, intermediate_size=intermediate)
    planned = "PERF-MLP" in {item.rule for item in slow_paths(size, tp)}
    rules.reset()
    _check_sizes(512, hidden, intermediate // tp, False)
    assert planned == any("above 4096 in prefill" in record.message for record in rules.records())
    rules.reset()


def test_wide_shared_experts_are_named():
    size = dimensions(
        hidden_size=2048, intermediate_size=0, expert_sizes={"the shared experts' intermediate size": 20480}
    )
    named = {item.rule: item.text for item in slow_paths(size, 2)}
    assert "10240 columns of the shared experts" in named["PERF-MLP"]


@pytest.mark.parametrize("inner", [256, 192, 96])
@pytest.mark.parametrize("fused", [True, False])
def test_experts_are_slow_where_the_simulator_says_so(inner, fused):
    size = dimensions(
        hidden_size=2048, intermediate_size=0, expert_sizes={EXPERT: 4 * inner}, fused_experts=fused
    )
    text = {item.rule: item.text for item in slow_paths(size, 4)}.get("PERF-EXPERTS", "")
    rules.reset()
    moe_block_tkg._check_sizes(1, 2048, inner, top_k=1, is_all_expert=False, rank_id=None)
    assert ("decode" in text) == (fused and bool(rules.records()))
    rules.reset()
    assert ("prefill" in text) == (inner < 128)  # moe_cte


def test_what_a_hidden_size_slows_down_is_there():
    experts = {"expert_sizes": {EXPERT: 2880}, "intermediate_size": 0, "hidden_size": 2880}
    (text,) = [item.text for item in slow_paths(dimensions(**experts), 2) if item.rule == "PERF-HIDDEN"]
    assert text.endswith("slow paths in attention and the experts")
    composed = dimensions(**experts, fused=False, fused_experts=False)
    assert "PERF-HIDDEN" not in {item.rule for item in slow_paths(composed, 2)}


def test_experts_whose_share_is_no_multiple_of_16():
    size = dimensions(hidden_size=4096, expert_sizes={"an expert's intermediate size": 1416})
    assert [item.rule for item in device_violations(size, 2)] == ["DEV-INNER"]  # 708 per rank
    assert not [*device_violations(size, 12)]  # 118: below a partition, the slow path takes it
