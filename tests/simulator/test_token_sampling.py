"""Masks of a grammar for a step with drafts."""

from types import SimpleNamespace

import numpy as np
from vllm_neuron.vllm.internals import GrammarOutput
from vllm_neuron.vllm.worker.sampling import build_logit_mask


def test_each_token_of_a_request_has_the_grammars_row():
    batch = SimpleNamespace(num_reqs=3, req_ids=["a", "b", "c"])
    output = SimpleNamespace(scheduled_spec_decode_tokens={"a": [1, 2], "b": [3]})
    rows = np.array([[0b0001], [0b0010], [0b0100]], dtype=np.int32)  # of c, and of b's two tokens
    mask = build_logit_mask(output, GrammarOutput(["c", "b"], rows), batch, vocab_size=4, num_drafts=2)
    allowed = [[token for token in range(4) if row[token]] for row in mask.tolist()]
    everything = [0, 1, 2, 3]
    assert allowed == [everything] * 3 + [[1], [2], everything] + [[0], everything, everything]
