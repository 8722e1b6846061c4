"""Next tokens of a step: sampled by the model on the device, or here on the CPU by vLLM's sampler."""

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.simulator.forward import ForwardOutput
from vllm_neuron.vllm.internals import (
    CachedRequestState,
    GrammarOutput,
    InputBatch,
    LogprobsLists,
    Sampler,
    SchedulerOutput,
    apply_grammar_bitmask,
)


def build_sampling_params(states: list[CachedRequestState]) -> torch.Tensor:
    """What the model gets to sample with: float32 [requests, 3], columns top_k, top_p and temperature."""
    params = [state.sampling_params for state in states]
    return torch.tensor([[p.top_k or -1, p.top_p, p.temperature] for p in params], dtype=torch.float32)


def build_logit_mask(
    output: SchedulerOutput, grammar: GrammarOutput | None, batch: InputBatch, vocab_size: int
) -> torch.Tensor:
    """bool [requests, vocab_size], True where the grammar of the request allows a token."""
    allowed = torch.zeros(batch.num_reqs, vocab_size)
    if grammar is not None:
        apply_grammar_bitmask(output, grammar, batch, allowed)
    return allowed == 0


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
        self, output: ForwardOutput, batch: InputBatch, logit_mask: torch.Tensor | None
    ) -> tuple[list[int], LogprobsLists | None]:
        """Return a token id for each request of the batch, the same on all ranks, and on rank 0 logprobs.

        Args:
            logit_mask: bool [requests, vocab], for sampling on the CPU.

        Raises:
            RuntimeError: The ranks' models sampled different tokens, or logprobs are asked for and the model
                gathered no logits.
        """
        with torch.compiler.set_stance("force_eager"):
            if output.token_ids is not None:
                _check_ranks_agree(output.token_ids)
                return output.token_ids.tolist(), self._logprobs_of(output.token_ids, output.logits, batch)
            assert output.logits is not None
            return self._sample(output.logits, batch, logit_mask)

    def _sample(
        self, logits: torch.Tensor, batch: InputBatch, logit_mask: torch.Tensor | None
    ) -> tuple[list[int], LogprobsLists | None]:
        """Sample on rank 0, and tell the others."""
        group = get_tp_group()
        token_ids = torch.empty(batch.num_reqs, dtype=torch.int64)
        logprobs = None
        if group.rank_in_group == 0:
            if logit_mask is not None:
                logits = logits.masked_fill(~logit_mask, float("-inf"))
            sampled = self._sampler(logits=logits, sampling_metadata=batch.sampling_metadata)
            token_ids.copy_(sampled.sampled_token_ids.view(-1))
            logprobs = sampled.logprobs_tensors and sampled.logprobs_tensors.tolists()
        if group.world_size > 1:
            dist.broadcast(token_ids, group.ranks[0], group=group.cpu_group)
        return token_ids.tolist(), logprobs

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
        return self._sampler.gather_logprobs(logits, count, token_ids).tolists()


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
