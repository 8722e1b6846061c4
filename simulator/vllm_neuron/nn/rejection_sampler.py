"""Verification of drafts by the tokens that the target model sampled."""

from typing import Any

import torch


def rejection_sampler(spec_decode_metadata: Any, sampled_tokens: torch.Tensor) -> torch.Tensor:
    """Keep each request's tokens up to the first draft that is not the token which was sampled in its place.

    Args:
        spec_decode_metadata: vLLM's `SpecDecodeMetadata`, with k drafts for each of B requests.
        sampled_tokens: [B * (k + 1)], sampled after a request's last token and after each of its drafts.

    Returns:
        int32 [B, k + 1]: the accepted drafts and one token more, then -1.

    Raises:
        ValueError: The requests have different numbers of drafts, or tokens and drafts do not fit.
    """
    counts = spec_decode_metadata.num_draft_tokens
    requests, drafts = len(counts), counts[0]
    if any(count != drafts for count in counts) or sampled_tokens.numel() != requests * (drafts + 1):
        raise ValueError(f"{sampled_tokens.numel()} tokens for drafts {counts}")
    sampled = sampled_tokens.view(requests, drafts + 1).to(torch.int32)
    same = sampled[:, :-1] == spec_decode_metadata.draft_token_ids.view(requests, drafts)  # [B, k]
    accepted = torch.cat((torch.ones_like(same[:, :1]), same), dim=1).cumprod(dim=1)  # [B, k + 1]
    return torch.where(accepted.bool(), sampled, torch.full_like(sampled, -1))
