"""Prompts given as embeddings."""

import torch

from vllm_neuron.simulator import rules


@rules.operator
def merge_prompt_embeds(
    hidden_states: torch.Tensor, inputs_embeds: torch.Tensor | None, is_token_ids: torch.Tensor | None
) -> torch.Tensor:
    """Take `inputs_embeds` [T, H] where `is_token_ids` (bool [T]) is false, else `hidden_states` [T, H].

    `hidden_states` come back unchanged when either of the others is None.
    """
    if inputs_embeds is None or is_token_ids is None:
        return hidden_states
    return torch.where(is_token_ids[:, None], hidden_states, inputs_embeds.to(hidden_states.dtype))
