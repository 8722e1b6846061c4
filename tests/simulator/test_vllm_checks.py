"""Configurations and requests that the platform refuses, before anything is loaded."""

import gc
import os
import weakref

import engines
import pytest

SEGMENTED = {"max_model_len": 1024, "max_num_batched_tokens": 512}
SINGLE = {"max_model_len": 256, "enable_prefix_caching": False}


@pytest.fixture(scope="module", autouse=True)
def environment(ports):
    with engines.simulated(ports.workspace):
        yield


@pytest.fixture
def configure(ports):
    def make(neuron_config=None, **options):
        from vllm.engine.arg_utils import EngineArgs

        options = {"dtype": "float32", "max_num_seqs": 8, **options}
        checkpoint = str(ports.checkpoints["llama"])
        args = EngineArgs(checkpoint, additional_config={"neuron_config": neuron_config or {}}, **options)
        return args.create_engine_config()

    return make


def test_what_is_set_without_being_asked(configure):
    config = configure(**SINGLE)
    assert config.cache_config.block_size == 32
    assert config.parallel_config.worker_cls.startswith("vllm_neuron.")
    assert config.scheduler_config.scheduler_cls.startswith("vllm_neuron.")
    assert not config.scheduler_config.async_scheduling
    assert configure(**SINGLE, block_size=64).cache_config.block_size == 64
    assert configure(**SEGMENTED).cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 256}, "prefix caching needs segmented prefill"),
        ({**SINGLE, "scheduling_policy": "priority"}, "only 'fcfs' is supported"),
        ({**SINGLE, "data_parallel_size": 2}, "data_parallel_size 2"),
        ({**SINGLE, "dtype": "bfloat16"}, r"pass hf_overrides=\{'dtype': 'bfloat16'\}"),
        ({**SINGLE, "kv_cache_dtype": "fp8_e5m2"}, "Unsupported KV cache dtype 'fp8_e5m2'"),
        ({**SEGMENTED, "kv_cache_dtype": "fp8"}, "needs fp8_packed_kv"),
        ({**SEGMENTED, "max_num_batched_tokens": 600}, "must be a segment size"),
    ],
)
def test_refused_engine_arguments(configure, options, message):
    with pytest.raises(ValueError, match=message):
        configure(**options)


@pytest.mark.parametrize(
    ("neuron_config", "message"),
    [
        ({"enable_structured_outputs": "yes"}, "must be a bool"),
        ({"ep_degree": 2}, "needs enable_expert_parallel"),
        ({"attention_dp_size": 2}, "attention_dp_size"),
        ({"num_seqs_buckets": [1, 4]}, "must end at max_num_seqs 8"),
        ({"num_batched_tokens_buckets": [128]}, "must end at max_num_batched_tokens 256"),
        ({"decode_context_length_buckets": [100]}, "multiples of 128"),
        ({"on_device_sampling_config": {"sampling_dp_degree": 2}}, "sampling_dp_degree"),
        ({"on_device_sampling_config": {"capture_topk": True}}, "capture_topk"),
        ({"debug_logits_dir": "logits"}, "debug_logits_dir"),
        ({"tensor_capture": {"modules": ["lm_head"]}}, "tensor_capture"),
    ],
)
def test_refused_neuron_config(configure, neuron_config, message):
    with pytest.raises(ValueError, match=message):
        configure(neuron_config, **SINGLE)


def test_all_that_is_wrong_is_said_at_once(configure):
    with pytest.raises(ValueError, match=r"fp8_e5m2.*prefix caching"):
        configure(max_model_len=256, kv_cache_dtype="fp8_e5m2")


def test_the_second_model_runner_is_refused(configure, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"VLLM_USE_V2_MODEL_RUNNER|V2"):
        configure(**SINGLE)


def test_structured_outputs_have_to_be_on(configure):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams
    from vllm_neuron.vllm.platform import NeuronPlatform

    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    configure(**SINGLE)
    with pytest.raises(VLLMValidationError, match="enable_structured_outputs"):
        NeuronPlatform.validate_request({}, params)
    configure({"enable_structured_outputs": True}, **SINGLE)
    NeuronPlatform.validate_request({}, params)


def test_the_plugins_own_variables_are_known(monkeypatch):
    from vllm_neuron.vllm.platform import NeuronPlatform

    monkeypatch.setenv("VLLM_NEURON_SIM_STRICT", "1")
    NeuronPlatform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_NO_SUCH_THING", "1")
    with pytest.raises(ValueError, match="VLLM_NO_SUCH_THING"):
        NeuronPlatform.validate_environ(hard_fail=True)


def test_a_forked_worker_does_not_collect_what_it_inherits():
    import vllm_neuron.vllm.platform  # noqa: F401

    class Cycle:
        def __init__(self):
            self.itself = self

    gc.disable()
    try:
        left = weakref.ref(Cycle())
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0 if left() is not None else 1)
    finally:
        gc.enable()
    assert os.waitpid(pid, 0)[1] == 0


def test_eager_mode_is_cpu_mode(configure, monkeypatch):
    import torch
    from vllm_neuron.vllm.worker.neuron_model_runner import NeuronModelRunner

    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "0")
    with pytest.raises(AssertionError, match="Eager mode on Neuron is not yet supported"):
        NeuronModelRunner(configure(**SINGLE, enforce_eager=True), torch.device("cpu"))


@pytest.mark.parametrize(
    ("degree", "ranks", "switched_on", "expected"), [(1, 8, False, 1), (1, 8, True, 8), (4, 8, True, 4)]
)
def test_expert_partitions(degree, ranks, switched_on, expected):
    from vllm_neuron.vllm.checks import resolve_ep_degree

    assert resolve_ep_degree(degree, ranks, switched_on) == expected
    with pytest.raises(ValueError, match="does not divide"):
        resolve_ep_degree(3, 8, True)
