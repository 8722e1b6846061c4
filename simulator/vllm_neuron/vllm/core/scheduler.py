"""Scheduling as the device needs it: a step is one prefill, or decode of a batch, and never both."""

from dataclasses import dataclass, field
from typing import Any

from vllm_neuron.utils.bucket_utils import get_bucket_for_count
from vllm_neuron.vllm.checks import get_neuron_config
from vllm_neuron.vllm.internals import Scheduler, SchedulerOutput
from vllm_neuron.vllm.sizes import StepSizes


@dataclass
class NeuronSchedulerOutput(SchedulerOutput):
    """vLLM's output, and how the step is padded.

    Attributes:
        num_scheduled_tokens_padded: Padded number of tokens of each request: the bucket in prefill; in decode 1, or
            with drafts in the step 1 + `num_speculative_tokens` for all.
        is_prefill: Whether it is a step of one prefill.
    """

    num_scheduled_tokens_padded: dict[str, int] = field(default_factory=dict)
    is_prefill: bool = False


class NeuronScheduler(Scheduler):
    """First come, first served, with prefill before decode and one prefill at a time.

    vLLM's scheduler would fill the rest of a prefill step with decode tokens, and shorten a prefill segment
    to make room for them. The decision is made here and not by cutting up a mixed step in the model runner, so
    that every segment is whole and steps come in the order in which the device runs them.

    With a drafter all requests of a decode step have places for the same number of drafts, or none has: the device
    compiles these two. None has as soon as one request is too near to `max_model_len` for a full row.

    The plugin also bounds the number of running requests by the cache that they would need at full length,
    so that none is ever preempted. Here they may be: it asks more of the model, and of small caches less.
    """

    num_spec_tokens: int  # drafts of a request; vLLM's name

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        sizes = StepSizes.from_config(self.vllm_config, get_neuron_config(self.vllm_config))
        self._prefill_buckets = sizes.prefill_buckets
        self._most_active = self.max_num_active_reqs

    def schedule(self, throttle_prefills: bool = False) -> NeuronSchedulerOutput:
        """Return one step: the next segment of a prefill, else a new prefill, else decode of all requests."""
        prefilling = [request for request in self.running if request.is_prefill_chunk]
        room = len(self.running) < self._most_active
        finished: set[str] = set()
        if prefilling or (room and self.waiting):
            self._hold_back([request for request in self.running if request not in prefilling])
            admitted = len(self.running) + (0 if prefilling else 1)
            output = self._schedule_prefill(admitted, throttle_prefills)
            if output.num_scheduled_tokens:
                return self._padded(output, is_prefill=True)
            # The cache has no room for it.
            finished = output.finished_req_ids
        self._keep_drafts_within_context()
        output = self._schedule_at_most(0, throttle_prefills)
        output.finished_req_ids = output.finished_req_ids | finished
        return self._padded(output, is_prefill=False)

    def _hold_back(self, requests: list[Any]) -> None:
        """Leave running requests out of the next call of vLLM's `schedule`, and of no later one."""
        for request in requests:
            request.next_decode_eligible_step = self.current_step + 2

    def _keep_drafts_within_context(self) -> None:
        """Drop the drafts of all running requests if those of one would pass the longest sequence."""
        # A row is a token, the drafts, and the token that is sampled after the last of them.
        longest = max((request.num_computed_tokens for request in self.running), default=0)
        if longest + 2 + self.num_spec_tokens > self.max_model_len:
            for request in self.running:
                request.spec_token_ids = []

    def _schedule_prefill(self, active: int, throttle_prefills: bool) -> SchedulerOutput:
        """`_schedule_at_most`, without the placeholders for drafts that vLLM adds to a prefill of one token."""
        num_spec_tokens, self.num_spec_tokens = self.num_spec_tokens, 0
        try:
            return self._schedule_at_most(active, throttle_prefills)
        finally:
            self.num_spec_tokens = num_spec_tokens

    def _schedule_at_most(self, active: int, throttle_prefills: bool) -> SchedulerOutput:
        """vLLM's `schedule`, which admits waiting requests while fewer than `active` are running."""
        self.max_num_active_reqs = active
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = self._most_active

    def _padded(self, output: SchedulerOutput, is_prefill: bool) -> NeuronSchedulerOutput:
        decode = 1 + self.num_spec_tokens if output.scheduled_spec_decode_tokens else 1
        padded = {
            request: get_bucket_for_count(count, self._prefill_buckets) if is_prefill else decode
            for request, count in output.num_scheduled_tokens.items()
        }
        return NeuronSchedulerOutput(
            **vars(output), num_scheduled_tokens_padded=padded, is_prefill=is_prefill
        )
