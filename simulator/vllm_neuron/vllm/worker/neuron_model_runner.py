"""Loads a model and runs the scheduler's steps through it, padded to the sizes that the device compiles."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from vllm.forward_context import set_forward_context

from vllm_neuron import envs
from vllm_neuron.simulator import loading
from vllm_neuron.simulator.forward import Forward, ForwardOutput, spec_decode_metadata
from vllm_neuron.simulator.guards import ForwardReport
from vllm_neuron.simulator.metadata import KVGroup, Row, Step
from vllm_neuron.simulator.recording import write_recorded
from vllm_neuron.utils.bucket_utils import get_bucket_for_count
from vllm_neuron.utils.dtype_utils import kv_cache_dtype_str_to_dtype
from vllm_neuron.vllm.checks import get_neuron_config
from vllm_neuron.vllm.core.scheduler import NeuronSchedulerOutput
from vllm_neuron.vllm.internals import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    FullAttentionSpec,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SlidingWindowSpec,
)
from vllm_neuron.vllm.sizes import StepSizes
from vllm_neuron.vllm.worker.proposer import Proposer
from vllm_neuron.vllm.worker.requests import Requests
from vllm_neuron.vllm.worker.sampling import (
    TokenSampler,
    build_logit_mask,
    build_sampling_params,
    own_shard,
)

logger = logging.getLogger(__name__)


class NeuronModelRunner:
    """One rank's model with its KV cache and requests.

    Without `enforce_eager` the model goes through ``torch.compile`` into one graph for each size of
    `StepSizes`, without breaks, and a step of another size is an error; the graphs then run as they are.

    Raises:
        AssertionError: `enforce_eager` outside CPU mode.
    """

    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: torch.device):
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.device = device
        self.neuron_config = get_neuron_config(vllm_config)
        self.sizes = StepSizes.from_config(vllm_config, self.neuron_config)
        self.samples_on_device = self.neuron_config.on_device_sampling_config is not None
        self.kv_dtype = kv_cache_dtype_str_to_dtype(self.cache_config.cache_dtype, self.model_config)
        self.model: nn.Module
        self._sampler = TokenSampler(self.model_config.logprobs_mode)
        self._proposer: Proposer | None = None
        self._scheduled: NeuronSchedulerOutput | None = None
        self._drafts: DraftTokenIds | None = None
        self._num_reports = 0
        assert not self.model_config.enforce_eager or envs.VLLM_NEURON_CPU_MODE, (
            "Eager mode on Neuron is not yet supported"
        )

    def load_model(self) -> None:
        """Build the model that the registry has for the architecture, load its weights, and the draft model's.

        Raises:
            AttributeError: The class is vLLM's own: the registry has no row of this name.
            ValueError: See `Proposer`.
        """
        config = self.model_config
        factory, _ = config.registry.resolve_model_cls(config.architecture, model_config=config)
        self.model = loading.load_model(
            factory, config.hf_config, self.neuron_config, config.model, self.vllm_config
        )
        if self.vllm_config.speculative_config is not None:
            self._proposer = Proposer(self.vllm_config, self.neuron_config, self.model)

    # --- KV cache ---------------------------------------------------------------------------------------------

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What vLLM's cache manager takes for the models' `get_kv_spec`; the dtype is the cache's."""
        specs: dict[str, KVCacheSpec] = {}
        for layer in [layer for model in self._models() for layer in model.get_kv_spec().layers]:
            shape = {
                "block_size": self.cache_config.block_size,
                "num_kv_heads": layer.num_kv_heads,
                "head_size": layer.head_size,
                "dtype": self.kv_dtype,
            }
            if layer.sliding_window_size is None:
                specs[layer.name] = FullAttentionSpec(**shape, attention_chunk_size=layer.chunk_size)
            else:
                specs[layer.name] = SlidingWindowSpec(**shape, sliding_window=layer.sliding_window_size)
        return specs

    def _models(self) -> list[nn.Module]:
        return [self.model, *([self._proposer.model] if self._proposer else [])]

    def kv_cache_bytes(self, num_sequences: int) -> int:
        """Bytes of a cache for so many sequences of full length, and one for the null block and the reserve."""
        blocks = -(-self.model_config.max_model_len // self.cache_config.block_size) * (num_sequences + 1)
        return sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values()) * blocks

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the caches and bind them to the models.

        Raises:
            NotImplementedError: Groups of layers have different block sizes.
        """
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if {spec.block_size for spec in specs} != {self.cache_config.block_size}:
            raise NotImplementedError(
                f"KV cache groups with blocks of {[spec.block_size for spec in specs]} tokens are not simulated"
            )
        self.num_blocks = kv_cache_config.num_blocks
        for model in self._models():
            model.bind_kv_cache(
                loading.allocate_kv_caches(
                    model.get_kv_spec(),
                    self.num_blocks,
                    self.cache_config.block_size,
                    self.kv_dtype,
                    packed_k=self.neuron_config.fp8_packed_kv and self.kv_dtype == torch.float8_e4m3fn,
                )
            )
        own = {layer.name for layer in self.model.get_kv_spec().layers}
        groups = [
            KVGroup(
                tuple(name for name in group.layer_names if name in own),
                spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
            )
            for group, spec in zip(kv_cache_config.kv_cache_groups, specs, strict=True)
        ]
        compiled = not self.model_config.enforce_eager
        self._forward = Forward(self.model, groups, self.samples_on_device, compiled)
        if self._proposer:
            self._proposer.start(kv_cache_config, compiled)
            self._forward.set_aux_hidden_state_layers(self._proposer.aux_layers)
        self._requests = Requests(self.vllm_config, kv_cache_config, self.device)

    # --- Warm-up ----------------------------------------------------------------------------------------------

    def warm_up(self) -> float:
        """Run every size once, prefill first, and return the seconds; nothing in eager mode.

        Raises:
            RuntimeError: A size fails; the message names it.
        """
        if self.model_config.enforce_eager:
            return 0.0
        started = time.monotonic()
        mask = None
        for step in self._steps():
            if self.neuron_config.enable_structured_outputs:
                rows = 1 if step.is_prefill else step.num_tokens
                mask = self._model_mask(
                    torch.ones(rows, self.model_config.get_vocab_size(), dtype=torch.bool)
                )
            try:
                with set_forward_context(None, self.vllm_config):
                    self._forward.warm_up(step, self.num_blocks, mask)
                    if self._proposer:
                        self._proposer.warm_up(step, self.num_blocks)
            except Exception as error:
                kind = "prefill" if step.is_prefill else "decode"
                raise RuntimeError(f"Model warmup failed for {kind} bucket {step.bucket}: {error}") from error
        self.record()
        return time.monotonic() - started

    def _steps(self) -> Iterator[Step]:
        for bucket in self.sizes.prefill_buckets:
            yield self._step(True, bucket)
        for bucket in self.sizes.decode_buckets:
            contexts: Sequence[int | None] = self.sizes.context_buckets or [None]
            for context in contexts:
                for drafts in sorted({0, self._num_drafts}):
                    yield self._step(False, bucket, context, drafts)

    @property
    def _num_drafts(self) -> int:
        """Drafts of a decode step that has some."""
        return self._proposer.num_drafts if self._proposer else 0

    def _step(
        self, is_prefill: bool, bucket: int, context_len: int | None = None, num_drafts: int = 0
    ) -> Step:
        return Step(
            is_prefill,
            bucket,
            self.cache_config.block_size,
            self.model_config.max_model_len,
            self.sizes.kv_segment_size,
            context_len,
            num_drafts,
            self._num_drafts,
        )

    # --- Steps ------------------------------------------------------------------------------------------------

    def execute_model(self, output: NeuronSchedulerOutput) -> ModelRunnerOutput | None:
        """Take a step over from the scheduler; `sample_tokens`, which gets the grammar's mask, runs it."""
        self._requests.update(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._scheduled = output
        return None

    @torch.no_grad()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Run the step and return its tokens; a prefill segment that is not the last one has none.

        Raises:
            ValueError: A token id is outside the vocabulary.
        """
        output, self._scheduled = self._scheduled, None
        if output is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch, rows = self._requests.batch, self._requests.rows(output)
        step = self._step_for(output, rows)
        vocab_mask = None
        if self.neuron_config.enable_structured_outputs:
            vocab_size = self.model_config.get_vocab_size()
            vocab_mask = build_logit_mask(output, grammar, batch, vocab_size, step.num_drafts)
        result = self._run(rows, step, vocab_mask)
        token_ids: list[list[int]] = [[] for _ in batch.req_ids]
        logprobs = None
        if self._requests.samples(output.num_scheduled_tokens):
            drafts = spec_decode_metadata(rows, step, len(rows)) if step.num_drafts else None
            token_ids, logprobs = self._sampler(result, batch, vocab_mask, drafts)
            self._requests.append(token_ids)
        if self._proposer:
            self._propose(self._proposer, rows, step, result.aux_hidden_states, token_ids)
        self._record_new()
        return ModelRunnerOutput(
            req_ids=list(batch.req_ids),
            req_id_to_index=dict(batch.req_id_to_index),
            sampled_token_ids=token_ids,
            logprobs=logprobs,
        )

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that the last step's requests got, once; None without a drafter."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def _propose(
        self,
        proposer: Proposer,
        rows: list[Row],
        step: Step,
        hidden_states: torch.Tensor | None,
        token_ids: list[list[int]],
    ) -> None:
        """Draft for the requests; after a segment of a prefill that is not its last, only fill the draft's cache."""
        assert hidden_states is not None
        following = self._requests.following(rows, token_ids, step.is_prefill)
        accepted = (
            [len(row.token_ids) for row in rows] if step.is_prefill else [len(ids) for ids in token_ids]
        )
        with set_forward_context(None, self.vllm_config):
            drafts = proposer.propose(following, step, self.sizes, hidden_states, accepted)
        given = [guess if tokens else [] for guess, tokens in zip(drafts, token_ids, strict=True)]
        self._drafts = DraftTokenIds(list(self._requests.batch.req_ids), given)

    def _step_for(self, output: NeuronSchedulerOutput, rows: list[Row]) -> Step:
        """The shapes that the step is padded to."""
        longest_padded = max(output.num_scheduled_tokens_padded.values())
        if output.is_prefill:
            return self._step(True, longest_padded)
        bucket = get_bucket_for_count(len(rows), self.sizes.decode_buckets)
        context = None
        if self.sizes.context_buckets:
            longest = max(row.start for row in rows) + longest_padded
            context = get_bucket_for_count(longest, self.sizes.context_buckets)
        return self._step(False, bucket, context, longest_padded - 1)

    def _run(self, rows: list[Row], step: Step, vocab_mask: torch.Tensor | None) -> ForwardOutput:
        vocab_size = self.model_config.get_vocab_size()
        outside = [token for row in rows for token in row.token_ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"token ids {outside} are outside the vocabulary of {vocab_size}")
        params = None
        if self.samples_on_device:
            params = build_sampling_params([state for _, state in self._requests.current()])
        mask = None if vocab_mask is None else self._model_mask(vocab_mask)
        with set_forward_context(None, self.vllm_config):
            return self._forward(rows, step, params, mask)

    def _model_mask(self, mask: torch.Tensor) -> torch.Tensor:
        return own_shard(mask) if self.samples_on_device else mask

    def _record_new(self) -> None:
        if len(self._reports()) > self._num_reports:
            self._num_reports = len(self._reports())
            self.record()

    def _reports(self) -> dict[tuple[str, int], ForwardReport]:
        return self._forward.reports | (self._proposer.reports if self._proposer else {})

    def record(self) -> None:
        """Write down which rules of the device were met so far."""
        if hasattr(self, "_forward"):
            write_recorded(self._forward.rank, self._reports())
