"""Functions that tests run in rank processes (they are imported by name there)."""

import os
import signal
import time

import torch
from autoport.validation.simulated import activate_port, load_port


def gather(rank, text):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{rank.init_file}", rank=rank.index, world_size=rank.size
    )
    parts = [torch.zeros(1) for _ in range(rank.size)]
    dist.all_gather(parts, torch.tensor([float(rank.index)]))
    return {"text": text, "parts": torch.cat(parts), "large": torch.zeros(1_000_000)}


def raise_on_rank_1(rank):
    if rank.index == 1:
        raise ValueError("bad shape [3, 4]")
    time.sleep(60)


def die_on_rank_0(rank):
    if rank.index == 0:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang(rank, folder):
    (folder / f"pid{rank.index}").write_text(str(os.getpid()))
    print("hanging", flush=True)
    while True:
        time.sleep(60)


def pid(rank):
    return os.getpid()


def generate(rank, subject, checkpoint, prompts, new_tokens):
    activate_port(rank, subject)
    return load_port(subject, checkpoint, "float32").generate(prompts, new_tokens)


def aux_hidden_states(rank, subject, checkpoint, ids, layers, segment):
    """Hidden states [len(ids), layers * H]: prefill, and decode of the last two; by way of running."""
    activate_port(rank, subject)
    whole = {"max_model_len": 2 * segment, "num_batched_tokens_buckets": [2 * segment]}
    segmented = {"num_batched_tokens_buckets": [segment], "kv_segment_size": segment}
    found = {}
    for name, changes in (
        ("CPU sampling", {}),
        ("device sampling", {"neuron_config": {}}),
        ("segmented", segmented),
    ):
        options = whole | changes
        harness = load_port(subject, checkpoint, "float32", **options)
        harness.set_aux_hidden_state_layers(layers)
        sequence = harness.add(ids[:-2])
        parts = []
        run = harness._forward
        harness._forward = lambda *a, **k: (run(*a, **k), parts.append(harness.aux_hidden_states))[0]  # noqa: B023
        harness.prefill(sequence)
        for token in ids[-2:]:
            harness.decode([sequence], [token])
        found[name] = torch.cat(parts)
    found["default"] = torch.tensor(harness.model.get_eagle3_aux_hidden_state_layers())
    harness.model.set_aux_hidden_state_layers(())
    found["unset"] = torch.tensor(harness.model.get_eagle3_aux_hidden_state_layers())
    return found


def verified(rank, subject, checkpoint, prompts, drafts, count, on_device):
    """Greedy tokens after each of two prompts, of which `drafts` guesses some: [(tokens, steps)], and hidden states.

    Every second guess of each step's drafts is made wrong, and every third step all of them are.
    """
    activate_port(rank, subject)
    harness = load_port(subject, checkpoint, "float32", **({"neuron_config": {}} if on_device else {}))
    harness.set_aux_hidden_state_layers((1,))
    sequences = [harness.add(prompt) for prompt in prompts]
    first = [harness.prefill(sequence)[0] for sequence in sequences]
    tokens = [[int(token if on_device else token.argmax())] for token in first]
    steps, states = 0, []
    while any(len(found) <= count for found in tokens):
        guesses = []
        for found, right in zip(tokens, drafts, strict=True):
            guess = right[len(found) :][:3]
            wrong = steps % 3
            guesses.append(
                [token if place < 2 - wrong else (token + 1) % 100 for place, token in enumerate(guess)]
            )
        given = [[found[-1], *guess] for found, guess in zip(tokens, guesses, strict=True)]
        output = harness.verify(sequences, given)
        states.append(harness.aux_hidden_states)
        for index, (sequence, found) in enumerate(zip(sequences, tokens, strict=True)):
            if on_device:
                accepted = [token for token in output[index].tolist() if token >= 0]
            else:
                best = output[index].argmax(-1).tolist()
                right = 0
                while right < 3 and best[right] == guesses[index][right]:
                    right += 1
                accepted = best[: right + 1]
            harness.accept(sequence, given[index][: len(accepted)])
            found += accepted
        steps += 1
    return [(found[:count], steps) for found in tokens], states[0]
