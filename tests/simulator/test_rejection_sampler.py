"""Verification of drafts by what the target sampled."""

import pytest
import torch
from vllm_neuron.nn.rejection_sampler import rejection_sampler
from vllm_neuron.vllm.internals import SpecDecodeMetadata


def verify(drafts: list[list[int]], sampled: list[list[int]]) -> list[list[int]]:
    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    return rejection_sampler(metadata, torch.tensor(sampled).flatten()).tolist()


def test_tokens_are_kept_up_to_the_first_that_was_not_drafted():
    drafts = [[1, 2], [1, 2], [1, 2], [1, 2]]
    sampled = [[1, 2, 3], [1, 9, 3], [9, 2, 3], [9, 9, 9]]
    assert verify(drafts, sampled) == [[1, 2, 3], [1, 9, -1], [9, -1, -1], [9, -1, -1]]


@pytest.mark.parametrize(
    ("drafts", "sampled"), [([[1, 2], [1]], [[1, 2, 3], [1, 2, 3]]), ([[1, 2]], [[1, 2]])]
)
def test_what_does_not_fit_is_refused(drafts, sampled):
    with pytest.raises(ValueError, match="tokens for drafts"):
        verify(drafts, sampled)
