"""Damaged headers and configs; shared by the tests and by the long run in benchmarks/fuzz.py."""

import contextlib
import copy
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import typer
from autoport.analysis.step import make_plan
from autoport.cli import compute_tp
from autoport.errors import Refusal
from autoport.research.checkpoint import read_checkpoint
from autoport.research.config import read_facts
from autoport.research.source import open_source
from autoport.research.step import add_modeling
from autoport.schema.facts import Checkpoint, TensorHeader
from autoport.step import Options
from checkpoints import llama_keys, small_config, write_safetensors
from published import PUBLISHED
from published_keys import keys_of

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
    config = damaged(PUBLISHED[rng.choice(list(PUBLISHED))], rng)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        facts = read_facts(open_source(str(folder)))
    except Refusal as refusal:
        check(refusal)
    else:
        msgspec.json.encode(facts)


def damaged(published: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A config with up to five of its values replaced or removed."""
    config = copy.deepcopy(published)
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
    return config


def parallel_case(folder: Path, rng: random.Random) -> None:
    """Damage a published config and print its parallel sizes: a `Refusal` or tables, nothing else."""
    config = damaged(PUBLISHED[rng.choice(list(PUBLISHED))], rng)
    (folder / "config.json").write_text(json.dumps(config))
    context = rng.choice([None, 1, 4096, 10**12, 10**30])
    options = (
        ["--json"] if rng.random() < 0.3 else rng.choice([[], ["--explain", str(rng.choice([1, 2, 3, 64]))]])
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            compute_tp.command(
                str(folder),
                relax=rng.choice([[], ["even-heads"], ["x"]]),
                context_length=context,
                batch_size=rng.choice([1, 7, 10**12]),
                instance=rng.choice(
                    ["trn2.48xlarge", "trn2.3xlarge", "trn3", "x", "trn3,devices=0", "trn3,hbm-gb=1e30"]
                ),
                lnc=rng.choice([1, 2, 3]),
                explain=int(options[1]) if options[:1] == ["--explain"] else None,
                as_json=options == ["--json"],
            )
        except Refusal as refusal:
            check(refusal)
        except typer.Exit:
            pass


PLANNED = (
    "llama-3.1-8b",
    "gemma-2-9b",
    "qwen2.5-7b",
    "phi-4",
    "falcon-40b",
    "gpt2",
    "glm-4-9b",
    "gpt-oss-20b",
    "mixtral-8x7b",
    "command-r7b",
    "smollm3-3b",
    "granite-3.1-8b",
    "minitron-4b",
    "olmo-2-7b",
)


def plan_case(folder: Path, rng: random.Random) -> None:
    """Damage a published config, and sometimes its keys, and plan it: a `Refusal` or a plan that is valid JSON."""
    name = rng.choice(PLANNED)
    config = damaged(PUBLISHED[name], rng)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        key: TensorHeader(dtype, shape, "model.safetensors", 2 * math.prod(shape))
        for key, (dtype, shape) in keys_of(name).items()
    }
    for key in rng.sample(list(tensors), rng.choice([0, 0, 1, 3])):
        header = tensors.pop(key)
        shape = rng.choice([(), (1,), (0, 2), (*header.shape, 2), header.shape[::-1]])
        tensors[rng.choice([key, f"{key}.x", key.replace("0", "99"), "layers"])] = msgspec.structs.replace(
            header, shape=shape, dtype=rng.choice(["BF16", "F32", "U8", "I64"])
        )
    checkpoint = Checkpoint(
        "fuzz", ["model.safetensors"], tensors, sum(t.num_bytes for t in tensors.values()), 0
    )
    try:
        source = open_source(str(folder))
        facts = read_facts(source)
        add_modeling(source, facts)
        msgspec.json.encode(make_plan("model", facts, checkpoint, Options()))
    except Refusal as refusal:
        check(refusal)
