"""Scheduling as the device needs it: a step is one prefill, or decode of a batch, and never both."""

from dataclasses import dataclass, field
from typing import Any

from vllm_neuron.utils.bucket_utils import get_bucket_for_count
from vllm_neuron.vllm.checks import get_neuron_config
from vllm_neuron.vllm.internals import Scheduler, SchedulerOutput
from vllm_neuron.vllm.sizes import StepSizes


@dataclass
class NeuronSchedulerOutput(SchedulerOutput):
    """vLLM's output, and the padded number of tokens of each request: the bucket in prefill, 1 in decode."""

    num_scheduled_tokens_padded: dict[str, int] = field(default_factory=dict)

    @property
    def is_prefill(self) -> bool:
        return max(self.num_scheduled_tokens_padded.values(), default=0) > 1


class NeuronScheduler(Scheduler):
    """First come, first served, with prefill before decode and one prefill at a time.

    vLLM's scheduler would fill the rest of a prefill step with decode tokens, and shorten a prefill segment
    to make room for them. The decision is made here and not by cutting up a mixed step in the model runner, so
    that every segment is whole and steps come in the order in which the device runs them.

    The plugin also bounds the number of running requests by the cache that they would need at full length,
    so that none is ever preempted. Here they may be: it asks more of the model, and of small caches less.
    """

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
            output = self._schedule_at_most(admitted, throttle_prefills)
            if output.num_scheduled_tokens:
                return self._padded(output, is_prefill=True)
            # The cache has no room for it.
            finished = output.finished_req_ids
        output = self._schedule_at_most(0, throttle_prefills)
        output.finished_req_ids = output.finished_req_ids | finished
        return self._padded(output, is_prefill=False)

    def _hold_back(self, requests: list[Any]) -> None:
        """Leave running requests out of the next call of vLLM's `schedule`, and of no later one."""
        for request in requests:
            request.next_decode_eligible_step = self.current_step + 2

    def _schedule_at_most(self, active: int, throttle_prefills: bool) -> SchedulerOutput:
        """vLLM's `schedule`, which admits waiting requests while fewer than `active` are running."""
        self.max_num_active_reqs = active
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = self._most_active

    def _padded(self, output: SchedulerOutput, is_prefill: bool) -> NeuronSchedulerOutput:
        padded = {
            request: get_bucket_for_count(count, self._prefill_buckets) if is_prefill else 1
            for request, count in output.num_scheduled_tokens.items()
        }
        return NeuronSchedulerOutput(**vars(output), num_scheduled_tokens_padded=padded)
