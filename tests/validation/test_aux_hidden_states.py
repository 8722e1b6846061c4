"""Hidden states that a target model gives to a drafter (Eagle3), against those of the Hugging Face class."""

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
    assert found["unset"].tolist() == [2, num_layers // 2, num_layers - 3]
