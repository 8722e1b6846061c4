"""The requests of one rank: what the scheduler has told about them, and the batch of the current step."""

from dataclasses import replace
from typing import Any

import torch
from vllm.sampling_params import SamplingType

from vllm_neuron.simulator.metadata import Row
from vllm_neuron.vllm.internals import (
    CachedRequestState,
    InputBatch,
    KVCacheConfig,
    SchedulerOutput,
    build_logitsprocs,
)


class Requests:
    """Keeps every unfinished request, and a batch with a row for each request of the step.

    Attributes:
        batch: vLLM's input batch, which keeps the sampling parameters of its rows as tensors.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig, device: torch.device):
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        processors = model.logits_processors or ()
        self._device = device
        self._states: dict[str, CachedRequestState] = {}
        self.batch = InputBatch(
            max_num_reqs=scheduler.max_num_seqs,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            device=device,
            vocab_size=model.get_vocab_size(),
            block_sizes=[spec.block_size for spec in specs],
            max_num_blocks_per_req=[
                spec.max_num_blocks_per_req(vllm_config, model.max_model_len) for spec in specs
            ],
            logitsprocs=build_logitsprocs(vllm_config, device, False, False, processors),
            logitsprocs_need_output_token_ids=bool(processors),
        )

    def update(self, output: SchedulerOutput) -> None:
        """Take over what the scheduler decided; afterwards the batch has exactly the step's requests."""
        batch, cached = self.batch, output.scheduled_cached_reqs
        for request_id in output.finished_req_ids:
            self._states.pop(request_id, None)
            batch.remove_request(request_id)
        for request_id in batch.req_id_to_index.keys() - (
            output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        ):
            batch.remove_request(request_id)

        added = [self._add(new) for new in output.scheduled_new_reqs]
        for index, request_id in enumerate(cached.req_ids):
            state = self._states[request_id]
            state.num_computed_tokens = cached.num_computed_tokens[index]
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                state.block_ids = new_blocks
            elif new_blocks is not None:
                for blocks, new in zip(state.block_ids, new_blocks, strict=True):
                    blocks.extend(new)
            row = batch.req_id_to_index.get(request_id)
            if row is None:
                added.append(state)
            else:
                batch.num_computed_tokens_cpu[row] = state.num_computed_tokens
        for state in added:
            batch.add_request(state)
        batch.condense()
        batch.refresh_metadata()

    def rows(self, output: SchedulerOutput) -> list[Row]:
        """The step's requests in the order of the batch, each with its drafts after its tokens."""
        rows = []
        for index, request_id in enumerate(self.batch.req_ids):
            state = self._states[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            start = state.num_computed_tokens
            stop = start + output.num_scheduled_tokens[request_id] - len(drafts)
            known = self.batch.token_ids_cpu[index, start:stop].tolist()
            rows.append(Row([*known, *drafts], start, state.block_ids))
        return rows

    def samples(self, num_scheduled_tokens: dict[str, int]) -> bool:
        """Whether the step ends its requests' known tokens, so that it samples; a prefill segment may not."""
        return all(
            state.num_computed_tokens + num_scheduled_tokens[request_id] >= state.num_tokens
            for request_id, state in self.current()
        )

    def current(self) -> list[tuple[str, CachedRequestState]]:
        """The step's requests in the order of the batch."""
        return [(request_id, self._states[request_id]) for request_id in self.batch.req_ids]

    def append(self, token_ids: list[list[int]]) -> None:
        """Append the sampled tokens to each request of the batch."""
        batch = self.batch
        for row, ((_, state), tokens) in enumerate(zip(self.current(), token_ids, strict=True)):
            start = batch.num_tokens_no_spec[row]
            end = start + len(tokens)
            batch.token_ids_cpu[row, start:end] = tokens
            batch.is_token_ids[row, start:end] = True
            batch.num_tokens_no_spec[row] = end
            state.output_token_ids += tokens

    def following(self, rows: list[Row], sampled: list[list[int]], is_prefill: bool) -> list[Row]:
        """At the places of the step's rows the tokens that follow theirs, as a drafter takes them.

        Args:
            sampled: Tokens of each request that were appended after the step. Places of rejected drafts are 0.
        """
        if is_prefill:
            (row,) = rows
            stop = row.start + len(row.token_ids)
            token = int(self.batch.token_ids_cpu[0, stop])
            return [replace(row, token_ids=[*row.token_ids[1:], token])]
        rejected = [
            [0] * (len(row.token_ids) - len(tokens)) for row, tokens in zip(rows, sampled, strict=True)
        ]
        return [
            replace(row, token_ids=[*tokens, *rest])
            for row, tokens, rest in zip(rows, sampled, rejected, strict=True)
        ]

    def _add(self, new: Any) -> CachedRequestState:
        params = new.sampling_params
        generator = None
        if params.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator(device=self._device).manual_seed(params.seed)
        state = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            mm_features=[],
            sampling_params=params,
            generator=generator,
            block_ids=new.block_ids,
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=[],
        )
        self._states[new.req_id] = state
        return state
