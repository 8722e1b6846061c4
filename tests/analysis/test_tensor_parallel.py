"""The five rules, memory, and the recommendation."""

import msgspec
import pytest
from autoport.analysis.architecture import describe_architecture
from autoport.analysis.dimensions import EXPERT, SHARED, Dimensions
from autoport.analysis.estimate import weight_parts
from autoport.analysis.head_rules import candidate_sizes
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.padding import padded_sizes, padding
from autoport.analysis.tensor_parallel import (
    candidate_rows,
    no_valid_tp,
    parameter_bytes,
    plan_tensor_parallel,
    recommendation,
    total_bytes,
)
from autoport.analysis.weight_map import build_weight_map
from autoport.errors import Refusal
from autoport.research.step import research
from autoport.schema.parallel import WeightBytes
from checkpoints import real_config, write_checkpoint

YI = Dimensions(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=4, head_dim=128,
    intermediate_size=11008, vocab_size=64000,
)  # fmt: skip
QWEN2 = msgspec.structs.replace(
    YI, num_heads=28, hidden_size=3584, num_layers=28, intermediate_size=18944, vocab_size=152064
)
SMOLLM2 = Dimensions(
    num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, vocab_size=49152,
)  # fmt: skip


def plan(size, context=4096, batch=1, relax=()):
    return plan_tensor_parallel(size, bfloat16_parts(size), context, batch, relax)


def bfloat16_parts(size):
    """A decoder with gated MLPs and an untied head, without norms and biases."""
    q_rows, kv_rows = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    layers, hidden = 2 * size.num_layers, size.hidden_size
    return {
        "embeddings": WeightBytes(
            split=4 * size.vocab_size * hidden, embeddings=4 * size.vocab_size * hidden
        ),
        "attention": WeightBytes(split=layers * 2 * hidden * q_rows, kv_heads=layers * 2 * hidden * kv_rows),
        "mlp": WeightBytes(split=layers * 3 * hidden * size.intermediate_size),
    }


def rules(tp_plan):
    return {item.tp_size: [violation.rule for violation in item.violations] for item in tp_plan.candidates}


def valid(tp_plan):
    return [item.tp_size for item in tp_plan.candidates if item.valid]


def test_yi():
    assert valid(plan(YI)) == [1, 2, 4, 8, 16]
    assert plan(YI).recommended == 2


def test_28_heads_on_8_cores():
    result = plan(QWEN2)
    assert valid(result) == [1, 2]
    assert result.recommended == 2
    broken = rules(result)
    assert broken[4] == ["R2"]
    assert "R3" in broken[7]
    assert broken[8] == ["R1"]
    assert "R3" in broken[14]
    assert "R2" in broken[28]
    four = next(item for item in result.candidates if item.tp_size == 4)
    assert "28 heads / 4 = 7 per rank is odd" in four.violations[0].text


def test_nine_heads_have_no_valid_size_and_a_row_for_each():
    result = plan(SMOLLM2)
    assert result.recommended is None
    assert valid(result) == []
    assert [item.tp_size for item in result.candidates] == [1, 2, 3, 4, 8, 9, 16, 32, 64]
    assert rules(result)[1] == rules(result)[3] == ["R2"]
    assert "R1" in rules(result)[2]
    text = no_valid_tp(result)
    assert "9 heads / 1 = 9 per rank is odd" in text
    assert "--relax even-heads would allow TP 1, 3" in text
    assert all(row[2] for row in candidate_rows(result))


def test_relaxing_even_heads_says_what_it_gives_up():
    result = plan(SMOLLM2, relax=["even-heads"])
    assert valid(result) == [1, 3]
    one = result.candidates[0]
    assert [violation.rule for violation in one.relaxed] == ["R2"]
    assert "fused decode kernel" in one.relaxed[0].text
    assert valid(plan(YI, relax=["even-heads"])) == [1, 2, 4, 8, 16, 32]


def test_relaxing_costs_nothing_where_attention_is_composed_anyway():
    composed = msgspec.structs.replace(SMOLLM2, fused=False)
    (broken,) = plan(composed).candidates[0].violations
    assert "--relax even-heads costs nothing" in broken.text
    (relaxed,) = plan(composed, relax=["even-heads"]).candidates[0].relaxed
    assert "gives up" not in relaxed.text
    latent = msgspec.structs.replace(composed, latent_kv=576)  # its own kernel
    assert "costs nothing" not in plan(latent).candidates[0].violations[0].text


def test_a_size_without_slow_paths_is_named_beside_the_smallest():
    assert recommendation(plan(YI)).endswith("; TP 4 is the smallest without slow paths")
    assert "slow" not in recommendation(plan(QWEN2))  # TP 1 and 2 both have some
    ten = msgspec.structs.replace(YI, num_heads=40, num_kv_heads=10, intermediate_size=17920)
    assert not plan(ten).candidates[5].slow_paths  # TP 10, which splits no segment of a prefill
    assert "slow" not in recommendation(plan(ten))
    fast = msgspec.structs.replace(YI, num_kv_heads=2, intermediate_size=8192)
    assert "slow" not in recommendation(plan(fast))  # the recommended size has none


def test_only_named_rules_can_be_relaxed():
    with pytest.raises(Refusal, match="TP-RELAX"):
        plan(YI, relax=["R1"])


def test_when_only_one_is_valid_it_is_recommended():
    result = plan(msgspec.structs.replace(YI, num_heads=2, num_kv_heads=1))
    assert valid(result) == [1]
    assert result.recommended == 1
    assert "only valid size" in recommendation(result)


@pytest.mark.parametrize(
    ("change", "tp", "rule", "number"),
    [
        ({"num_heads": 30}, 4, "R1", "30"),
        ({"num_heads": 12}, 4, "R2", "3"),
        ({"num_heads": 48, "num_kv_heads": 3}, 4, "R3", "3"),
    ],
)
def test_each_rule_alone(change, tp, rule, number):
    result = plan(msgspec.structs.replace(YI, **change))
    candidate = next(item for item in result.candidates if item.tp_size == tp)
    assert [violation.rule for violation in candidate.violations] == [rule]
    assert number in candidate.violations[0].text


def test_an_intermediate_size_is_padded_where_the_heads_allow_the_size():
    odd = msgspec.structs.replace(YI, intermediate_size=11010)
    four = next(item for item in plan(odd).candidates if item.tp_size == 4)
    assert (four.valid, four.padded[0].rule) == (True, "PAD-INNER")
    assert "11010 is filled up with zeros to 11012" in four.padded[0].text
    result = plan(msgspec.structs.replace(odd, num_heads=12))  # 2 divides it; 4 leaves an odd number of heads
    assert {"R2", "R4"} == set(rules(result)[4])
    assert not any(item.padded for item in result.candidates)


def test_an_expert_is_padded_to_what_its_kernel_takes():
    """From 128 columns on a multiple of 16; below, the slow path takes any number."""
    experts = {EXPERT: 2880, SHARED: 1000}
    size = Dimensions(24, 2880, 64, 8, 64, 0, 201088, experts)
    assert padded_sizes(size) == {EXPERT, SHARED}
    notes = {tp: [item.text for item in padding(size, tp)] for tp in (2, 8, 16)}
    assert notes[2] == []
    (eight,) = notes[8]  # 368 each
    assert eight.startswith("an expert's intermediate size 2880 is filled up with zeros to 2944 (2.2 % more")
    assert len(notes[16]) == 2
    assert padded_sizes(Dimensions(24, 2048, 32, 4, 128, 0, 151936, {EXPERT: 768})) == set()


def test_a_size_that_only_padding_allows_is_recommended_where_it_is_a_power_of_two():
    size = msgspec.structs.replace(
        YI, num_heads=40, num_kv_heads=40, intermediate_size=13824
    )  # 5 and 10 need it
    result = plan(size)
    assert {5, 10} <= {item.tp_size for item in result.candidates if item.valid and item.padded}
    assert result.recommended == 2


def test_any_vocabulary_is_padded():
    result = plan(msgspec.structs.replace(YI, vocab_size=32002))
    candidate = next(item for item in result.candidates if item.tp_size == 4)
    assert (candidate.valid, candidate.padded_vocab_size) == (True, 32004)
    assert {row[0]: "R5" in row[2] for row in candidate_rows(result)}[str(candidate.tp_size)]


def test_more_ranks_than_kv_heads_hold_copies():
    result = plan(msgspec.structs.replace(YI, num_heads=64, num_kv_heads=2))
    eight = next(item for item in result.candidates if item.tp_size == 8)
    assert eight.valid
    assert (eight.kv_heads_per_rank, eight.kv_replicas) == (1, 4)
    four, two = (next(item for item in result.candidates if item.tp_size == tp) for tp in (4, 2))
    assert eight.kv_bytes_per_rank == four.kv_bytes_per_rank == two.kv_bytes_per_rank
    assert "replicated x4" in str(candidate_rows(result))


def test_a_size_that_does_not_divide_the_kv_heads_is_rejected():
    result = plan(msgspec.structs.replace(YI, num_heads=96, num_kv_heads=4))
    assert "R3" in rules(result)[6]


def test_kv_cache_bytes():
    one = plan(YI, context=4096, batch=3).candidates[0]
    assert one.kv_bytes_per_rank == 32 * 2 * 4 * 128 * 4096 * 3 * 2


def test_weights_that_do_not_fit_raise_the_recommendation():
    size = msgspec.structs.replace(
        YI,
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        num_kv_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    )
    result = plan(size)
    assert [item.tp_size for item in result.candidates if "MEM" in rules(result)[item.tp_size]] == [1, 2, 4]
    assert result.recommended == 8
    four = next(item for item in result.candidates if item.tp_size == 4)
    assert "35." in four.violations[0].text


def test_weight_bytes_by_sharding():
    weights = WeightBytes(split=1000, kv_heads=80, copied=5)
    assert weights.per_rank(1, num_kv_heads=2) == 1085
    assert weights.per_rank(2, num_kv_heads=2) == 500 + 40 + 5
    assert weights.per_rank(8, num_kv_heads=2) == 125 + 40 + 5


@pytest.mark.parametrize("name", ["llama-3.2-1b", "yi-6b", "mistral-7b-v0.3"])
def test_headers_and_estimate_agree_for_a_model_without_biases(tmp_path, name):
    facts, checkpoint = research(str(write_checkpoint(tmp_path, real_config(name))))
    architecture = describe_architecture(facts, checkpoint)
    weights = build_weight_map(architecture, CheckpointKeys(checkpoint.tensors))
    measured = total_bytes(parameter_bytes(weights, architecture, 2))
    assert measured == total_bytes(weight_parts(facts, Dimensions.from_facts(facts)))
    untied = 0 if not architecture.head.tied else architecture.vocab_size * architecture.hidden_size * 2
    assert measured.per_rank(1, 1) == checkpoint.total_bytes + untied


def test_candidates():
    assert candidate_sizes(28) == [1, 2, 4, 7, 8, 14, 16, 28, 32, 64]
    assert max(candidate_sizes(960)) == 64
