"""Next tokens of a step: sampled by the model on the device, or here on the CPU by vLLM's sampler."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.nn.rejection_sampler import rejection_sampler
from vllm_neuron.simulator.forward import ForwardOutput
from vllm_neuron.vllm.internals import (
    CachedRequestState,
    GrammarOutput,
    InputBatch,
    LogprobsLists,
    LogprobsTensors,
    Sampler,
    SamplingMetadata,
    SchedulerOutput,
    SpecDecodeMetadata,
    apply_grammar_bitmask,
)


def build_sampling_params(states: list[CachedRequestState]) -> torch.Tensor:
    """What the model gets to sample with: float32 [requests, 3], columns top_k, top_p and temperature."""
    params = [state.sampling_params for state in states]
    return torch.tensor([[p.top_k or -1, p.top_p, p.temperature] for p in params], dtype=torch.float32)


def build_logit_mask(
    output: SchedulerOutput,
    grammar: GrammarOutput | None,
    batch: InputBatch,
    vocab_size: int,
    num_drafts: int,
) -> torch.Tensor:
    """bool [requests * (1 + num_drafts), vocab_size], True where the grammar of the request allows a token."""
    given = [len(output.scheduled_spec_decode_tokens.get(request, ())) for request in batch.req_ids]
    allowed = torch.zeros(batch.num_reqs + sum(given), vocab_size)  # a row after each token, as vLLM has them
    if grammar is not None:
        apply_grammar_bitmask(output, grammar, batch, allowed)
    mask = torch.ones(batch.num_reqs, 1 + num_drafts, vocab_size, dtype=torch.bool)
    for request, rows in enumerate((allowed == 0).split([1 + count for count in given])):
        mask[request, : len(rows)] = rows
    return mask.flatten(0, 1)


def own_shard(mask: torch.Tensor) -> torch.Tensor:
    """This rank's columns of a mask over the vocabulary.

    Raises:
        ValueError: The vocabulary does not divide by the ranks.
    """
    group = get_tp_group()
    if mask.shape[1] % group.world_size:
        raise ValueError(
            f"vocabulary size {mask.shape[1]} is not divisible by tensor parallel size {group.world_size}"
        )
    return mask.chunk(group.world_size, dim=1)[group.rank_in_group]


class TokenSampler:
    """Turns what a forward returned into token ids and log-probabilities.

    Args:
        logprobs_mode: vLLM's option of this name.
    """

    def __init__(self, logprobs_mode: Any):
        self._sampler = Sampler(logprobs_mode=logprobs_mode)

    def __call__(
        self,
        output: ForwardOutput,
        batch: InputBatch,
        logit_mask: torch.Tensor | None,
        drafts: SpecDecodeMetadata | None = None,
    ) -> tuple[list[list[int]], LogprobsLists | None]:
        """Return the tokens of each request of the batch, the same on all ranks, and on rank 0 logprobs.

        Args:
            logit_mask: bool [requests, vocab], for sampling on the CPU; with k drafts [requests * (k + 1), vocab].
            drafts: Drafts of the step, k for each request. A request gets the accepted ones, and one token more.

        Raises:
            RuntimeError: The ranks' models sampled different tokens, or logprobs are asked for and the model
                gathered no logits.
        """
        with torch.compiler.set_stance("force_eager"):
            if output.token_ids is not None:
                token_ids = output.token_ids.view(batch.num_reqs, -1)
                _check_ranks_agree(token_ids)
                logprobs = self._logprobs_of(token_ids, output.logits, batch)
            else:
                assert output.logits is not None
                token_ids, logprobs = self._sample(output.logits, batch, logit_mask, drafts)
        return [[token for token in row if token >= 0] for row in token_ids.tolist()], logprobs

    def _sample(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        logit_mask: torch.Tensor | None,
        drafts: SpecDecodeMetadata | None,
    ) -> tuple[torch.Tensor, LogprobsLists | None]:
        """Sample on rank 0, and tell the others: [requests, 1 + drafts], -1 after the accepted tokens."""
        group = get_tp_group()
        each = logits.shape[0] // batch.num_reqs
        token_ids = torch.empty(batch.num_reqs, each, dtype=torch.int64)
        logprobs = None
        if group.rank_in_group == 0:
            if logit_mask is not None:
                logits = logits.masked_fill(~logit_mask, float("-inf"))
            metadata = _for_each_token(batch.sampling_metadata, each)
            sampled = self._sampler(logits=logits, sampling_metadata=metadata)
            tokens = sampled.sampled_token_ids.view(-1)
            token_ids.copy_((tokens if drafts is None else rejection_sampler(drafts, tokens)).view(-1, each))
            if sampled.logprobs_tensors:
                logprobs = _of_tokens(sampled.logprobs_tensors.filter(token_ids.view(-1) >= 0), token_ids)
        if group.world_size > 1:
            dist.broadcast(token_ids, group.ranks[0], group=group.cpu_group)
        return token_ids, logprobs

    def _logprobs_of(
        self, token_ids: torch.Tensor, logits: torch.Tensor | None, batch: InputBatch
    ) -> LogprobsLists | None:
        """Log-probabilities of tokens that the device sampled, and of the most likely ones."""
        count = batch.sampling_metadata.max_num_logprobs
        if count is None:
            return None
        if logits is None:
            raise RuntimeError("log-probabilities are asked for, but the model returned no logits")
        if self._sampler.logprobs_mode.endswith("logprobs"):
            logits = self._sampler.compute_logprobs(logits)
        kept = token_ids.view(-1) >= 0
        found = self._sampler.gather_logprobs(logits[kept], count, token_ids.view(-1)[kept])
        return _of_tokens(found, token_ids)


def _for_each_token(metadata: SamplingMetadata, each: int) -> SamplingMetadata:
    """The sampling parameters of each request, for so many of its tokens.

    Nothing else of the metadata is used with drafts: `check_sampling_params` refuses what needs it.
    """
    if each == 1:
        return metadata
    temperature, top_p, top_k = (
        None if values is None else values.repeat_interleave(each, dim=0)
        for values in (metadata.temperature, metadata.top_p, metadata.top_k)
    )
    return replace(metadata, temperature=temperature, top_p=top_p, top_k=top_k, generators={})


def _of_tokens(logprobs: LogprobsTensors, token_ids: torch.Tensor) -> LogprobsLists:
    """As vLLM takes them from a step whose requests get different numbers of tokens."""
    ends = (token_ids >= 0).sum(dim=1).cumsum(0).tolist()
    return logprobs.tolists([0, *ends])


def _check_ranks_agree(token_ids: torch.Tensor) -> None:
    """Check that all ranks sampled the same; all of them raise, as vLLM reports errors of rank 0 only."""
    group = get_tp_group()
    if group.world_size == 1:
        return
    sampled = [torch.empty_like(token_ids) for _ in range(group.world_size)]
    dist.all_gather(sampled, token_ids, group=group.cpu_group)
    for rank, ids in enumerate(sampled):
        if not torch.equal(ids, sampled[0]):
            raise RuntimeError(
                f"rank {rank} sampled {ids.tolist()}, rank 0 {sampled[0].tolist()}: "
                "what is the same on all ranks by design differs"
            )
