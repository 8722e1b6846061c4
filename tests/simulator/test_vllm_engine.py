"""Generated ports under the real vLLM engine: the Hugging Face class's tokens, whatever the scheduler does."""

import contextlib
import json

import engines
import pytest
from engines import CPU_SAMPLING, generate, metric, prompts, tokens

LENGTHS = [1, 2, 5, 31, 32, 33, 64, 65, 100, 200]  # around blocks of 32 and the bucket of 64
STEPS = 8
BUCKETS = {"num_batched_tokens_buckets": [64, 256], "num_seqs_buckets": [2, 8]}


@pytest.fixture(scope="module", autouse=True)
def environment(ports):
    with engines.simulated(ports.workspace):
        yield


@pytest.fixture(scope="module")
def served(ports):
    """An engine at a time: on one rank it lives in this process, whose process groups it takes."""
    with contextlib.ExitStack() as stack:
        current = {}

        def serve(name, **options):
            key = (name, json.dumps(options, sort_keys=True))
            if key not in current:
                stack.close()
                current.clear()
                current[key] = stack.enter_context(engines.engine(ports.checkpoints[name], **options))
            return current[key]

        yield serve


# --- The same tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "neuron_config"),
    [("llama", 1, CPU_SAMPLING), ("llama", 2, {}), ("qwen2", 1, {}), ("qwen2", 2, CPU_SAMPLING)],
)
def test_greedy_tokens_are_those_of_the_hugging_face_class(ports, served, name, ranks, neuron_config):
    llm = served(name, tensor_parallel_size=ranks, neuron_config=BUCKETS | neuron_config)
    texts = prompts(LENGTHS)
    outputs = generate(llm, texts, STEPS, logprobs=3)
    assert tokens(outputs) == [ports.greedy(name, text, STEPS) for text in texts]

    text, output = texts[5], outputs[5].outputs[0]
    expected = ports.logprobs(name, text + list(output.token_ids))[len(text) - 1 : -1]
    for row, found in zip(expected, output.logprobs, strict=True):
        assert set(row.topk(3).indices.tolist()) <= set(found)
        for token, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert logprob.rank == 1 + int((row > row[token]).sum())


def test_a_whole_window_of_context_and_not_one_token_more(ports, served):
    llm = served("llama", neuron_config=BUCKETS | CPU_SAMPLING)
    [text] = prompts([255])
    [output] = generate(llm, [text], STEPS)
    assert tokens([output]) == [ports.greedy("llama", text, 1)]
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(Exception, match="maximum context length is 256 tokens"):
        generate(llm, prompts([257]), 1)


# --- Segments, prefix cache, contexts -----------------------------------------------------------------------

SEGMENTED = {"max_model_len": 1024, "max_num_batched_tokens": 512, "enable_prefix_caching": True}


@pytest.mark.parametrize("neuron_config", [CPU_SAMPLING, {"decode_context_length_buckets": [128, 512]}])
def test_segments_and_prefix_cache_change_nothing(ports, served, neuron_config):
    llm = served("llama", neuron_config=neuron_config, **SEGMENTED)
    long, short = prompts([700, 40])
    texts = [long, short, long[:600] + short]
    expected = [ports.greedy("llama", text, STEPS) for text in texts]
    hits = []
    for _ in range(2):
        for text, token_ids in zip(texts, expected, strict=True):
            [output] = generate(llm, [text], STEPS)
            assert tokens([output]) == [token_ids]
            hits.append(output.num_cached_tokens)
    # Whole blocks of 32, but never the last token: 640 of the third prompt, of which 576 are the first one's.
    assert hits == [0, 0, 576, 672, 32, 608]
    assert tokens(generate(llm, texts, STEPS)) == expected


def test_the_cache_holds_all_sequences_unless_its_size_is_given(served):
    llm = served("llama", neuron_config={}, max_num_seqs=3, num_gpu_blocks_override=None)
    assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 4 * 8  # and a reserve of one sequence


# --- What the scheduler does --------------------------------------------------------------------------------


def test_preempted_requests_go_on_where_they_were(ports, served):
    llm = served("llama", neuron_config=BUCKETS, num_gpu_blocks_override=20)
    texts = prompts([60, 62, 90, 31, 45, 80, 20, 64])  # 18 blocks, and 29 with the new tokens
    assert tokens(generate(llm, texts, 40)) == [ports.greedy("llama", text, 40) for text in texts]
    assert metric(llm, "vllm:num_preemptions") > 2


def test_an_aborted_request_leaves_the_others_alone(ports, served):
    from vllm import SamplingParams

    llm = served("llama", neuron_config=BUCKETS, num_gpu_blocks_override=20)
    texts = prompts([50, 20, 33])
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    for index, text in enumerate(texts):
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": text}, params)
    finished = {}
    for step in range(100):
        if step == 5:
            llm.llm_engine.abort_request(["1"])
        for output in llm.llm_engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        if not llm.llm_engine.has_unfinished_requests():
            break
    assert finished == {name: ports.greedy("llama", texts[int(name)], STEPS) for name in "02"}


def test_a_step_is_one_prefill_or_a_batch_of_decodes(served, monkeypatch):
    from vllm_neuron.vllm.core.scheduler import NeuronScheduler

    llm = served("llama", neuron_config=BUCKETS, num_gpu_blocks_override=20)
    steps = []
    schedule = NeuronScheduler.schedule

    def recorded(self, throttle_prefills=False):
        output = schedule(self, throttle_prefills)
        steps.append((output.num_scheduled_tokens, output.num_scheduled_tokens_padded))
        return output

    monkeypatch.setattr(NeuronScheduler, "schedule", recorded)
    generate(llm, prompts([50, 70, 1]), 2)
    counts = [list(scheduled.values()) for scheduled, _ in steps if scheduled]
    assert counts == [[50], [70], [1], [1, 1, 1]]
    padded = [list(sizes.values()) for scheduled, sizes in steps if scheduled]
    assert padded == [[64], [256], [64], [1, 1, 1]]


# --- Sampling -----------------------------------------------------------------------------------------------


def test_sampling_on_the_cpu(served):
    llm = served("llama", neuron_config=CPU_SAMPLING | {"enable_structured_outputs": True})
    texts = prompts([20, 30])
    first, again, other = (
        tokens(generate(llm, texts, STEPS, temperature=1.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    [plain], [penalised] = (
        tokens(generate(llm, texts[:1], 40, repetition_penalty=penalty)) for penalty in (1.0, 100.0)
    )
    assert len(set(penalised)) == 40 > len(set(plain))
    [output] = generate(llm, texts[:1], 40, stop_token_ids=[plain[3]])
    assert tokens([output]) == [plain[: plain.index(plain[3]) + 1]]
    assert output.outputs[0].finish_reason == "stop"
    [output] = generate(llm, texts[:1], STEPS, allowed_token_ids=[7, 8], temperature=1.0)
    assert set(tokens([output])[0]) <= {7, 8}


@pytest.mark.parametrize("ranks", [1, 2])
def test_sampling_on_the_device(served, ranks):
    from vllm.exceptions import VLLMValidationError

    llm = served("llama", tensor_parallel_size=ranks, neuron_config={})
    texts = prompts([20, 30])
    [greedy], [top_1], [drawn] = (
        tokens(generate(llm, texts[:1], 40, **params))
        for params in ({}, {"temperature": 2.0, "top_k": 1}, {"temperature": 2.0})
    )
    assert greedy == top_1 != drawn
    for params in (
        {"temperature": 1.0, "seed": 1},
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "min_p": 0.1},
    ):
        with pytest.raises(VLLMValidationError, match=f"would ignore {list(params)[-1]}"):
            generate(llm, texts, 1, **params)
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        generate(llm, texts, 1, prompt_logprobs=1)


# --- Graphs -------------------------------------------------------------------------------------------------


def test_without_eager_mode_there_is_one_graph_for_each_size(ports, served, tmp_path, monkeypatch):
    from vllm_neuron.simulator.recording import RECORDS, read_recorded

    monkeypatch.setenv(RECORDS, str(tmp_path / "records"))
    neuron_config = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [2]}
    llm = served("llama", max_model_len=64, max_num_seqs=2, enforce_eager=False, neuron_config=neuron_config)
    texts = prompts([30, 1, 50])
    assert tokens(generate(llm, texts, STEPS)) == [ports.greedy("llama", text, STEPS) for text in texts]

    recorded = read_recorded(tmp_path / "records")
    assert set(recorded) == {0}
    assert recorded[0].collectives == {"prefill 64": {}, "decode 2": {}}
    assert {record.kind for record in recorded[0].records} == {"fallback"}

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    runner.sizes.decode_buckets[:] = [1]
    with pytest.raises(Exception, match="recompil"):
        generate(llm, texts[:1], 2)


def test_a_read_of_a_value_stops_the_warm_up(served, monkeypatch):
    from vllm_neuron.model.llama.model import LlamaRMSNorm

    forward = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: forward(self, x) * x.new_ones(1).item())
    sizes = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [1]}
    with pytest.raises(RuntimeError, match=r"prefill bucket 64: Unsupported Tensor.item\(\) call"):
        served("llama", max_model_len=64, max_num_seqs=1, enforce_eager=False, neuron_config=sizes)


def test_ranks_that_sample_different_tokens_are_an_error(served, monkeypatch):
    from vllm_neuron.nn import Sampler

    forward = Sampler.forward
    monkeypatch.setattr(
        Sampler,
        "forward",
        lambda self, logits, *rest, tp_rank, **kw: (
            forward(self, logits, *rest, tp_rank=tp_rank, **kw) + tp_rank
        ),
    )
    llm = served("llama", tensor_parallel_size=2, neuron_config={}, max_num_seqs=1)
    with pytest.raises(RuntimeError, match="rank 1 sampled"):
        generate(llm, prompts([20]), 1)


def test_an_engine_can_be_started_after_one_that_failed(ports, served):
    [text] = prompts([20])
    assert tokens(generate(served("llama"), [text], 2)) == [ports.greedy("llama", text, 2)]
