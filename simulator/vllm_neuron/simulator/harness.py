"""Runs a model as the engine's runner does, without an engine: padded steps through a paged KV cache."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.simulator.forward import Forward
from vllm_neuron.simulator.guards import ForwardReport
from vllm_neuron.simulator.loading import allocate_kv_caches, kv_groups, load_model, make_vllm_config
from vllm_neuron.simulator.metadata import Row, Step
from vllm_neuron.utils.bucket_utils import (
    get_bucket_for_count,
    resolve_kv_segment_size_buckets,
    resolve_num_batched_tokens_buckets,
    resolve_num_seqs_buckets,
    resolve_segmented_prefill_config,
)

GREEDY = (-1.0, 1.0, 0.0)  # top_k, top_p, temperature
MAX_LOGPROBS = 20  # vLLM's default, which the runner hands to the model


@dataclass
class Sequence:
    """A sequence in the cache.

    Attributes:
        token_ids: Its tokens so far.
        num_computed: Tokens whose keys and values are cached.
        blocks: Per KV group the block ids, in order of position.
    """

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Harness:
    """One rank's model with its KV cache, in a process that is a rank (`activate`).

    All ranks make the same calls.

    Args:
        factory_class: Class from the registry, with ``from_configs(hf_config, neuron_config)``.
        hf_config: The Hugging Face config.
        checkpoint_path: Folder or hub id that ``load_weights`` gets.
        neuron_config: ``additional_config["neuron_config"]``. Sampling on the device is on unless it says
            ``{"on_device_sampling_config": None}``.
        dtype: Dtype of the KV cache.
        block_size: Tokens per block.
        num_blocks: Blocks of the cache, with the reserved block 0.
        max_model_len: Longest sequence in tokens.
        kv_segment_size: Segment of segmented prefill in tokens, 0 for prefill in one step.
        num_batched_tokens_buckets: Padded lengths of a prefill step; ``[kv_segment_size]`` when segmented.
        num_seqs_buckets: Padded sizes of a decode batch.

    Attributes:
        model: The loaded model.
        reports: By kind of step and bucket, what the first such forward did. The rules of the device are held
            in the first forward of each shape, as the device compiles each shape once.
        gathered_logits: Float logits that the last forward returned beside sampled tokens, or None.
        aux_hidden_states: Hidden states for a drafter [tokens, layers * H] of the last forward, or None.

    Raises:
        ValueError: Bucket sizes that the runner refuses.
        NotImplementedError: The loaded model has tensors on the meta device.
    """

    def __init__(
        self,
        factory_class: Any,
        hf_config: Any,
        checkpoint_path: str,
        *,
        neuron_config: dict[str, Any] | None,
        dtype: torch.dtype,
        block_size: int = 32,
        num_blocks: int,
        max_model_len: int,
        kv_segment_size: int = 0,
        num_batched_tokens_buckets: list[int],
        num_seqs_buckets: list[int],
    ):
        _check_buckets(num_batched_tokens_buckets, num_seqs_buckets, max_model_len, kv_segment_size)
        config = NeuronConfig.from_dict({"max_logprobs": MAX_LOGPROBS, **(neuron_config or {})})
        self.samples_on_device = config.on_device_sampling_config is not None
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.kv_segment_size = kv_segment_size
        self.prefill_buckets = num_batched_tokens_buckets
        self.decode_buckets = num_seqs_buckets
        self.gathered_logits: torch.Tensor | None = None
        self.aux_hidden_states: torch.Tensor | None = None

        vllm_config = make_vllm_config(hf_config, checkpoint_path, dtype, block_size, max_model_len)
        self.model = load_model(factory_class, hf_config, config, checkpoint_path, vllm_config)
        spec = self.model.get_kv_spec()
        self._groups = kv_groups(spec)
        self.model.bind_kv_cache(allocate_kv_caches(spec, num_blocks, block_size, dtype))
        self._run = Forward(self.model, self._groups, self.samples_on_device)
        # Handed out from the end, so that the blocks of a sequence are not in ascending order.
        self._free_blocks = list(range(1, num_blocks))

    @property
    def reports(self) -> dict[tuple[str, int], ForwardReport]:
        return self._run.reports

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Let the model return the hidden states before these layers, as it does for a drafter."""
        self._run.set_aux_hidden_state_layers(layers)

    def add(self, token_ids: abc.Sequence[int]) -> Sequence:
        """Return a new sequence with blocks for its prompt; nothing is computed yet.

        Raises:
            ValueError: The prompt is empty or longer than `max_model_len`.
            RuntimeError: The cache is full.
        """
        if not 0 < len(token_ids) <= self.max_model_len:
            raise ValueError(f"a prompt needs 1 to {self.max_model_len} tokens, got {len(token_ids)}")
        sequence = Sequence(list(token_ids), blocks=[[] for _ in self._groups])
        self._grow(sequence, len(token_ids))
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back."""
        for blocks in sequence.blocks:
            self._free_blocks += blocks
            blocks.clear()

    def prefill(self, sequence: Sequence, all_positions: bool = False) -> torch.Tensor:
        """Compute all tokens of the sequence that are not cached yet.

        Returns:
            Float logits [1, vocab] at the last token, or [T, vocab] at the T computed tokens with
            `all_positions`; with on-device sampling the sampled ids [1] or [T] instead.
        """
        end = len(sequence.token_ids)
        outputs = []
        while sequence.num_computed < end:
            start = sequence.num_computed
            stop = min(end, start + self.kv_segment_size) if self.kv_segment_size else end
            row = Row(sequence.token_ids[start:stop], start, sequence.blocks)
            outputs.append(self._forward([row], is_prefill=True, all_positions=all_positions))
            sequence.num_computed = stop
        if not outputs:
            raise ValueError("all tokens of the sequence are computed already")
        return torch.cat(outputs) if all_positions else outputs[-1]

    def decode(self, sequences: abc.Sequence[Sequence], token_ids: abc.Sequence[int]) -> torch.Tensor:
        """Append one token to each sequence and compute it, in one batch.

        Returns:
            Float logits [len(sequences), vocab]; with on-device sampling the sampled ids [len(sequences)].

        Raises:
            ValueError: The lists differ in length or exceed the largest bucket, or a sequence has tokens that
                are not computed, or is of `max_model_len` already.
            RuntimeError: The cache is full.
        """
        if len(sequences) != len(token_ids):
            raise ValueError(f"{len(sequences)} sequences but {len(token_ids)} tokens")
        if not 0 < len(sequences) <= self.decode_buckets[-1]:
            raise ValueError(f"a batch has 1 to {self.decode_buckets[-1]} sequences, got {len(sequences)}")
        if any(s.num_computed != len(s.token_ids) for s in sequences):
            raise ValueError("a sequence has tokens that are not computed; prefill it first")
        if any(len(s.token_ids) == self.max_model_len for s in sequences):
            raise ValueError(f"a sequence has max_model_len {self.max_model_len} tokens already")
        for sequence in sequences:
            self._grow(sequence, len(sequence.token_ids) + 1)
        for sequence, token in zip(sequences, token_ids, strict=True):
            sequence.token_ids.append(token)
        rows = [Row(s.token_ids[-1:], s.num_computed, s.blocks) for s in sequences]
        output = self._forward(rows, is_prefill=False, all_positions=False)
        for sequence in sequences:
            sequence.num_computed += 1
        return output

    def verify(
        self, sequences: abc.Sequence[Sequence], drafts: abc.Sequence[abc.Sequence[int]]
    ) -> torch.Tensor:
        """Compute, in one batch, a token and drafts after it for each sequence, as speculative decoding does.

        The sequences keep their tokens; `accept` appends those that are right.

        Args:
            drafts: For each sequence the token to append, and k drafts of the ones after it.

        Returns:
            Float logits [len(sequences), k + 1, vocab] after each of the tokens; with on-device sampling the tokens
            [len(sequences), k + 1] that the model verified, then -1.

        Raises:
            ValueError: The lists differ in length.
            RuntimeError: The cache is full.
        """
        count = len(drafts[0])
        if len(sequences) != len(drafts) or any(len(tokens) != count for tokens in drafts):
            raise ValueError(f"{len(sequences)} sequences but tokens {drafts}")
        for sequence in sequences:
            self._grow(sequence, sequence.num_computed + count)
        rows = [Row(tokens, s.num_computed, s.blocks) for s, tokens in zip(sequences, drafts, strict=True)]
        bucket = get_bucket_for_count(len(rows), self.decode_buckets)
        step = Step(False, bucket, self.block_size, self.max_model_len, self.kv_segment_size, None, count - 1)
        params = torch.tensor([GREEDY] * len(rows)) if self.samples_on_device else None
        output = self._run(rows, step, params)
        self.gathered_logits, self.aux_hidden_states = None, output.aux_hidden_states
        if self.samples_on_device:
            assert output.token_ids is not None
            return output.token_ids
        assert output.logits is not None
        return output.logits.view(len(rows), count, -1)

    def accept(self, sequence: Sequence, token_ids: abc.Sequence[int]) -> None:
        """Append tokens that `verify` has computed; the cache has them already."""
        sequence.token_ids += token_ids
        sequence.num_computed += len(token_ids)

    def generate(self, prompts: abc.Sequence[abc.Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Return `max_new_tokens` greedy tokens after each prompt; no token ends a sequence."""
        size = self.decode_buckets[-1]
        results: list[list[int]] = []
        for first in range(0, len(prompts), size):
            sequences = [self.add(prompt) for prompt in prompts[first : first + size]]
            tokens = [self._greedy(self.prefill(sequence))[0] for sequence in sequences]
            new = [[token] for token in tokens]
            for _ in range(max_new_tokens - 1):
                tokens = self._greedy(self.decode(sequences, tokens))
                for generated, token in zip(new, tokens, strict=True):
                    generated.append(token)
            for sequence in sequences:
                self.release(sequence)
            results += new
        return results

    def _greedy(self, output: torch.Tensor) -> list[int]:
        return (output if self.samples_on_device else output.argmax(-1)).tolist()

    def _grow(self, sequence: Sequence, length: int) -> None:
        """Give the sequence blocks for `length` tokens."""
        needed = -(-length // self.block_size)
        if sum(needed - len(blocks) for blocks in sequence.blocks) > len(self._free_blocks):
            raise RuntimeError("the KV cache has no free block; raise num_blocks")
        for blocks in sequence.blocks:
            while len(blocks) < needed:
                blocks.append(self._free_blocks.pop())

    def _forward(self, rows: list[Row], is_prefill: bool, all_positions: bool) -> torch.Tensor:
        count = sum(len(row.token_ids) for row in rows)
        bucket = get_bucket_for_count(count, self.prefill_buckets if is_prefill else self.decode_buckets)
        step = Step(is_prefill, bucket, self.block_size, self.max_model_len, self.kv_segment_size)
        sampling_params = None
        if self.samples_on_device:
            sampling_params = torch.tensor([GREEDY] * (count if all_positions else len(rows)))
        output = self._run(rows, step, sampling_params, all_positions=all_positions)
        self.gathered_logits = output.logits if self.samples_on_device else None
        self.aux_hidden_states = output.aux_hidden_states
        result = output.token_ids if self.samples_on_device else output.logits
        assert result is not None
        return result


def _check_buckets(prefill: list[int], decode: list[int], max_model_len: int, kv_segment_size: int) -> None:
    resolve_num_seqs_buckets(max(decode, default=0), decode)
    resolve_num_batched_tokens_buckets(max(prefill, default=0), prefill)
    if kv_segment_size:
        resolve_kv_segment_size_buckets([kv_segment_size], prefill)
    elif resolve_segmented_prefill_config(max(prefill), max_model_len)[0] is not None:
        raise ValueError(
            f"prefill buckets {prefill} end below max_model_len {max_model_len}, so prefill is segmented: "
            f"pass kv_segment_size={max(prefill)}"
        )
