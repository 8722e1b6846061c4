"""The port of an Eagle3 draft model, against a reference in plain torch."""

import pytest
import rank_functions
import torch
from autoport.analysis.draft import plan_draft
from autoport.codegen.draft import write_draft
from autoport.port_state import Port
from autoport.validation.ranks import run
from autoport.validation.simulated import Subject
from autoport.workspace import Workspace
from drafts import DRAFT_V, PUBLISHED, SPECULATORS, H, Reference, V, norms, tensors, write

COUNT, TAKEN = 3, 4  # drafts, and tokens of the decode step
LENGTHS = (23, 40)
IDS = [[(7 * i + 3 * length) % V for i in range(length)] for length in LENGTHS]
STATES = [torch.randn(length, 3 * H, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


NORMED = {**PUBLISHED, "fc_norm": True, "norm_output": True, "eagle_config": {"norm_before_fc": True}}
MUTATIONS = {
    "norms swapped": ("self.input_layernorm(embeds), normed), dim", "self.hidden_norm(embeds), normed), dim"),
    "halves swapped": (
        "self.input_layernorm(embeds), normed), dim",
        "normed, self.input_layernorm(embeds)), dim",
    ),
    "embedding without its norm": ("self.input_layernorm(embeds), normed", "embeds, normed"),
    "residual after the norm": ("residual, normed = hidden_states,", "residual = normed ="),
    "no fc": ("return self.fc(hidden_states)", "return hidden_states[:, : self.fc.out_features]"),
    "no last norm": ("self.lm_head(self.model.norm(hidden_states))", "self.lm_head(hidden_states)"),
    "no d2t": ("drafts = drafts + torch.index_select(self.d2t, 0, drafts)", "pass"),
    "positions stand still": ("positions = positions + 1", "pass"),
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """Checkpoint by name, and what the ports gave, by TP size and name (and dtype)."""
    folder = tmp_path_factory.mktemp("draft")
    workspace = Workspace.create(folder / "workspace")
    checkpoints = {
        "published": write(folder / "published", PUBLISHED, tensors()),
        "nested": write(folder / "nested", SPECULATORS, tensors(layer="layers.0")),
        "normed": write(folder / "normed", NORMED, tensors() | norms()),
    }
    subjects = {name: port(workspace, name, checkpoint) for name, checkpoint in checkpoints.items()}
    runs = {(name, "float32"): (subjects[name], str(checkpoints[name]), "float32") for name in checkpoints}
    runs["published", "bfloat16"] = (subjects["published"], str(checkpoints["published"]), "bfloat16")
    mutants = {}
    for index, (name, mutation) in enumerate(MUTATIONS.items()):
        mutant = port(workspace, f"mutant_{index}", checkpoints["published"])
        file = workspace.model_dir(mutant.name) / "model.py"
        assert file.read_text().count(mutation[0]) == 1
        file.write_text(file.read_text().replace(*mutation))
        mutants[name, "float32"] = mutant, str(checkpoints["published"]), "float32"
    found = {
        tp_size: run(
            rank_functions.drafted, tp_size, chosen, IDS, STATES, TAKEN, COUNT, log_dir=folder, timeout=300
        )
        for tp_size, chosen in ((1, runs | mutants), (2, runs))
    }
    return checkpoints, found


def port(workspace, name, checkpoint):
    made = Port(workspace, name, str(checkpoint))
    write_draft(made, plan_draft(made.source), replace_row=True)
    return Subject(str(workspace.root), "vllm_neuron", name, "Eagle3LlamaForCausalLM")


def references(checkpoint, dtype, found):
    """The reference's tokens and logits for each call of `rank_functions.drafted`, led by the port's drafts."""
    reference = Reference(checkpoint, dtype)
    ends = [(ids, state, len(ids) - TAKEN) for ids, state in zip(IDS, STATES, strict=True)]
    # The second request's last token is not accepted.
    ends += [
        (ids, state, len(ids) - index) for index, (ids, state) in enumerate(zip(IDS, STATES, strict=True))
    ]
    return [
        reference.drafts(ids[:end], state[:end].to(dtype), COUNT, tokens)
        for (ids, state, end), (tokens, _) in zip(ends, by_request(found), strict=True)
    ]


def by_request(found):
    """Tokens and logits [COUNT, draft vocabulary] of the two prefills, and of each request of the decode step."""
    calls = [(found[0], 0), (found[1], 0), (found[2], 0), (found[2], 1)]
    return [(tokens[index].tolist(), logits[:, index]) for (tokens, logits), index in calls]


def worst(expected, found):
    """Largest difference of logits, and whether all tokens are the same."""
    pairs = list(zip(by_request(found), expected, strict=True))
    difference = max(float((logits - right).abs().max()) for (_, logits), (_, right) in pairs)
    return difference, all(tokens == right for (tokens, _), (right, _) in pairs)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ["published", "nested", "normed"])
def test_drafts_are_the_references(drafts, name, tp_size):
    checkpoints, runs = drafts
    found = runs[tp_size][name, "float32"]
    difference, same = worst(references(checkpoints[name], torch.float32, found), found)
    assert difference < 1e-3
    assert same
    assert any(token >= DRAFT_V for tokens, _ in by_request(found) for token in tokens)  # d2t does something


@pytest.mark.parametrize("tp_size", [1, 2])
def test_bfloat16_is_as_near_as_the_reference_in_bfloat16(drafts, tp_size):
    checkpoints, runs = drafts
    found = runs[tp_size]["published", "bfloat16"]
    exact = references(checkpoints["published"], torch.float32, found)
    own = references(checkpoints["published"], torch.bfloat16, found)
    rounding = max(float((a - b).abs().max()) for (_, a), (_, b) in zip(own, exact, strict=True))
    assert worst(exact, found)[0] < 2 * rounding


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_draft_is_seen(drafts, name):
    checkpoints, runs = drafts
    found = runs[1][name, "float32"]
    difference, same = worst(references(checkpoints["published"], torch.float32, found), found)
    assert difference > 1e-2 or not same
