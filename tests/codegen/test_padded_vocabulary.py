"""A padded vocabulary: ids that only fill up the last rank are never sampled, whatever the logits are."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from autoport.codegen.context import architecture_context
from autoport.codegen.generate import render_package
from plans import QWEN2, plan
from thread_ranks import Coordinator, on_ranks

VOCAB, RANKS, ROWS = 11, 4, 64  # three rows of the head on each rank, the last one of them all zeros
SHARD = -(-VOCAB // RANKS)
pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_tensor:FutureWarning")


@pytest.fixture(scope="module")
def head_class():
    """The generated model, of which only the last section is run."""
    architecture = msgspec.structs.replace(QWEN2, vocab_size=VOCAB)
    assert architecture_context(architecture)["pads_vocabulary"]
    text = render_package(plan(architecture, "odd", "Odd"), "vllm_neuron")["model.py"]
    start = text.index("# ===== Section 7")
    imports = [
        line
        for line in text[: text.index("# ===== Section 1")].splitlines()
        if line.startswith(("import ", "from ")) and "from ." not in line and not line.endswith("(")
    ]
    # what the last section does not use is not needed
    namespace = {"Metadata": dict, "OddConfig": object, "OddModel": object}
    exec("\n".join(imports) + "\n" + text[start:], namespace)
    return namespace["OddForCausalLM"]


def sampled(head_class, logits, greedy, mask=None):
    """Token ids that the ranks agree on, for whole logits [ROWS, VOCAB]."""
    from vllm_neuron.model.neuron_config import OnDeviceSamplingConfig
    from vllm_neuron.nn.sampler import Sampler

    padded = torch.nn.functional.pad(logits, (0, RANKS * SHARD - VOCAB))  # the rows of zeros give zeros
    parameters = torch.tensor([[-1.0, 1.0, 0.0 if greedy else 1.0]]).expand(len(logits), 3)

    def run(rank):
        head = head_class.__new__(head_class)
        torch.nn.Module.__init__(head)
        head.config = SimpleNamespace(vocab_size=VOCAB)
        head.tp_group, head.vocab_shard, head._gather_logits = Coordinator(rank, RANKS), SHARD, True
        part = padded[:, rank * SHARD : (rank + 1) * SHARD]
        head.model = lambda *arguments: (torch.zeros(len(logits), 1), None)
        head.lm_head = lambda hidden_states: part
        head.lm_head.out_features = RANKS * SHARD
        head.sampler = Sampler(OnDeviceSamplingConfig(all_greedy=greedy), process_group=dist.group.WORLD)
        torch.manual_seed(0)
        return head(
            torch.zeros(1),
            torch.zeros(1),
            attn_metadata={},
            sampling_positions=torch.arange(len(logits)),
            sampling_params=parameters,
            logit_mask=mask,
            rank=torch.tensor([rank]),
        )

    tokens, gathered = zip(*on_ranks(RANKS, run), strict=True)
    assert all(torch.equal(gathered[0], other) and other.shape == logits.shape for other in gathered)
    return tokens[0]


def negative():
    return -5.0 - torch.rand(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_greedy_takes_the_best_real_token(head_class, scale):
    logits = negative() * scale
    assert torch.equal(sampled(head_class, logits, greedy=True).long(), logits.argmax(1))


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_draw_is_a_real_token(head_class, scale):
    tokens = sampled(head_class, negative() * scale, greedy=False)
    assert int(tokens.max()) < VOCAB
    assert len(tokens.unique()) > 1


def test_a_mask_over_the_real_vocabulary_is_taken(head_class):
    mask = torch.zeros(ROWS, VOCAB, dtype=torch.bool)
    mask[:, 7] = True
    assert set(sampled(head_class, negative(), greedy=True, mask=mask).tolist()) == {7}


def test_without_the_mask_the_zeros_would_win(head_class, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "masked_fill", lambda self, mask, value: self)
    assert int(sampled(head_class, negative(), greedy=True).min()) >= VOCAB
