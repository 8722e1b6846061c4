"""What the proof reports into the README's feature table."""

import msgspec
from autoport.schema.proof import HardwareRecord, PhaseProof, Proof, ProofRun
from autoport.validation.scenario import DECODE, PREFILL, SAMPLING, SEGMENTED
from autoport.validation.summary import feature_results, slow_notes, summarise

PHASES = (PREFILL, SEGMENTED, DECODE, SAMPLING)


def proof(red_phase="", tp_sizes=(1, 2), run_failure=""):
    runs = []
    for tp_size in tp_sizes:
        failures = {phase: "too far off" if phase == red_phase else "" for phase in PHASES}
        phases = [PhaseProof(phase, 8, 1e-6, "", 8, 0, failure=failures[phase]) for phase in PHASES]
        failure = run_failure or next(filter(None, failures.values()), "")
        runs.append(ProofRun(tp_size, "float32", phases, [], {}, 1.0, failure, "log"))
    passed = not any(run.failure for run in runs)
    return Proof(passed, "simulator", "LlamaForCausalLM", {}, 0, 1e-4, 1.2, runs, {}, {})


def passed(results):
    return {feature for feature, result in results.items() if result.passed}


def test_green_proof():
    results = feature_results(proof())
    assert len(results) == 4
    assert passed(results) == set(results)
    assert results["Segmented prefill"].note == "simulator, TP 1, 2: equals LlamaForCausalLM"
    assert results["TP (head sharding)"].note == "simulator, TP 2: equals LlamaForCausalLM"


def test_a_red_phase_costs_its_own_feature_only():
    results = feature_results(proof(red_phase=SEGMENTED))
    assert set(results) - passed(results) == {"Segmented prefill"}
    assert "too far off" in results["Segmented prefill"].note


def test_what_is_red_in_no_phase_is_red_everywhere():
    assert passed(feature_results(proof(run_failure="device rule broken"))) == set()


def test_prompts_that_are_too_short_show_no_feature():
    short = msgspec.structs.replace(proof(), passed=False, too_short=["no prompt exceeds the window"])
    assert passed(feature_results(short)) == set()
    assert summarise(short) == "not a proof: no prompt exceeds the window"


def test_tp_1_says_nothing_of_tensor_parallelism():
    assert "TP (head sharding)" not in feature_results(proof(tp_sizes=(1,)))


def test_a_slow_path_is_named_once_with_its_tp_sizes():
    def run(tp_size, dtype, *messages):
        records = [HardwareRecord("o_proj", "fallback", "slow-path", message, 9) for message in messages]
        error = HardwareRecord("mlp", "error", "dtype", "no such dtype", 1)
        return ProofRun(tp_size, dtype, [], [*records, error], {}, 1.0, "", "log")

    runs = [run(1, "float32", "a", "b"), run(1, "bfloat16", "a", "b"), run(2, "float32", "a")]
    found = Proof(True, "simulator", "LlamaForCausalLM", {}, 0, 1e-4, 1.2, runs, {}, {})
    assert slow_notes(found) == ["TP 1, 2: o_proj: a", "TP 1: o_proj: b"]
