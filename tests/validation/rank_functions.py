"""Functions that tests run in rank processes (they are imported by name there)."""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from autoport.validation.simulated import activate_port, load_port

BLOCK_SIZE, MAX_MODEL_LEN = 32, 128  # tokens


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


def start(rank):
    """The process that this one was forked from, and what it had imported."""
    return os.getppid(), {"torch", "transformers", "vllm"} & sys.modules.keys()


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


def drafted(rank, runs, prompts, states, taken, count):
    """Tokens and logits [count, requests, draft vocabulary] of each prefill, then of one decode step, by run.

    Args:
        runs: By name: port, checkpoint, dtype; all of one workspace.
        prompts: Tokens of each request; the last `taken` tokens are of the decode step.
        states: Hidden states of the target [tokens, 3 * H] for each.
    """
    activate_port(rank, next(iter(runs.values()))[0])
    from vllm_neuron.simulator.metadata import Row, Step

    prefill = Step(True, 64, BLOCK_SIZE, MAX_MODEL_LEN)
    decode = Step(False, len(prompts), BLOCK_SIZE, MAX_MODEL_LEN, num_drafts=taken - 1)
    results = {}
    for name, (subject, checkpoint, dtype) in runs.items():
        drafter = load_drafter(subject, checkpoint, dtype, 5, count)
        found, rows, parts = [], [], []
        for index, (ids, state) in enumerate(zip(prompts, states, strict=True)):
            blocks, end = [[3 + 8 * index, 1 + 8 * index, 2 + 8 * index, 4 + 8 * index]], len(ids) - taken
            state = state.to(getattr(torch, dtype))
            found.append(drafter.propose([Row(ids[:end], 0, blocks)], prefill, state[:end], [end]))
            rows.append(Row(ids[end:], end, blocks))
            parts.append(state[end:])
        accepted = [taken - index for index in range(len(rows))]
        results[name] = [*found, drafter.propose(rows, decode, torch.cat(parts), accepted)]
    return results


def load_drafter(subject, checkpoint, dtype, num_target_layers, count):
    from transformers import LlamaConfig
    from vllm_neuron.model.neuron_config import NeuronConfig
    from vllm_neuron.simulator.drafter import Drafter, load_draft
    from vllm_neuron.simulator.loading import allocate_kv_caches, make_vllm_config

    module = importlib.import_module(f"{subject.package}.model.{subject.name}")
    config = LlamaConfig(**json.loads((Path(checkpoint) / "config.json").read_text()))
    config.dtype = getattr(torch, dtype)
    model = load_draft(
        module.Eagle3LlamaForCausalLM,
        config,
        NeuronConfig.from_dict({}),
        checkpoint,
        make_vllm_config(config, checkpoint, config.dtype, BLOCK_SIZE, MAX_MODEL_LEN),
        num_target_layers=num_target_layers,
        num_speculative_tokens=count,
    )
    model.bind_kv_cache(allocate_kv_caches(model.get_kv_spec(), 20, BLOCK_SIZE, config.dtype))
    return Drafter(model)
