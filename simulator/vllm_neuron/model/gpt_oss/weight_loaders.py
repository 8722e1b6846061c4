"""Weight loaders of the gpt_oss model: from its checkpoint's layout to a rank's parameters."""

from typing import Any

import torch
from torch import Tensor, nn

from vllm_neuron.utils.weight_loader import SafetensorsWeightLoader


def fused_qkv_bias_loader(
    q_size: int, kv_size: int, num_shards: int, num_kv_replicas: int
) -> SafetensorsWeightLoader:
    """Loader for the 1-D biases of q, k and v: this rank's part of each, concatenated."""

    def transform(slices: list[Any], rank: int) -> Tensor:
        q, k, v = slices
        q_start = (rank % num_shards) * q_size
        kv_start = (rank % num_shards // num_kv_replicas) * kv_size
        kv_end = kv_start + kv_size
        return torch.cat((q[q_start : q_start + q_size], k[kv_start:kv_end], v[kv_start:kv_end]))

    return SafetensorsWeightLoader(transform=transform)


def expert_gate_up_loader(size: int, num_shards: int) -> SafetensorsWeightLoader:
    """Loader of this rank's gate and up projections of all experts, [E, H, 2, size].

    Slice: one tensor [E, H, 2I], gate and up columns alternating.
    """

    def transform(slices: list[Any], rank: int) -> Tensor:
        start = rank % num_shards * size
        pairs = slices[0][:, :, 2 * start : 2 * (start + size)]  # [E, H, 2*size]
        weight = torch.stack((pairs[:, :, ::2], pairs[:, :, 1::2]), dim=2)
        return nn.functional.pad(weight, (0, size - weight.shape[3]))

    return SafetensorsWeightLoader(transform)


def expert_down_loader(size: int, num_shards: int) -> SafetensorsWeightLoader:
    """Loader of this rank's down projections of all experts, [E, size, H].

    Slice: one tensor [E, I, H].
    """

    def transform(slices: list[Any], rank: int) -> Tensor:
        start = rank % num_shards * size
        weight = slices[0][:, start : start + size]
        return nn.functional.pad(weight, (0, 0, 0, size - weight.shape[1]))

    return SafetensorsWeightLoader(transform)


def expert_gate_up_bias_loader(size: int, num_shards: int) -> SafetensorsWeightLoader:
    """Loader of this rank's gate and up biases of all experts, [E, 2, size]; 1 is added to the up bias.

    Slice: one tensor [E, 2I], gate and up alternating.
    """

    def transform(slices: list[Any], rank: int) -> Tensor:
        start = rank % num_shards * size
        pairs = slices[0][:, 2 * start : 2 * (start + size)]  # [E, 2*size]
        bias = torch.stack((pairs[:, ::2], pairs[:, 1::2]), dim=1)
        bias = nn.functional.pad(bias, (0, size - bias.shape[2]))
        return bias.float() + torch.tensor([[0.0], [1.0]])

    return SafetensorsWeightLoader(transform)
