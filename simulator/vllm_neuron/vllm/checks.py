"""What the plugin, or the simulator, refuses instead of ignoring it."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm import envs as vllm_envs

from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.utils.dtype_utils import (
    QUANTIZED_KV_CACHE_DTYPES,
    kv_cache_dtype_str_to_dtype,
    validate_fp8_segmented_supported,
)
from vllm_neuron.vllm.internals import VLLMValidationError
from vllm_neuron.vllm.sizes import StepSizes

# Sampling parameters that on-device sampling does not read, with the value that asks for nothing.
NOT_ON_DEVICE: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "logprob_token_ids": None,
}

# Keys of `NeuronConfig` for files that nothing would write or read here, and for several nodes.
NOT_SIMULATED = ("tensor_capture", "tensor_replacement", "debug_logits_dir", "all2all_backend")

# Of vLLM's speculative configuration: the values that ask for nothing, and why there are no others.
NOT_DRAFTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "parallel_drafting": ((False,), "drafts are made one after the other"),
    "draft_sample_method": (("greedy",), "drafts are greedy"),
    "rejection_sample_method": (("standard",), "a draft is accepted when it is the token that is sampled"),
    "num_speculative_tokens_per_batch_size": ((None,), "every step with drafts has as many"),
    "quantization": ((None,), "drafts are not quantized"),
    "kv_cache_dtype": ((None, "auto"), "the draft's KV cache has the model's dtype"),
    "attention_backend": ((None,), "there is one"),
    "moe_backend": ((None,), "drafts have no experts"),
}


def get_neuron_config(vllm_config: Any) -> NeuronConfig:
    """``additional_config["neuron_config"]`` with `max_logprobs` from the engine unless it is given.

    Raises:
        ValueError: A value that `NeuronConfig` refuses.
    """
    given = (vllm_config.additional_config or {}).get("neuron_config") or {}
    return NeuronConfig.from_dict({"max_logprobs": vllm_config.model_config.max_logprobs, **given})


def resolve_ep_degree(ep_degree: int, world_size: int, enable_expert_parallel: bool) -> int:
    """Number of expert partitions: as configured, or all ranks when only vLLM's switch is on.

    Raises:
        ValueError: A degree without the switch, or one that does not divide the ranks.
    """
    if not enable_expert_parallel:
        if ep_degree > 1:
            raise ValueError(f"ep_degree {ep_degree} needs enable_expert_parallel=True")
        return 1
    degree = ep_degree if ep_degree > 1 else world_size
    if world_size % degree:
        raise ValueError(f"ep_degree {degree} does not divide the {world_size} ranks")
    return degree


def check_config(vllm_config: Any) -> None:
    """Check an engine's configuration.

    Raises:
        ValueError: Names everything that is refused.
    """
    problems = list(_problems(vllm_config))
    if problems:
        raise ValueError("the vLLM Neuron simulator refuses this configuration: " + "; ".join(problems))


def _problems(vllm_config: Any) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config
    if vllm_envs.VLLM_USE_V2_MODEL_RUNNER:
        yield "VLLM_USE_V2_MODEL_RUNNER=1 is not supported, set it to 0"
    if scheduler.policy != "fcfs":
        yield f"scheduling policy {scheduler.policy!r}, only 'fcfs' is supported"
    for name, value in (
        ("data_parallel_size", parallel.data_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
    ):
        if value != 1:
            yield f"{name} {value} is not simulated, use 1"
    for name in ("lora_config", "kv_transfer_config"):
        if getattr(vllm_config, name) is not None:
            yield f"{name} is not simulated"
    if model.runner_type != "generate":
        yield f"runner {model.runner_type!r} is not simulated, only 'generate' is"
    config_dtype = getattr(model.hf_text_config, "dtype", None)
    if isinstance(config_dtype, torch.dtype) and config_dtype != model.dtype:
        wanted = str(model.dtype).removeprefix("torch.")
        yield (
            f"dtype {wanted} for a checkpoint whose config says {config_dtype}: models read the config's, so "
            f"pass hf_overrides={{'dtype': '{wanted}'}} as well"
        )
    yield from _neuron_problems(vllm_config)
    if vllm_config.speculative_config is not None:
        yield from _speculative_problems(vllm_config)


def _speculative_problems(vllm_config: Any) -> Iterator[str]:
    config, target = vllm_config.speculative_config, vllm_config.model_config
    if config.method != "eagle3":
        yield f"speculative method {config.method!r}, only 'eagle3' is supported"
        return
    for name, (plain, why) in NOT_DRAFTED.items():
        if (value := getattr(config, name)) not in plain:
            yield f"speculative_config.{name} {value!r}: {why}"
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    if config.draft_tensor_parallel_size not in (None, tp_size):
        yield f"draft_tensor_parallel_size {config.draft_tensor_parallel_size}, use the target's, {tp_size}"
    if vllm_config.cache_config.cache_dtype in QUANTIZED_KV_CACHE_DTYPES:
        yield f"kv_cache_dtype {vllm_config.cache_config.cache_dtype!r}: the draft's KV cache has the model's dtype"
    draft = config.draft_model_config
    if config.max_model_len not in (None, target.max_model_len):
        yield f"speculative_config.max_model_len {config.max_model_len}: the draft's is the target's"
    for name, of_draft, of_target in (
        ("hidden size", draft.get_hidden_size(), target.get_hidden_size()),
        ("vocabulary", draft.get_vocab_size(), target.get_vocab_size()),
    ):
        if of_draft != of_target:
            yield f"a draft for a {name} of {of_draft}, the target's is {of_target}"
    # A step is prefill when it has more tokens than decode can have.
    most = 1 + config.num_speculative_tokens
    try:
        smallest = StepSizes.from_config(vllm_config, get_neuron_config(vllm_config)).prefill_buckets[0]
    except ValueError:
        return
    if smallest <= most:
        yield f"num_batched_tokens_buckets begin at {smallest}; with {most - 1} drafts they must be above {most}"


def _neuron_problems(vllm_config: Any) -> Iterator[str]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    try:
        neuron_config = get_neuron_config(vllm_config)
    except ValueError as error:
        yield str(error)
        return
    sizes = ("attention_dp_size", "embedding_dp_size", "lm_head_dp_size", "mlp_dp_size")
    for name in sizes:
        if getattr(neuron_config, name) != 1:
            yield f"{name} needs a KV transfer with data_parallel_size of at least 2; use 1"
    sampling = neuron_config.on_device_sampling_config
    if sampling is not None and sampling.sampling_dp_degree != 1:
        yield "sampling_dp_degree is not simulated, use 1"
    if sampling is not None and sampling.capture_topk:
        yield "capture_topk is not simulated, leave it out"
    for name in NOT_SIMULATED:
        if getattr(neuron_config, name):
            yield f"{name} is not simulated, leave it out"
    for check in (
        lambda: resolve_ep_degree(
            neuron_config.ep_degree, parallel.world_size, parallel.enable_expert_parallel
        ),
        lambda: kv_cache_dtype_str_to_dtype(cache.cache_dtype, vllm_config.model_config),
    ):
        try:
            check()
        except ValueError as error:
            yield str(error)
    try:
        steps = StepSizes.from_config(vllm_config, neuron_config)
    except ValueError as error:
        yield str(error)
        return
    if cache.enable_prefix_caching and not steps.kv_segment_size:
        yield (
            "prefix caching needs segmented prefill, that is max_num_batched_tokens below max_model_len (512, "
            "1024, 2048, 4096 or 8192); or turn it off with enable_prefix_caching=False "
            "(--no-enable-prefix-caching)"
        )
    if steps.kv_segment_size:
        try:
            quantized = cache.cache_dtype in QUANTIZED_KV_CACHE_DTYPES
            validate_fp8_segmented_supported(quantized, neuron_config.fp8_packed_kv)
        except NotImplementedError as error:
            yield str(error)


def check_sampling_params(params: Any, vllm_config: Any) -> None:
    """Check a request.

    Raises:
        VLLMValidationError: It asks for prompt log-probabilities, for structured output while that is off, or, with
            on-device sampling or drafts, for more than temperature, top_k, top_p and log-probabilities.
    """
    neuron_config = get_neuron_config(vllm_config)
    if getattr(params, "prompt_logprobs", None) is not None:
        raise VLLMValidationError("prompt_logprobs is not supported on Neuron", parameter="prompt_logprobs")
    if (
        getattr(params, "structured_outputs", None) is not None
        and not neuron_config.enable_structured_outputs
    ):
        raise VLLMValidationError(
            "structured outputs are off; set additional_config.neuron_config.enable_structured_outputs to true",
            parameter="structured_outputs",
        )
    on_device = neuron_config.on_device_sampling_config is not None
    if not on_device and vllm_config.speculative_config is None:
        return
    ignored = [
        name
        for name, nothing in NOT_ON_DEVICE.items()
        if (getattr(params, name, nothing) or nothing) != nothing
    ]
    if getattr(params, "seed", None) is not None and params.temperature > 0:
        ignored.append("seed")
    if ignored and not on_device:
        raise VLLMValidationError(
            f"sampling of several tokens in one step would ignore {', '.join(ignored)}; leave out speculative_config",
            parameter=ignored[0],
        )
    if ignored:
        raise VLLMValidationError(
            f"sampling on the device would ignore {', '.join(ignored)}; set "
            "additional_config.neuron_config.on_device_sampling_config to null to sample on the CPU, or "
            "generation_config='vllm' (--generation-config vllm) if generation_config.json asks for it",
            parameter=ignored[0],
        )
    if on_device and params.logprobs is not None and neuron_config.max_logprobs == 0:
        raise VLLMValidationError(
            "logprobs need neuron_config.max_logprobs to be other than 0", parameter="logprobs"
        )
