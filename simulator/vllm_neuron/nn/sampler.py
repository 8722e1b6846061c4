"""Sampling of the next tokens on the device."""

import torch
import torch.distributed as dist
from torch import nn

import vllm_neuron.functional as NF
from vllm_neuron.model.neuron_config import OnDeviceSamplingConfig


class Sampler(nn.Module):
    """Samples from logits that are split over the vocabulary; without parameters.

    Args:
        sampling_config: Options of on-device sampling.
        process_group: The ranks that hold the vocabulary's shards; None when `logits` are whole.
    """

    def __init__(
        self, sampling_config: OnDeviceSamplingConfig, process_group: dist.ProcessGroup | None = None
    ):
        super().__init__()
        self.all_greedy = sampling_config.all_greedy
        self.max_top_k = sampling_config.max_top_k
        self.deterministic = sampling_config.deterministic
        self.capture_topk = sampling_config.capture_topk
        self.process_group = process_group
        self.all2all_group: dist.ProcessGroup | None = None
        self.gather_group: dist.ProcessGroup | None = None

    def forward(
        self,
        logits: torch.Tensor,
        sampling_params: torch.Tensor | None = None,
        logit_mask: torch.Tensor | None = None,
        tp_rank: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample one token per row.

        Args:
            logits: [B, V_local].
            sampling_params: float32 [B, 3], columns top_k, top_p, temperature; None takes -1, 1.0, 1.0.
            logit_mask: bool [B, V_local] or [B, V], True where a token is allowed.
            tp_rank: This rank as a tensor of one element.

        Returns:
            Token ids [B], int32.

        Raises:
            ValueError: The mask's width is not a multiple of V_local, or `tp_rank` is needed and missing.
        """
        if logit_mask is not None:
            mask = self._local_mask(logit_mask, logits.shape[1], tp_rank)
            logits = logits.masked_fill(~mask, float("-inf"))
        top_k: torch.Tensor | int = -1
        top_p: torch.Tensor | float = 1.0
        temperature: torch.Tensor | float = 1.0
        if sampling_params is not None:
            top_k = sampling_params[:, 0].to(torch.int32)
            top_p = sampling_params[:, 1]
            temperature = sampling_params[:, 2]
        return NF.sample(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            deterministic=self.deterministic,
            all_greedy=self.all_greedy,
            tp_group=self.process_group,
            max_top_k=self.max_top_k,
            all2all_group=self.all2all_group,
            gather_group=self.gather_group,
            tp_rank=tp_rank,
            capture_topk=self.capture_topk,
        )

    def _local_mask(self, mask: torch.Tensor, local_vocab: int, tp_rank: torch.Tensor | None) -> torch.Tensor:
        width = mask.shape[1]
        if width == local_vocab or self.process_group is None:
            return mask
        if width % local_vocab:
            raise ValueError(
                f"logit_mask width {width} is not a multiple of the local vocabulary {local_vocab}"
            )
        if tp_rank is None or tp_rank.numel() != 1:
            raise ValueError(
                "a logit_mask over the whole vocabulary needs tp_rank as a tensor of one element"
            )
        shards = mask.view(mask.shape[0], width // local_vocab, local_vocab)
        return shards.index_select(1, tp_rank.reshape(1).to(torch.int64)).squeeze(1)  # [B, V_local]
