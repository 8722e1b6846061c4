"""Token embeddings split over the ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

from vllm_neuron.nn.sharding import resolve_group, take_shard
from vllm_neuron.utils.weight_loader import set_weight_loader, sharding_weight_loader


class VocabDimShardedEmbedding(nn.Module):
    """Embedding with its rows split over the ranks.

    `weight` is [ceil(vocab_size / tp), embed_dim]; rows beyond the vocabulary are zero.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.tp_group, self.tp_size, self.tp_rank = resolve_group(tp_group)
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.vocab_size_per_rank = -(-vocab_size // self.tp_size)
        self.vocab_start_idx = self.tp_rank * self.vocab_size_per_rank
        self.vocab_end_idx = min(self.vocab_start_idx + self.vocab_size_per_rank, vocab_size)
        self.actual_vocab_size_per_rank = max(self.vocab_end_idx - self.vocab_start_idx, 0)

        self.weight = nn.Parameter(
            torch.empty(self.vocab_size_per_rank, embed_dim, device=device, dtype=dtype)
        )
        set_weight_loader(
            self.weight, sharding_weight_loader(0, self.vocab_size_per_rank, self.tp_size, pad_shard=True)
        )

    def forward(
        self, input: torch.Tensor, scatter_tokens: bool = True, rank: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embed `input` [T].

        Args:
            scatter_tokens: Reduce-scatter, so that each rank keeps T / tp tokens (sequence parallelism);
                otherwise all-reduce.
            rank: This rank as a tensor (0-dim or [1]), to keep it out of the compiled graph as a constant.

        Returns:
            [T / tp, embed_dim] with `scatter_tokens`, else [T, embed_dim]. Unknown ids give zeros.

        Raises:
            ValueError: `input` is not 1-D.
            AssertionError: T does not divide by the group size (with `scatter_tokens`).
        """
        if input.dim() != 1:
            raise ValueError(f"input must be 1-D [T], got {tuple(input.shape)}")
        if scatter_tokens:
            assert input.shape[0] % self.tp_size == 0, (
                f"number of tokens ({input.shape[0]}) must be divisible by tp_size ({self.tp_size})"
            )
        start = self.vocab_start_idx if rank is None else rank.to(torch.int64) * self.vocab_size_per_rank
        local_ids = input.to(torch.int64) - start  # [T]
        outside = (local_ids < 0) | (local_ids >= self.vocab_size_per_rank)
        local = F.embedding(local_ids.masked_fill(outside, 0), self.weight)  # [T, E]
        local = local.masked_fill(outside.unsqueeze(1), 0)
        if self.tp_size == 1:
            return local
        if scatter_tokens:
            return reduce_scatter_tensor(local, "sum", 0, self.tp_group)  # [T / tp, E]
        dist.all_reduce(local, group=self.tp_group)
        return local

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        take_shard(state_dict, prefix + "weight", self.weight, 0, self.tp_rank)
        super()._load_from_state_dict(state_dict, prefix, *args)


class EmbedDimShardedEmbedding(nn.Module):
    """Embedding with its columns split over the ranks. `weight` is [vocab_size, ceil(embed_dim / tp)]."""

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.tp_group, self.tp_size, self.tp_rank = resolve_group(tp_group)
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.embed_dim_per_rank = -(-embed_dim // self.tp_size)

        self.weight = nn.Parameter(
            torch.empty(vocab_size, self.embed_dim_per_rank, device=device, dtype=dtype)
        )
        set_weight_loader(
            self.weight, sharding_weight_loader(1, self.embed_dim_per_rank, self.tp_size, pad_shard=True)
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Embed `input` [T]; returns [T, embed_dim] on every rank.

        Raises:
            ValueError: `input` is not 1-D.
        """
        if input.dim() != 1:
            raise ValueError(f"input must be 1-D [T], got {tuple(input.shape)}")
        local = F.embedding(input, self.weight)  # [T, ceil(E / tp)]
        if self.tp_size == 1:
            return local
        return all_gather_tensor(local, 1, self.tp_group)[:, : self.embed_dim]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        take_shard(state_dict, prefix + "weight", self.weight, 1, self.tp_rank)
        super()._load_from_state_dict(state_dict, prefix, *args)
