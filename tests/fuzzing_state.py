"""Damaged indexes, and damaged state, overrides and decisions of a port, read as the commands read them."""

import contextlib
import copy
import functools
import io
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from autoport.analysis import decisions
from autoport.analysis.step import run as run_analysis
from autoport.cli.analysis_report import print_analysis
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.research.checkpoint import INDEX_NAME, read_checkpoint
from autoport.research.source import open_source
from autoport.research.step import run as run_research
from autoport.step import Options
from autoport.workspace import Workspace
from checkpoints import llama_keys, small_config, write_checkpoint, write_safetensors
from fuzzing import VALUES, check

FILES = ("a.safetensors", "b.safetensors")
NAMES = [
    "../a.safetensors", "/etc/passwd", "a.safetensors/", "./a.safetensors", "", "a", "c.safetensors",
    "a\0.safetensors", "model.safetensors.index.json", "a.bin", "\ud800", "x" * 5000, ".",
]  # fmt: skip
FIELDS = [*decisions.FIELDS, decisions.TP_SIZE, decisions.REFERENCE]
TEXTS = [
    "", "=", "norm.eps", "norm.eps=", "=1", "norm..eps=1", "norm.eps=1=2", "__class__.x=1", "norm.__class__=1",
    "norm.eps=\0", "norm.eps=\ud800", "head.scale=.nan", "head.scale=.inf", "head.scale=1e999",
    "head.scale=" + "9" * 5000,
    "head.scale=0x" + "f" * 5000, "norm.eps=&a [*a]", "norm.eps=!!python/object:os.system x", "norm.eps=2001-01-01",
    "norm.eps=1:2:3", "norm.eps=" + "[" * 5000, "norm.eps=|\n x", "norm.kind=@", "norm.eps=-1", "norm.eps=0",
    "parallel.tp_size=2.0", "parallel.tp_size=true", "parallel.tp_size=0b10", "parallel.tp_size=nan",
    "reference.model=../x", "reference.model=yes", "rope.pairing=y", "attention.scale=1e-400", "rope.sign=1.0",
]  # fmt: skip


def index_case(folder: Path, rng: random.Random) -> None:
    """Damage the index of a checkpoint of two shards: a `Refusal` or a result, nothing else."""
    keys = llama_keys(small_config(num_hidden_layers=1))
    names = list(keys)
    for file, part in zip(FILES, (names[::2], names[1::2]), strict=True):
        if not (folder / file).is_file():
            write_safetensors(folder / file, {key: keys[key] for key in part})
    weights: dict[str, Any] = {key: FILES[place % 2] for place, key in enumerate(names)}
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": weights}
    for _ in range(rng.randint(0, 3)):
        part = rng.choice([index, weights, weights])
        key = rng.choice([*part, "x", "\0", "weight_map"])
        if rng.random() < 0.2:
            part.pop(key, None)
        else:
            part[key] = rng.choice([*NAMES, *VALUES])
    data = bytearray(json.dumps(rng.choice([index, index, index, index, *VALUES])).encode())
    for _ in range(rng.choice([0, 0, 1, 2])):
        data = _damaged(data, rng)
    (folder / INDEX_NAME).write_bytes(data)
    try:
        read_checkpoint(open_source(str(folder)))
    except Refusal as refusal:
        check(refusal)


def _damaged(data: bytearray, rng: random.Random) -> bytearray:
    place = rng.randrange(len(data) + 1)
    match rng.randrange(4):
        case 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        case 1:
            del data[place : place + rng.randint(1, 60)]
        case 2:
            data[place:place] = rng.choice(
                [
                    b"{",
                    b"[",
                    b'"',
                    b"\xff",
                    b"9" * 30,
                    b"9" * 400,
                    b"null",
                    b"\\ud800",
                    b"-",
                    b",",
                    b"\0",
                    b"e999",
                ]
            )
        case 3:
            del data[place:]
    return data


@functools.cache
def sound_port() -> Port:
    """A port of a small model after Steps 1 and 2, in a temporary folder that stays."""
    config = small_config()
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    port = Port(
        Workspace.create(root / "ws"),
        "fuzz",
        str(write_checkpoint(root / "model", config, llama_keys(config))),
    )
    run_research(port, Options())
    run_analysis(port, Options())
    port.save()
    return port


STATE = (
    "facts.json",
    "checkpoint.json",
    "plan.json",
    "overrides.json",
    "decisions.yaml",
    "confirmed.json",
    "port.json",
)


def state_case(folder: Path, rng: random.Random) -> None:
    """Damage what is known of a port, and analyse and print it: a `Refusal` or a result, nothing else."""
    sound = sound_port()
    workspace = folder / "ws"
    if not workspace.exists():
        shutil.copytree(sound.workspace.root, workspace)
    state = workspace / ".autoport" / "fuzz"
    shutil.rmtree(state)
    shutil.copytree(sound.state_dir, state)
    for name in rng.sample(STATE, rng.choice([1, 1, 2])):
        damage_file(state / name, rng)
    texts = [rng.choice(TEXTS) if rng.random() < 0.5 else f"{rng.choice(FIELDS)}={_value(rng)}"]
    steps = [
        lambda: (
            decisions.record(port, decisions.parse_overrides(texts, "fuzz")) if rng.random() < 0.5 else None
        ),
        lambda: decisions.record_file(port),
        lambda: run_analysis(port, Options(confirm=rng.random() < 0.3, review=True)),
        lambda: print_analysis(port),
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            port = Port(Workspace.find(workspace), "fuzz")
        except Refusal as refusal:
            check(refusal)
            return
        for step in steps:
            try:
                step()
            except Refusal as refusal:
                check(refusal)


def _value(rng: random.Random) -> str:
    value = rng.choice(
        [*VALUES, "layer", "rms", "plain", "one_plus", "half", "interleaved", 2, 4, "llama3", "qwen3"]
    )
    return yaml.safe_dump(value).splitlines()[0]


def damage_file(path: Path, rng: random.Random) -> None:
    """Replace values of a JSON file, or bytes of any; some files are not there and come to be."""
    if path.suffix == ".yaml":
        document = yaml.safe_load(path.read_text())
        given = {
            rng.choice([*FIELDS, "x", 1]): rng.choice([*VALUES, [FIELDS], "layer"])
            for _ in range(rng.randint(1, 3))
        }
        document["overrides"] = rng.choice([given, given, *VALUES])
        data = bytearray(yaml.safe_dump(rng.choice([document, document, *VALUES])).encode())
    elif path.is_file():
        document = json.loads(path.read_text())
        for _ in range(rng.randint(1, 3)):
            _replace(document, rng)
        data = bytearray(json.dumps(document).encode())
    else:
        items = [{"field": rng.choice([*FIELDS, "x"]), "value": rng.choice(VALUES), "who": "x", "when": "x"}]
        data = bytearray(json.dumps(rng.choice([items, items, *VALUES])).encode())
    if rng.random() < 0.3:
        data = _damaged(data, rng)
    path.write_bytes(data)


def _replace(document: Any, rng: random.Random) -> None:
    """Replace or remove a value somewhere below."""
    while True:
        places = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not places:
            return
        place = rng.choice(places)
        below = document[place]
        if isinstance(below, (dict, list)) and below and rng.random() < 0.8:
            document = below
            continue
        if rng.random() < 0.15:
            del document[place]
        else:
            document[place] = copy.deepcopy(rng.choice(VALUES))
        return
