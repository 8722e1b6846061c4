"""Features of architectures, each in a port of a tiny checkpoint of a real class, proven at TP 2."""

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.schema.plan import Plan
from autoport.step import Options
from autoport.validation import landscape
from autoport.validation.prove import Prepared, prepare, prove_run
from autoport.validation.scenario import DECODE, PREFILL, SEGMENTED
from autoport.validation.simulated import Subject
from autoport.workspace import Workspace

# Together they have every variant of norm, block, position, projection, activation and head.
PORTED = [
    "codegen: odd vocabulary",
    "cohere2",
    "gemma3_text",
    "glm4",
    "gpt2: odd vocabulary",
    "granite_swa: multipliers",
    "llama: hidden_size an odd multiple of 128",
    "ministral3",
    "nemotron",
    "olmo3: YaRN",
    "openai-gpt",
    "phi3: LongRoPE, partial rotary",
    "phimoe: LongRoPE",
    "qwen3: windows",
    "stablelm: biases, q and k norm",
]


class Ported(msgspec.Struct):
    port: Port
    prepared: Prepared
    factory: str

    def failure(self, workspace: Path | None = None, tp_size: int = 2) -> str:
        root = workspace or self.port.workspace.root
        subject = Subject(str(root), "vllm_neuron", "subject", self.factory)
        return prove_run(subject, self.prepared, tp_size, "float32", root).failure


def make(name: str, folder: Path) -> Ported:
    source = landscape.build_checkpoint(name, folder / "checkpoint")
    port = Port(Workspace.create(folder / "workspace"), "subject", str(source))
    for step in ("research", "analyze", "generate"):
        run_step(port, step, Options(dry_run=True))
    facts = port.read_state("facts.json", Facts, "research")
    factory = port.read_state("plan.json", Plan, "analyze").architecture.hf_name
    return Ported(port, prepare(facts, port.state_dir), factory)


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ported]]:
    folder = tmp_path_factory.mktemp("features")
    yield functools.cache(lambda name: make(name, folder / re.sub(r"\W+", "-", name)))
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", PORTED)
def test_a_port_equals_its_class(ported: Callable[[str], Ported], name: str) -> None:
    assert ported(name).failure() == ""


FAULTS = {
    "short factors in a long context": (
        "phi3: LongRoPE, partial rotary",
        r'"long_factor" if self\.is_long else ',
        "",
    ),
    "long factors in a short context": (
        "phi3: LongRoPE, partial rotary",
        r' if self\.is_long else "short_factor"',
        "",
    ),
    "LongRoPE's factor of cos and sin dropped": (
        "phi3: LongRoPE, partial rotary",
        r"\* factor, freqs",
        ", freqs",
    ),
    "softcap dropped": ("gemma2", r"scores = self\.softcap \* torch\.tanh\(.+\)", "pass"),
    "window ignored": ("qwen3: windows", r"sliding_window=self\.window", "sliding_window=None"),
    "window one too long": ("mistral", r"positions - window \+ 1", "positions - window"),
    "a layer rotates that should not": (
        "smollm3",
        r"None: None, ",
        "None: self.cos_sin(self.rotary_emb, positions, metadata), ",
    ),
    "residual scale dropped": ("granite_swa: multipliers", r" \* self\.residual_scale", ""),
    "bias added on every rank": (
        "gpt2: odd vocabulary",
        r"scaled_bias_loader\(tp_size\)",
        "scaled_bias_loader(1)",
    ),
    "norm over the rank's heads only": ("olmo2", r"        self\.tp_group\.all_reduce\(squares\)\n", ""),
    "sinks dropped": ("granite_swa: multipliers", r"sink=self\.sinks\.unsqueeze\(1\),", ""),
    "position off by one": (
        "gpt2: odd vocabulary",
        r"self\.embed_positions\[positions\]",
        "self.embed_positions[positions + 1]",
    ),
    "slopes of another rank": (
        "bloom",
        r"first = self\.tp_group\.rank_in_group \* self\.num_heads",
        "first = 0",
    ),
}

BETWEEN_RANKS = {"bias added on every rank", "norm over the rank's heads only", "slopes of another rank"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_red(ported: Callable[[str], Ported], fault: str, tmp_path: Path) -> None:
    name, pattern, replacement = FAULTS[fault]
    subject = ported(name)
    folder = subject.port.workspace.model_dir("subject")
    broken = shutil.copytree(folder, tmp_path / folder.relative_to(subject.port.workspace.root))
    text, count = re.subn(pattern, replacement, (broken / "model.py").read_text())
    assert count
    (broken / "model.py").write_text(text)
    failure = subject.failure(tmp_path, tp_size=2 if fault in BETWEEN_RANKS else 1)
    assert failure.partition(":")[0] in (PREFILL, SEGMENTED, DECODE), failure


def test_dynamic_scaling_is_refused_where_it_would_begin(ported: Callable[[str], Ported]) -> None:
    subject = ported("llama: dynamic scaling")
    assert subject.failure() == ""
    path = subject.prepared.float32.checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 512}))
    assert "max_model_len 1024 (possible: up to 512" in subject.failure()
