"""One forward as the runner makes it: exact arguments, device rules held, return value checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron import envs
from vllm_neuron.simulator.guards import ForwardReport, guard_forward
from vllm_neuron.simulator.metadata import KVGroup, Row, Step, build_attn_metadata, build_tokens

WARM_UP_CONTEXT = 256  # tokens
WARM_UP_SAMPLING = (0.0, 1.0, 1.0)  # top_k, top_p, temperature


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward returned, without padding.

    Attributes:
        token_ids: int64 [R], sampled on the device; None when that is off.
        logits: Float [R, vocab]. Beside `token_ids` only if the model gathers them.
        aux_hidden_states: [tokens, layers * H] in the model's dtype, for a drafter; None if no layers are set.
    """

    token_ids: torch.Tensor | None
    logits: torch.Tensor | None
    aux_hidden_states: torch.Tensor | None = None


class Forward:
    """Calls a loaded model.

    The rules of the device are held in the first forward of each shape, as the device traces each shape once.

    Args:
        model: The model with its KV cache bound.
        groups: Layers by block table, in the order of `Row.blocks`.
        samples_on_device: Whether the model returns token ids.
        compiled: Run the model through ``torch.compile``, one graph per shape. Then only shapes that `warm_up`
            has seen can be run.

    Attributes:
        reports: By kind of step and bucket, what the first such forward did.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[KVGroup], samples_on_device: bool, compiled: bool = False
    ):
        self.model = model
        self.groups = groups
        self.samples_on_device = samples_on_device
        self.reports: dict[tuple[str, int], ForwardReport] = {}
        self.aux_layers: tuple[int, ...] = ()
        self._rank = torch.tensor(get_tp_group().rank_in_group, dtype=torch.int32)
        self._seen: set[tuple[Any, ...]] = set()
        self._compiled = _compile(model) if compiled else None

    def __call__(
        self,
        rows: Sequence[Row],
        step: Step,
        sampling_params: torch.Tensor | None = None,
        logit_mask: torch.Tensor | None = None,
        all_positions: bool = False,
        drafts: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """Run one step.

        Args:
            sampling_params: float32 [requests, 3] (top_k, top_p, temperature), not padded; None without
                on-device sampling.
            logit_mask: bool [requests, V or V/TP], True where a token is allowed; not padded.
            all_positions: Sample after every token of a prefill step, and not only after the last.
            drafts: int32 [requests, k], the last k tokens of each row of a decode step, which are to be verified.

        Raises:
            ValueError: The rows do not fit the step, or the model returns something else than the runner
                takes.
        """
        count = sum(len(row.token_ids) for row in rows)
        arguments = self._arguments(rows, step, sampling_params, logit_mask)
        if all_positions:
            arguments["sampling_positions"] = torch.arange(count)
            arguments["sampling_params"] = sampling_params
        real = count if all_positions else len(rows)
        padded = len(arguments["sampling_positions"])
        if drafts is not None:
            arguments["spec_decode_metadata"] = _spec_decode_metadata(drafts, step)
            if sampling_params is not None:
                each = _padded(sampling_params, step.bucket, 0.0)
                arguments["sampling_params"] = each.repeat_interleave(1 + step.num_drafts, dim=0)  # type: ignore[union-attr]
            if self.samples_on_device:
                padded = step.bucket
            else:
                real = count
        with torch.no_grad():
            output = self._run(arguments, step)
        if not self.aux_layers:
            return self._result(output, padded, real)
        output, aux = self._without_aux(output, step.num_tokens)
        return replace(self._result(output, padded, real), aux_hidden_states=aux[:count])

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
            logit_mask: bool [requests, V or V/TP].
        """
        num_requests = 1 if step.is_prefill else step.bucket
        blocks = [1 + column % (num_blocks - 1) for column in range(_num_blocks(step))]
        longest = step.context_len or step.max_model_len
        start = 0 if step.is_prefill else min(WARM_UP_CONTEXT, longest) - 1
        tokens = [0] * (step.bucket if step.is_prefill else 1)
        rows = [Row(tokens, start, [blocks] * len(self.groups))] * num_requests
        arguments = self._arguments(rows, step, torch.tensor([WARM_UP_SAMPLING] * num_requests), logit_mask)
        for entry in arguments["attn_metadata"].values():
            # Not widened to a multiple of 128 tokens here.
            entry["full_block_table_tensor"] = entry["full_block_table_tensor"][:, : len(blocks)].clone()
        with torch.no_grad():
            self._guarded(arguments, step)
            if self._compiled is not None:
                self._compiled(**arguments)

    def _arguments(
        self,
        rows: Sequence[Row],
        step: Step,
        sampling_params: torch.Tensor | None,
        logit_mask: torch.Tensor | None,
    ) -> dict[str, Any]:
        input_ids, positions, sampling_positions = build_tokens(rows, step)
        return {
            "input_ids": input_ids,
            "positions": positions,
            "attn_metadata": build_attn_metadata(rows, self.groups, step),
            "sampling_positions": sampling_positions,
            "sampling_params": _padded(sampling_params, len(sampling_positions), 0.0),
            "spec_decode_metadata": None,
            "rank": self._rank,
            "logit_mask": _padded(logit_mask, len(sampling_positions), True),
        }

    def _run(self, arguments: dict[str, Any], step: Step) -> Any:
        if self._compiled is None:
            return self._guarded(arguments, step)
        with torch.compiler.set_stance("fail_on_recompile"):
            return self._compiled(**arguments)

    def _guarded(self, arguments: dict[str, Any], step: Step) -> Any:
        shape = _shape(arguments)
        if shape in self._seen:
            return self.model(**arguments)
        with guard_forward() as report:
            output = self.model(**arguments)
        self._seen.add(shape)
        self.reports["prefill" if step.is_prefill else "decode", step.bucket] = report
        return output

    def _result(self, output: Any, padded: int, real: int) -> ForwardOutput:
        logits: torch.Tensor | None = None
        if self.samples_on_device and isinstance(output, tuple):
            output, logits = output
        if self.samples_on_device and isinstance(output, torch.Tensor) and output.dim() == 2:
            return ForwardOutput(output[:real].to(torch.int64), logits)  # [R, 1 + drafts], verified
        dims = 1 if self.samples_on_device else 2
        if not isinstance(output, torch.Tensor) or output.dim() != dims or output.shape[0] != padded:
            expected = f"token ids [{padded}]" if self.samples_on_device else f"logits [{padded}, vocabulary]"
            found = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            raise ValueError(f"forward must return {expected}, got {found}")
        if not self.samples_on_device:
            return ForwardOutput(None, output[:real].float())
        return ForwardOutput(output[:real].to(torch.int64), None if logits is None else logits[:real].float())


def _compile(model: nn.Module) -> Callable[..., Any]:
    """The model as the device compiles it, except that the graphs run as they are."""
    torch._dynamo.config.cache_size_limit = 2**62
    torch._dynamo.config.accumulated_cache_size_limit = 2**62
    return torch.compile(model, backend="eager", fullgraph=not envs.VLLM_NEURON_DEBUG_MODE, dynamic=False)


def _num_blocks(step: Step) -> int:
    return -(-step.max_model_len // step.block_size)


def _padded(rows: torch.Tensor | None, count: int, value: float | bool) -> torch.Tensor | None:
    if rows is None or len(rows) >= count:
        return rows
    return torch.cat([rows, torch.full((count - len(rows), rows.shape[1]), value, dtype=rows.dtype)])


def _shape(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What a graph depends on: shapes of tensors, and the values of everything else."""
    metadata = {id(entry): entry for entry in arguments["attn_metadata"].values()}
    parts: list[Any] = []
    for values in (arguments, *metadata.values()):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                parts.append((name, tuple(value.shape)))
            elif isinstance(value, int):
                parts.append((name, value))
    return tuple(parts)


def _spec_decode_metadata(drafts: torch.Tensor, step: Step) -> Any:
    """vLLM's description of the drafts of a step, with those of padding."""
    from vllm_neuron.vllm.internals import SpecDecodeMetadata

    padded = torch.zeros(step.bucket, step.num_drafts, dtype=torch.int32)
    padded[: len(drafts)] = drafts
    return SpecDecodeMetadata.make_dummy(padded.tolist(), padded.device)
