"""The drafter (Eagle3) beside a target: its model, and its forwards after those of the target."""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.simulator.guards import ForwardReport
from vllm_neuron.simulator.loading import load_model
from vllm_neuron.simulator.metadata import KVGroup, Row, Step, build_attn_metadata, build_tokens
from vllm_neuron.simulator.traced import Traced


def load_draft(
    factory_class: Any,
    hf_config: Any,
    neuron_config: NeuronConfig,
    checkpoint_path: str,
    vllm_config: Any,
    *,
    num_target_layers: int,
    num_speculative_tokens: int,
    embed_tokens: nn.Module | None = None,
) -> nn.Module:
    """Build a draft model and load its weights.

    Args:
        factory_class: Class from the registry, with ``from_configs(config, start_layer_idx, neuron_config)``.
        hf_config: The draft's Hugging Face config.
        checkpoint_path: Folder or hub id that ``load_weights`` gets.
        num_target_layers: Layers of the target; the draft's are numbered after them.
        num_speculative_tokens: Drafts for each request.
        embed_tokens: The target's embedding, for a draft without one.
    """
    create = functools.partial(factory_class.from_configs, hf_config, num_target_layers)
    factory = SimpleNamespace(from_configs=lambda _, neuron_config: create(neuron_config))
    model = load_model(factory, hf_config, neuron_config, checkpoint_path, vllm_config)
    if hasattr(model, "share_embedding"):
        model.share_embedding(embed_tokens)
    model.num_speculative_tokens = num_speculative_tokens
    return model


class Drafter:
    """Calls a loaded draft model.

    Args:
        model: The draft with its KV cache bound.
        group: Which of `Row.blocks` are those of the draft's layers.
        compiled: See `Traced`.
    """

    def __init__(self, model: nn.Module, group: int = 0, compiled: bool = False):
        self.model = model
        self._group = group
        self._layers = [KVGroup(tuple(layer.name for layer in model.get_kv_spec().layers))]
        self._traced = Traced(model, compiled)
        self._rank = torch.tensor(get_tp_group().rank_in_group, dtype=torch.int32)

    @property
    def reports(self) -> dict[tuple[str, int], ForwardReport]:
        """By kind of step and bucket, what the first such forward did."""
        return self._traced.reports

    def propose(
        self, rows: Sequence[Row], step: Step, hidden_states: torch.Tensor, accepted: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts after a step of the target.

        Args:
            rows: For each request the tokens that follow those of the target's step, at its positions and blocks.
            step: The target's, but for `context_len`, which may be longer.
            hidden_states: [tokens, 3 * H] that the target gave for the rows and their padding.
            accepted: For each request how many of its tokens stay.

        Returns:
            Token ids [requests, K], and float logits [K, requests, draft vocabulary].
        """
        arguments = self._arguments(rows, step, hidden_states, accepted)
        tokens, _, logits = self._traced(_name(step), arguments)
        return tokens[: len(rows)], logits[:, : len(rows)].float()

    def warm_up(self, rows: Sequence[Row], step: Step, hidden_states: torch.Tensor) -> None:
        """Run a synthetic step of full size, so that its shapes can be run from then on."""
        lengths = [len(row.token_ids) for row in rows]
        self._traced.warm_up(_name(step), self._arguments(rows, step, hidden_states, lengths))

    def _arguments(
        self, rows: Sequence[Row], step: Step, hidden_states: torch.Tensor, accepted: Sequence[int]
    ) -> dict[str, Any]:
        input_ids, positions, _ = build_tokens(rows, step)
        own = [Row(row.token_ids, row.start, [row.blocks[self._group]]) for row in rows]
        last = [index * (1 + step.num_drafts) + count - 1 for index, count in enumerate(accepted)]
        requests = 1 if step.is_prefill else step.bucket
        return {
            "input_ids": input_ids,
            "positions": positions,
            "initial_target_hidden_states": nn.functional.pad(
                hidden_states, (0, 0, 0, step.num_tokens - len(hidden_states))
            ),
            "attn_metadata": build_attn_metadata(own, self._layers, step),
            "sampling_positions": torch.tensor([*last, *[last[-1]] * (requests - len(last))]),
            "rank": self._rank,
        }


def _name(step: Step) -> tuple[str, int]:
    kind = "prefill" if step.is_prefill else "verify" if step.num_drafts else "decode"
    return f"draft after {kind}", step.bucket
