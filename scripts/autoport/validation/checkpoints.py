"""Which checkpoint a smoke or serving test loads: the port's source where it fits the machine, else its twin."""

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoport.codegen.document import default_tp_size
from autoport.errors import refuse
from autoport.port_state import Port
from autoport.research.checkpoint import read_checkpoint
from autoport.research.source import open_source
from autoport.schema.facts import Checkpoint, Facts
from autoport.schema.plan import Plan
from autoport.validation.backends import Backend
from autoport.validation.shrink import TP_SIZES, shrink
from autoport.validation.twin import build
from autoport.validation.twin_tokenizer import write_tokenizer

SOURCE_LIMIT_BYTES = 4_000_000_000  # of weights; on a CPU more takes minutes a token
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
FOLDER = "serve"  # in the port's state folder
SEED = 0

TwinDtype = Literal["float32", "bfloat16"]


class Chosen(msgspec.Struct, frozen=True):
    """A checkpoint to run.

    Attributes:
        kind: ``"twin"`` has random weights: its text means nothing, so it is not judged.
        why: Reason for the twin, empty for the source.
        max_model_len: Longest context in tokens that the config allows.
        dtype: The config's, e.g. ``"float32"``.
    """

    kind: Literal["source", "twin"]
    path: str
    why: str
    tp_size: int
    max_model_len: int
    vocab_size: int
    dtype: str

    @property
    def is_random(self) -> bool:
        return self.kind == "twin"

    def __str__(self) -> str:
        if self.is_random:
            return f"tiny twin with random weights and a tokenizer made for it ({self.why})"
        return f"source checkpoint {self.path}"


def choose(port: Port, backend: Backend, tp_size: int | None, twin_dtype: TwinDtype) -> Chosen:
    """Choose and, for a twin, build the checkpoint.

    On a device or in CPU mode it is the source, at the recommended TP size. The simulator takes the source
    when its weights are under `SOURCE_LIMIT_BYTES` and it has a tokenizer.

    Args:
        tp_size: Ranks; None for the recommended number, or the largest that fits the simulator.
        twin_dtype: Of a twin; in float32 answers can be compared token by token.

    Raises:
        Refusal: PORT-ORDER, SMOKE-TP for a size that the plan rules out, CKPT-CHANGED (or what research
            refuses) when the source is not what it was in Step 1.
    """
    plan = port.read_state("plan.json", Plan, "analyze")
    facts = port.read_state("facts.json", Facts, "research")
    checkpoint = port.read_state("checkpoint.json", Checkpoint, "research")
    why = why_not_source(plan.source, checkpoint) if backend.is_simulated else ""
    chosen_tp = _tp_size(plan, tp_size, backend, bool(why))
    value = {name: fact.value for name, fact in facts.fields.items()}
    if not why:
        check_unchanged(plan.source, checkpoint)
        return Chosen(
            "source",
            plan.source,
            "",
            chosen_tp,
            value["max_position_embeddings"],
            value["vocab_size"],
            plan.architecture.dtype,
        )
    config, folder = build_twin(facts, port.state_dir, twin_dtype)
    return Chosen(
        "twin",
        str(folder),
        why,
        chosen_tp,
        config["max_position_embeddings"],
        config["vocab_size"],
        twin_dtype,
    )


def why_not_source(source: str, checkpoint: Checkpoint) -> str:
    """Why the simulator does not take the source; empty when it does."""
    if checkpoint.total_bytes > SOURCE_LIMIT_BYTES:
        return f"the source has {checkpoint.total_bytes / 1e9:.1f} GB of weights"
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if checkpoint.total_bytes * 2 > free:
        return f"the source's weights need more than half of the {free / 1e9:.1f} GB of free memory"
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return "the source has no tokenizer"
    return ""


def check_unchanged(source: str, recorded: Checkpoint) -> None:
    """Read the headers again: files that are gone or changed since Step 1 would fail deep in the engine.

    Raises:
        Refusal: CKPT-CHANGED, or what reading the headers refuses.
    """
    if not Path(source).is_dir():
        return
    found = read_checkpoint(open_source(source))
    different = sorted(
        key
        for key in recorded.tensors.keys() | found.tensors.keys()
        if recorded.tensors.get(key) != found.tensors.get(key)
    )
    if different:
        raise refuse(
            "CKPT-CHANGED",
            f"{len(different)} tensors are not as Step 1 found them, e.g. {different[0]}",
            source,
            "restore the checkpoint, or run 'autoport port' again",
        )


def build_twin(facts: Facts, state_dir: Path, dtype: TwinDtype) -> tuple[dict[str, Any], Path]:
    """Build the twin with a tokenizer."""
    folder = state_dir / FOLDER / "twin"
    part = folder.with_name("twin.part")
    for old in (folder, part):
        shutil.rmtree(old, ignore_errors=True)
    config = shrink(facts)
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = dtype
    build(config, part, SEED)
    write_tokenizer(part, config)
    return config, part.replace(folder)


def _tp_size(plan: Plan, wanted: int | None, backend: Backend, twin: bool) -> int:
    broken = {candidate.tp_size: candidate.violations for candidate in plan.tp.candidates}
    if wanted is not None:
        reasons = [v.text for v in broken.get(wanted, []) if v.rule != "MEM" or not twin]
        if wanted not in broken or reasons or (twin and wanted not in TP_SIZES):
            text = "; ".join(reasons) or "not among the plan's sizes, or more than a twin is made for"
            raise refuse("SMOKE-TP", f"TP {wanted}: {text}", "option --tp", "see 'autoport compute-tp'")
        return wanted
    recommended = default_tp_size(plan)
    if not backend.is_simulated:
        return recommended
    cores = len(os.sched_getaffinity(0))
    possible = [
        size
        for size in TP_SIZES
        if size <= max(cores, 1) and not [v for v in broken.get(size, []) if v.rule not in ("MEM", "R2")]
    ]
    even = [size for size in possible if not [v for v in broken.get(size, []) if v.rule == "R2"]]
    fitting = [size for size in even if size <= recommended] or even or possible
    return max(fitting, default=1)
