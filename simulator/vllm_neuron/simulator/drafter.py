"""Runs a draft model (Eagle3) beside a target in a `Harness`, as the engine's proposer does."""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.simulator.guards import guard_forward
from vllm_neuron.simulator.harness import Harness
from vllm_neuron.simulator.loading import allocate_kv_caches, kv_groups, load_model, make_vllm_config
from vllm_neuron.simulator.metadata import Row, Step, build_attn_metadata, build_tokens
from vllm_neuron.utils.bucket_utils import get_bucket_for_count


class Drafter:
    """One rank's draft model with its KV cache, which has the block tables of the target's.

    Args:
        factory_class: Class from the registry, with ``from_configs(config, start_layer_idx, neuron_config)``.
        hf_config: The draft's Hugging Face config.
        checkpoint_path: Folder or hub id that ``load_weights`` gets.
        num_target_layers: Layers of the target; the draft's are numbered after them.
        num_speculative_tokens: Drafts for each request.
        embed_tokens: The target's embedding, for a draft without one.
    """

    def __init__(
        self,
        factory_class: Any,
        hf_config: Any,
        checkpoint_path: str,
        *,
        num_target_layers: int,
        num_speculative_tokens: int,
        dtype: torch.dtype,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        embed_tokens: nn.Module | None = None,
    ):
        self.block_size, self.max_model_len = block_size, max_model_len
        create = functools.partial(factory_class.from_configs, hf_config, num_target_layers)
        factory = SimpleNamespace(from_configs=lambda _, neuron_config: create(neuron_config))
        vllm_config = make_vllm_config(hf_config, checkpoint_path, dtype, block_size, max_model_len)
        self.model = load_model(factory, hf_config, NeuronConfig.from_dict({}), checkpoint_path, vllm_config)
        if hasattr(self.model, "share_embedding"):
            self.model.share_embedding(embed_tokens)
        self.model.num_speculative_tokens = num_speculative_tokens
        spec = self.model.get_kv_spec()
        self._groups = kv_groups(spec)
        self.model.bind_kv_cache(allocate_kv_caches(spec, num_blocks, block_size, dtype))
        self._rank = torch.tensor(get_tp_group().rank_in_group, dtype=torch.int32)

    def propose(
        self,
        rows: Sequence[Row],
        hidden_states: torch.Tensor,
        accepted: Sequence[int],
        prefill_bucket: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts after a step of the target.

        Args:
            rows: For each request the tokens that follow those of the target's step, at its positions and blocks.
            hidden_states: [tokens, 3 * H] that the target gave.
            accepted: For each request how many of its tokens stay.
            prefill_bucket: Padded tokens of a prefill step of one request, 0 for decode.

        Returns:
            Token ids [requests, K], and float logits [K, requests, draft vocabulary].
        """
        size = prefill_bucket or len(rows)
        drafts = 0 if prefill_bucket else len(rows[0].token_ids) - 1
        step = Step(bool(prefill_bucket), size, self.block_size, self.max_model_len, num_drafts=drafts)
        input_ids, positions, _ = build_tokens(rows, step)
        padding = step.num_tokens - hidden_states.shape[0]
        starts = [index * (drafts + 1) for index in range(len(rows))]
        last = torch.tensor([start + count - 1 for start, count in zip(starts, accepted, strict=True)])
        states = nn.functional.pad(hidden_states, (0, 0, 0, padding))
        metadata = build_attn_metadata(rows, self._groups, step)
        with torch.no_grad(), guard_forward():
            tokens, _, logits = self.model(input_ids, positions, states, metadata, last, self._rank)
        return tokens, logits.float()


def generate(
    harness: Harness, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[list[list[int]], int]:
    """Greedy tokens after each prompt, drafted and verified; and how many steps verified them.

    The harness' hidden-state layers must be set. Prompts are computed in one step each.
    """
    sequences = [harness.add(prompt) for prompt in prompts]
    found: list[list[int]] = []
    drafts: list[list[int]] = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        token = int(_sampled(harness, harness.prefill(sequence)))
        row = Row([*prompt[1:], token], 0, sequence.blocks)
        bucket = get_bucket_for_count(len(prompt), harness.prefill_buckets)
        assert harness.aux_hidden_states is not None
        tokens, _ = drafter.propose([row], harness.aux_hidden_states, [len(prompt)], bucket)
        found.append([token])
        drafts.append(tokens[0].tolist())
    steps = 0
    while any(len(tokens) < max_new_tokens for tokens in found):
        given = [[tokens[-1], *guess] for tokens, guess in zip(found, drafts, strict=True)]
        sampled = _sampled(harness, harness.verify(sequences, given)).tolist()  # [requests, K + 1]
        accepted = [_accepted(ids, guess) for ids, guess in zip(sampled, drafts, strict=True)]
        rows = []
        for sequence, tokens, right, ids in zip(sequences, found, accepted, given, strict=True):
            rest = [0] * (len(ids) - len(right))
            rows.append(Row([*right, *rest], sequence.num_computed, sequence.blocks))
            harness.accept(sequence, ids[: len(right)])
            tokens += right
        assert harness.aux_hidden_states is not None
        counts = [len(right) for right in accepted]
        drafts = drafter.propose(rows, harness.aux_hidden_states, counts)[0].tolist()
        steps += 1
    for sequence in sequences:
        harness.release(sequence)
    return [tokens[:max_new_tokens] for tokens in found], steps


def _sampled(harness: Harness, output: torch.Tensor) -> torch.Tensor:
    return output if harness.samples_on_device else output.argmax(-1)


def _accepted(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The sampled tokens up to the first that is not its draft."""
    right = 0
    while right < len(drafts) and sampled[right] == drafts[right]:
        right += 1
    return list(sampled[: right + 1])
