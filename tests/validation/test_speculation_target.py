"""The target's part of speculative decoding (Eagle3), against the Hugging Face class: hidden states, verification."""

import pytest
import rank_functions
import torch
from autoport.validation import reference
from autoport.validation.ranks import run

SEGMENT = 512  # tokens; the smallest segment of a prefill
IDS = [(7 * i + 3) % 200 for i in range(SEGMENT + 40)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_they_are_the_inputs_of_the_layers(proven, tmp_path, tp_size):
    subject = proven("llama-3.2-1b")
    checkpoint = subject.prepared.checkpoint
    model = reference.load(checkpoint, torch.float32)
    num_layers = model.config.num_hidden_layers
    layers = (0, num_layers - 1, num_layers)
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        states = model(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states
    expected = torch.cat((states[0][0], states[num_layers - 1][0], before_norm[0][0]), dim=-1)

    port = subject.subject(subject.port.workspace.root)
    arguments = (port, str(checkpoint), IDS, layers, SEGMENT)
    found = run(rank_functions.aux_hidden_states, tp_size, *arguments, log_dir=tmp_path, timeout=300)
    for way in ("CPU sampling", "device sampling", "segmented"):
        torch.testing.assert_close(found[way], expected, rtol=2e-4, atol=2e-4)
    assert found["default"].tolist() == list(layers)
    wanted = (2, num_layers // 2, num_layers - 3)
    assert found["unset"].tolist() == [max(layer, 0) for layer in wanted]


COUNT = 16  # tokens
PROMPTS = [[5, 9, 17, 33, 2, 7], list(range(40, 90))]


@pytest.mark.parametrize(("tp_size", "on_device"), [(1, False), (1, True), (2, False), (2, True)])
def test_verified_drafts_give_the_tokens_of_a_plain_run(proven, tmp_path, tp_size, on_device):
    subject = proven("llama-3.2-1b")
    checkpoint = subject.prepared.checkpoint
    model = reference.load(checkpoint, torch.float32)
    greedy = [reference.greedy(model, prompt, COUNT + 4) for prompt in PROMPTS]
    port = subject.subject(subject.port.workspace.root)
    arguments = (port, str(checkpoint), PROMPTS, greedy, COUNT, on_device)
    found, states = run(rank_functions.verified, tp_size, *arguments, log_dir=tmp_path, timeout=300)
    assert [tokens for tokens, _ in found] == [tokens[:COUNT] for tokens in greedy]
    assert found[0][1] < COUNT - 2  # steps: drafts were accepted
    with torch.no_grad():
        ids = PROMPTS[0] + greedy[0][:3]
        layers = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[:3], layers[1][0][-3:], rtol=2e-4, atol=2e-4)
