"""One forward as the runner makes it: exact arguments, device rules held, return value checked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.simulator.guards import ForwardReport
from vllm_neuron.simulator.metadata import KVGroup, Row, Step, build_attn_metadata, build_tokens
from vllm_neuron.simulator.traced import Traced

WARM_UP_CONTEXT = 256  # tokens
WARM_UP_SAMPLING = (0.0, 1.0, 1.0)  # top_k, top_p, temperature


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward returned, without padding.

    Attributes:
        token_ids: int64 [R], sampled on the device; None when that is off. With k drafts in the step [R, k + 1]: the
            accepted ones and one token more, then -1.
        logits: Float [R, vocab], with drafts [R * (k + 1), vocab]. Beside `token_ids` only if the model gathers them.
        aux_hidden_states: [tokens, layers * H] in the model's dtype, for a drafter; None if no layers are set.
    """

    token_ids: torch.Tensor | None
    logits: torch.Tensor | None
    aux_hidden_states: torch.Tensor | None = None


class Forward:
    """Calls a loaded model.

    Args:
        model: The model with its KV cache bound.
        groups: Layers by block table, in the order of `Row.blocks`.
        samples_on_device: Whether the model returns token ids.
        compiled: See `Traced`.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[KVGroup], samples_on_device: bool, compiled: bool = False
    ):
        self.model = model
        self.groups = groups
        self.samples_on_device = samples_on_device
        self.aux_layers: tuple[int, ...] = ()
        self._rank = torch.tensor(get_tp_group().rank_in_group, dtype=torch.int32)
        self._traced = Traced(model, compiled)

    @property
    def reports(self) -> dict[tuple[str, int], ForwardReport]:
        """By kind of step and bucket, what the first such forward did."""
        return self._traced.reports

    def __call__(
        self,
        rows: Sequence[Row],
        step: Step,
        sampling_params: torch.Tensor | None = None,
        logit_mask: torch.Tensor | None = None,
        all_positions: bool = False,
    ) -> ForwardOutput:
        """Run one step. With drafts in it, what follows the first token of each row is to be verified.

        Args:
            sampling_params: float32 [requests, 3] (top_k, top_p, temperature), not padded; None without
                on-device sampling.
            logit_mask: bool [requests, V or V/TP], True where a token is allowed; not padded. With k drafts in
                the step [requests * (k + 1), V or V/TP].
            all_positions: Sample after every token of a prefill step, and not only after the last.

        Raises:
            ValueError: The rows do not fit the step, or the model returns something else than the runner
                takes.
        """
        count = sum(step.padded_length(row) for row in rows)
        arguments = self._arguments(rows, step, sampling_params, logit_mask)
        if all_positions:
            arguments["sampling_positions"] = torch.arange(count)
            arguments["sampling_params"] = sampling_params
        padded = len(arguments["sampling_positions"])
        output = self._traced(_name(step), arguments)
        aux = None
        if self.aux_layers:
            output, aux = self._without_aux(output, step.num_tokens)
            aux = aux[:count]
        sampled = count if all_positions or step.num_drafts else len(rows)
        if step.num_drafts and self.samples_on_device:
            return replace(self._verified(output, step, len(rows), sampled), aux_hidden_states=aux)
        return replace(self._result(output, padded, sampled), aux_hidden_states=aux)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Let the model return the hidden states before these layers; `aux_layers` are those of the next forwards."""
        self.model.set_aux_hidden_state_layers(layers)
        self.aux_layers = layers

    def _without_aux(self, output: Any, num_tokens: int) -> tuple[Any, torch.Tensor]:
        """What a model without a drafter returns, and the hidden states, which come second.

        Raises:
            ValueError: They are missing, or not one row for each token.
        """
        expected = f"hidden states [{num_tokens}, {len(self.aux_layers)} * H] after the first value"
        if not isinstance(output, tuple) or len(output) != 2 + self.samples_on_device:
            raise ValueError(f"forward must return {expected}, got {type(output).__name__}")
        aux = output[1]
        if not isinstance(aux, torch.Tensor) or aux.dim() != 2 or aux.shape[0] != num_tokens:
            raise ValueError(f"forward must return {expected}, got {getattr(aux, 'shape', aux)}")
        return ((output[0], output[2]) if self.samples_on_device else output[0]), aux

    @property
    def rank(self) -> int:
        """Tensor-parallel rank."""
        return int(self._rank)

    def warm_up(self, step: Step, num_blocks: int, logit_mask: torch.Tensor | None = None) -> None:
        """Run a synthetic step of full size, so that its shapes can be run from then on.

        Sampling parameters are passed also when sampling on the device is off, unlike in real steps.

        Args:
            num_blocks: Blocks of the cache; all but the null block are written to.
            logit_mask: bool [tokens to sample after, V or V/TP].
        """
        rows = synthetic_rows(step, num_blocks, len(self.groups))
        arguments = self._arguments(rows, step, torch.tensor([WARM_UP_SAMPLING] * len(rows)), logit_mask)
        width = len(rows[0].blocks[0])
        for entry in arguments["attn_metadata"].values():
            # Not widened to a multiple of 128 tokens here.
            entry["full_block_table_tensor"] = entry["full_block_table_tensor"][:, :width].clone()
        self._traced.warm_up(_name(step), arguments)

    def _arguments(
        self,
        rows: Sequence[Row],
        step: Step,
        sampling_params: torch.Tensor | None,
        logit_mask: torch.Tensor | None,
    ) -> dict[str, Any]:
        input_ids, positions, sampling_positions = build_tokens(rows, step)
        each = 1 + step.num_drafts
        if sampling_params is not None:
            sampling_params = sampling_params.repeat_interleave(each, dim=0)
        return {
            "input_ids": input_ids,
            "positions": positions,
            "attn_metadata": build_attn_metadata(rows, self.groups, step),
            "sampling_positions": sampling_positions,
            "sampling_params": _padded(sampling_params, len(sampling_positions), 0.0),
            "spec_decode_metadata": spec_decode_metadata(rows, step, step.bucket)
            if step.num_drafts
            else None,
            "rank": self._rank,
            "logit_mask": _padded(logit_mask, len(sampling_positions), True),
        }

    def _verified(self, output: Any, step: Step, requests: int, sampled: int) -> ForwardOutput:
        tokens, logits = output if isinstance(output, tuple) else (output, None)
        expected = (step.bucket, 1 + step.num_drafts)
        if not isinstance(tokens, torch.Tensor) or tokens.shape != expected:
            found = tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise ValueError(f"forward must return accepted token ids {list(expected)}, got {found}")
        logits = None if logits is None else logits[:sampled].float()
        return ForwardOutput(tokens[:requests].to(torch.int64), logits)

    def _result(self, output: Any, padded: int, real: int) -> ForwardOutput:
        logits: torch.Tensor | None = None
        if self.samples_on_device and isinstance(output, tuple):
            output, logits = output
        dims = 1 if self.samples_on_device else 2
        if not isinstance(output, torch.Tensor) or output.dim() != dims or output.shape[0] != padded:
            expected = f"token ids [{padded}]" if self.samples_on_device else f"logits [{padded}, vocabulary]"
            found = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            raise ValueError(f"forward must return {expected}, got {found}")
        if not self.samples_on_device:
            return ForwardOutput(None, output[:real].float())
        return ForwardOutput(output[:real].to(torch.int64), None if logits is None else logits[:real].float())


def synthetic_rows(step: Step, num_blocks: int, num_groups: int) -> list[Row]:
    """Requests that fill a step, in all blocks of the cache but the null block."""
    columns = -(-step.max_model_len // step.block_size)
    blocks = [1 + column % (num_blocks - 1) for column in range(columns)]
    longest = step.context_len or step.max_model_len
    start = 0 if step.is_prefill else min(WARM_UP_CONTEXT, longest) - 1 - step.num_drafts
    tokens = [0] * (step.bucket if step.is_prefill else 1 + step.num_drafts)
    return [Row(tokens, start, [blocks] * num_groups)] * (1 if step.is_prefill else step.bucket)


def spec_decode_metadata(rows: Sequence[Row], step: Step, num_requests: int) -> Any:
    """vLLM's description of the drafts of a step; -1, which no token is, where a row has fewer, and for padding."""
    from vllm_neuron.vllm.internals import SpecDecodeMetadata

    drafts = [[*row.token_ids[1:], *[-1] * (1 + step.num_drafts - len(row.token_ids))] for row in rows]
    drafts += [[-1] * step.num_drafts] * (num_requests - len(rows))
    places = torch.arange(num_requests * (1 + step.num_drafts)).view(num_requests, -1)
    requests = torch.arange(1, num_requests + 1, dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor(drafts, dtype=torch.int32).view(-1),
        num_draft_tokens=[step.num_drafts] * num_requests,
        cu_num_draft_tokens=requests * step.num_drafts,
        cu_num_sampled_tokens=requests * (1 + step.num_drafts),
        target_logits_indices=places[:, :-1].flatten(),
        bonus_logits_indices=places[:, -1],
        logits_indices=places.flatten(),
    )


def _name(step: Step) -> tuple[str, int]:
    kind = "prefill" if step.is_prefill else "verify" if step.num_drafts else "decode"
    return kind, step.bucket


def _padded(rows: torch.Tensor | None, count: int, value: float | bool) -> torch.Tensor | None:
    if rows is None or len(rows) >= count:
        return rows
    return torch.cat([rows, torch.full((count - len(rows), rows.shape[1]), value, dtype=rows.dtype)])
