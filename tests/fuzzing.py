"""Damaged headers and configs; shared by the tests and by the long run in benchmarks/fuzz.py."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import msgspec
from autoport.errors import Refusal
from autoport.research.checkpoint import read_checkpoint
from autoport.research.config import read_facts
from autoport.research.source import open_source
from checkpoints import llama_keys, small_config, write_safetensors
from published import PUBLISHED

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 2**64, 10**30, 1e308, 0.5, "", "x", "0", [], [0], [[]], {}, {"a": 1},
    [None] * 3, "\u0000", "../..", {"rope_type": "yarn"}, ["full_attention"], -(10**12), 10**9,
]  # fmt: skip


def check(refusal: Refusal) -> None:
    assert all(problem.next_step and problem.found and problem.where for problem in refusal.problems)


def header_case(folder: Path, rng: random.Random) -> None:
    """Damage the header of a small checkpoint and read it: a `Refusal` or a result, nothing else."""
    path = folder / "model.safetensors"
    write_safetensors(path, llama_keys(small_config(num_hidden_layers=1)))
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    sound: dict[str, Any] = json.loads(data[8 : 8 + length])
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(5)
        if kind == 0:
            data[rng.randrange(8 + length)] = rng.randrange(256)
        elif kind == 1:
            start = rng.randrange(8 + length)
            del data[start : start + rng.randint(1, 40)]
        elif kind == 2:
            start = rng.randrange(8 + length)
            data[start:start] = rng.choice(
                [b"{", b"[", b'"', b"\xff", b"9" * 30, b"null", b"\\ud800", b"-", b","]
            )
        elif kind == 3:
            data[:8] = rng.choice([0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1]).to_bytes(
                8, "little"
            )
        else:
            entries = dict(sound)
            key = rng.choice(list(entries))
            entries[key] = rng.choice(
                [*VALUES, {"dtype": "F32", "shape": rng.choice(VALUES), "data_offsets": [0, 4]}]
            )
            text = json.dumps(entries, allow_nan=True).encode(errors="replace")
            data = bytearray(len(text).to_bytes(8, "little") + text + bytes(data[8 + length :]))
            length = len(text)
        length = max(1, min(length, len(data) - 9))
    path.write_bytes(data)
    try:
        read_checkpoint(open_source(str(folder)))
    except Refusal as refusal:
        check(refusal)


def config_case(folder: Path, rng: random.Random) -> None:
    """Damage a published config and read it: a `Refusal` or facts that are valid JSON, nothing else."""
    config = copy.deepcopy(PUBLISHED[rng.choice(list(PUBLISHED))])
    for _ in range(rng.randint(1, 5)):
        part = config
        nested = [value for value in part.values() if isinstance(value, dict) and value]
        if nested and rng.random() < 0.4:
            part = rng.choice(nested)
        key = rng.choice([*part, "rope_scaling", "layer_types", "head_dim", "num_experts", "text_config"])
        if rng.random() < 0.2:
            part.pop(key, None)
        else:
            part[key] = copy.deepcopy(rng.choice(VALUES))
    (folder / "config.json").write_text(json.dumps(config))
    try:
        facts = read_facts(open_source(str(folder)))
    except Refusal as refusal:
        check(refusal)
    else:
        msgspec.json.encode(facts)
