"""Drafts of an engine: the draft model that its speculative configuration names, run after each step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.interfaces import supports_eagle3

from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.simulator.drafter import Drafter, load_draft
from vllm_neuron.simulator.forward import synthetic_rows
from vllm_neuron.simulator.guards import ForwardReport
from vllm_neuron.simulator.metadata import Row, Step
from vllm_neuron.utils.bucket_utils import get_bucket_for_count
from vllm_neuron.vllm.internals import KVCacheConfig
from vllm_neuron.vllm.sizes import StepSizes


class Proposer:
    """One rank's draft model.

    Args:
        target: The loaded target.

    Attributes:
        model: The draft model.
        num_drafts: Drafts for each request.
        aux_layers: Layers of the target whose inputs the draft takes.

    Raises:
        ValueError: The registry has no row for the draft's architecture, or the target hands out no hidden states.
    """

    def __init__(self, vllm_config: Any, neuron_config: NeuronConfig, target: nn.Module):
        config = vllm_config.speculative_config
        draft = config.draft_model_config
        factory, _ = draft.registry.resolve_model_cls(draft.architecture, model_config=draft)
        if not hasattr(factory, "from_configs"):
            raise ValueError(f"registry.py has no row for the draft's architecture {draft.architecture!r}")
        if not supports_eagle3(target):
            raise ValueError(
                f"{type(target).__name__} hands out no hidden states (SupportsEagle3) to draft with"
            )
        self.num_drafts: int = config.num_speculative_tokens
        self.aux_layers = (
            aux_hidden_state_layers(draft.hf_config) or target.get_eagle3_aux_hidden_state_layers()
        )
        self.model = load_draft(
            factory,
            draft.hf_config,
            neuron_config,
            draft.model,
            vllm_config,
            num_target_layers=vllm_config.model_config.get_total_num_hidden_layers(),
            num_speculative_tokens=self.num_drafts,
            embed_tokens=getattr(target.model, "embed_tokens", None),
        )
        self._states_size = len(self.aux_layers) * target.config.hidden_size
        self._states_dtype = vllm_config.model_config.dtype

    def start(self, kv_cache_config: KVCacheConfig, compiled: bool) -> None:
        """Get ready to draft; the KV cache is bound."""
        own = {layer.name for layer in self.model.get_kv_spec().layers}
        (self._group,) = (
            index
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if own & set(group.layer_names)
        )
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        self._drafter = Drafter(self.model, self._group, compiled)

    @property
    def reports(self) -> dict[tuple[str, int], ForwardReport]:
        return self._drafter.reports

    def warm_up(self, step: Step, num_blocks: int) -> None:
        """Draft after a synthetic step of the target."""
        states = torch.zeros(step.num_tokens, self._states_size, dtype=self._states_dtype)
        self._drafter.warm_up(synthetic_rows(step, num_blocks, self._num_groups), step, states)

    def propose(
        self,
        rows: Sequence[Row],
        step: Step,
        sizes: StepSizes,
        hidden_states: torch.Tensor,
        accepted: list[int],
    ) -> list[list[int]]:
        """Drafts for each request, after a step of the target; see `Drafter.propose`."""
        if step.context_len is not None and sizes.context_buckets:
            # The drafts, too, are in the cache while the next ones are made.
            longest = max(row.start for row in rows) + step.num_drafts + 1 + self.num_drafts
            context = get_bucket_for_count(min(longest, step.max_model_len), sizes.context_buckets)
            step = replace(step, context_len=context)
        tokens, _ = self._drafter.propose(rows, step, hidden_states, accepted)
        return tokens.tolist()


def aux_hidden_state_layers(draft_config: Any) -> tuple[int, ...]:
    """The layers that a draft's config names, at the top or in ``eagle_config``; empty where it names none."""
    nested = getattr(draft_config, "eagle_config", None) or {}
    layers = getattr(draft_config, "eagle_aux_hidden_state_layer_ids", None)
    return tuple(layers or nested.get("eagle_aux_hidden_state_layer_ids") or ())
