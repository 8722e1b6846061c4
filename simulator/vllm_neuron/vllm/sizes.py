"""The padded sizes of the steps, which scheduler and model runner derive alike from the configuration."""

from dataclasses import dataclass
from typing import Any

from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.utils.bucket_utils import (
    get_max_num_batched_tokens,
    resolve_decode_context_length_buckets,
    resolve_kv_segment_size_buckets,
    resolve_num_batched_tokens_buckets,
    resolve_num_seqs_buckets,
    resolve_segmented_prefill_config,
)


@dataclass(frozen=True)
class StepSizes:
    """Sizes that a model is compiled for.

    Attributes:
        prefill_buckets: Padded tokens of a prefill step.
        decode_buckets: Padded requests of a decode step.
        context_buckets: Context lengths of a decode step in tokens; None when there is only `max_model_len`.
        kv_segment_size: Segment of segmented prefill in tokens, 0 when it is off.
    """

    prefill_buckets: list[int]
    decode_buckets: list[int]
    context_buckets: list[int] | None
    kv_segment_size: int

    @classmethod
    def from_config(cls, vllm_config: Any, neuron_config: NeuronConfig) -> "StepSizes":
        """Resolve the sizes.

        Raises:
            ValueError: Buckets or a segment size that the plugin refuses.
        """
        max_model_len = vllm_config.model_config.max_model_len
        scheduler = vllm_config.scheduler_config
        max_tokens = get_max_num_batched_tokens(scheduler.max_num_batched_tokens, max_model_len)
        buckets = neuron_config.num_batched_tokens_buckets
        segments = neuron_config.kv_segment_size_buckets
        if segments is None:
            _, segments = resolve_segmented_prefill_config(max_tokens, max_model_len)
        if segments is not None:
            buckets = segments = resolve_kv_segment_size_buckets(segments, buckets)
        context = neuron_config.decode_context_length_buckets
        return cls(
            prefill_buckets=resolve_num_batched_tokens_buckets(max_tokens, buckets),
            decode_buckets=resolve_num_seqs_buckets(scheduler.max_num_seqs, neuron_config.num_seqs_buckets),
            context_buckets=context and resolve_decode_context_length_buckets(max_model_len, context),
            kv_segment_size=segments[0] if segments else 0,
        )
