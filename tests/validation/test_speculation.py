"""Target and draft together on the simulator: a drafted greedy run gives the tokens of a plain one."""

import pytest
import rank_functions
import torch
from autoport.analysis.draft import plan_draft
from autoport.codegen.draft import render_draft
from autoport.validation import reference
from autoport.validation.ranks import run
from autoport.validation.simulated import Subject
from drafts import DRAFT_V, PUBLISHED, tensors, write

NEW_TOKENS, COUNT = 16, 2  # tokens of a run, and drafts of a step
PROMPTS = [[5, 9, 17, 33, 2, 7], list(range(40, 90))]


@torch.no_grad()
def fitted(model, layers, vocab_size):
    """Weights of a draft whose `fc` alone gives the token after the next one, in the model's own greedy runs."""
    hidden, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    states, targets = [], []
    for prompt in PROMPTS:
        ids = prompt + reference.greedy(model, prompt, NEW_TOKENS + COUNT)
        before_norm.clear()
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        inputs = [before_norm[0] if layer == num_layers else output[layer] for layer in layers]
        states.append(torch.cat(inputs, dim=-1)[0, len(prompt) - 1 : -2])
        targets += ids[len(prompt) + 1 :]
    chosen = torch.tensor(vocabulary(targets, vocab_size))
    weights = tensors(own_embedding=False, hidden=hidden, vocab=vocab_size)
    rows = weights["lm_head.weight"][[chosen.tolist().index(token) for token in targets]]
    weights["fc.weight"] = torch.linalg.lstsq(torch.cat(states), rows, driver="gelsd").solution.T.contiguous()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"midlayer.{name}.weight"].zero_()
    weights["norm.weight"].fill_(1.0)
    return weights | {"d2t": chosen - torch.arange(DRAFT_V)}


def vocabulary(tokens, vocab_size):
    """A draft vocabulary that has these tokens."""
    others = [token for token in range(vocab_size) if token not in tokens]
    return sorted([*set(tokens), *others[: DRAFT_V - len(set(tokens))]])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_drafted_run_gives_the_tokens_of_a_plain_one(proven, tmp_path, tp_size):
    subject = proven("llama-3.2-1b")
    checkpoint, workspace = subject.prepared.checkpoint, subject.port.workspace
    model = reference.load(checkpoint, torch.float32)
    hidden, vocab, num_layers = (
        model.config.hidden_size,
        model.config.vocab_size,
        model.config.num_hidden_layers,
    )
    layers = (1, num_layers - 1, num_layers)
    config = {**PUBLISHED, "hidden_size": hidden, "vocab_size": vocab}
    drafts = {}
    for kind, weights in (
        ("fitted", fitted(model, layers, vocab)),
        ("random", tensors(own_embedding=False, hidden=hidden, vocab=vocab)),
    ):
        folder = write(tmp_path / kind, config, weights)
        package = workspace.model_dir(f"draft_{kind}")
        package.mkdir(exist_ok=True)
        for file, text in render_draft(package.name, workspace.package, plan_draft(str(folder))).items():
            (package / file).write_text(text)
        port = Subject(str(workspace.root), workspace.package, package.name, "Eagle3LlamaForCausalLM")
        drafts[kind] = port, str(folder)
    arguments = (subject.subject(workspace.root), str(checkpoint), drafts, layers, PROMPTS, NEW_TOKENS, COUNT)
    found = run(rank_functions.speculated, tp_size, *arguments, log_dir=tmp_path, timeout=300)
    few = NEW_TOKENS // 2 + 1  # at least one draft of each step is right
    for (_, kind), (plain, drafted, steps) in found.items():
        assert drafted == plain
        assert (steps <= few) == (kind == "fitted")
