"""Weight loaders of the qwen3_moe model: from its checkpoint's layout to a rank's parameters."""

from typing import Any

import torch
from torch import Tensor

from vllm_neuron.utils.weight_loader import SafetensorsWeightLoader


def expert_gate_up_loader(size: int, num_shards: int) -> SafetensorsWeightLoader:
    """Loader of this rank's gate and up projections of all experts, [E, H, 2, size].

    Slices: gate [I, H] of every expert, then up [I, H] of every expert.
    """

    def transform(slices: list[Any], rank: int) -> Tensor:
        start = rank % num_shards * size
        parts = [source[start : start + size].T for source in slices]  # [H, size] each
        gate, up = torch.stack(parts).chunk(2)
        return torch.stack((gate, up), dim=2)

    return SafetensorsWeightLoader(transform)


def expert_down_loader(size: int, num_shards: int) -> SafetensorsWeightLoader:
    """Loader of this rank's down projections of all experts, [E, size, H].

    Slices: down [H, I] of every expert.
    """

    def transform(slices: list[Any], rank: int) -> Tensor:
        start = rank % num_shards * size
        return torch.stack([source[:, start : start + size].T for source in slices])

    return SafetensorsWeightLoader(transform)
