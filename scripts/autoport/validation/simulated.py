"""The port's side of the proof: the scenario on the simulator, as one tensor-parallel rank sees it."""

import contextlib
import functools
import importlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from autoport.schema.proof import HardwareRecord
from autoport.validation import scenario
from autoport.validation.ranks import Explained, Rank
from autoport.validation.scenario import (
    DECODE,
    LONG,
    PREFILL,
    SAMPLING,
    SAMPLING_STEPS,
    SEGMENTED,
    SHORT,
    SPLIT,
)

if TYPE_CHECKING:
    import torch
    from vllm_neuron.simulator.harness import Harness

    from autoport.validation.port_sections import PortSections

    # Float32 [positions, vocab_size] by (phase, sequence), see `scenario.SPANS`.
    Logits = dict[tuple[str, str], torch.Tensor]

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


class Subject(msgspec.Struct, frozen=True):
    """The port that is run.

    Attributes:
        workspace: Folder that contains the plugin's package or, for a port out of tree, the port's own.
        factory: Class that ``<package>.model.<name>`` exports.
        platform: What the simulator stands for; empty for its default.
        config: Attributes that are added to the Hugging Face config.
        module: Module of the implementation that the factory has to select; empty for any.
        out_of_tree: Import name of a port out of tree, else empty.
    """

    workspace: str
    package: str
    name: str
    factory: str
    platform: str = ""
    config: dict[str, Any] = {}
    module: str = ""
    out_of_tree: str = ""


class SimulatedRun(NamedTuple):
    """What rank 0 saw.

    Attributes:
        logits: Float32 [positions, vocab_size] by (phase, sequence); all spans of the scenario.
        hardware: Device rules that were met.
        collectives: Calls in one forward by kind, for each step and bucket, e.g. ``"prefill 64"``.
    """

    logits: "Logits"
    hardware: list[HardwareRecord]
    collectives: dict[str, dict[str, int]]


def run_scenario(
    rank: Rank, subject: Subject, checkpoint: str, dtype: Dtype, sequences: dict[str, list[int]]
) -> SimulatedRun:
    """Run the port; called in a rank process.

    Args:
        checkpoint: Folder of the twin.
        sequences: Prompt and continuation of each sequence; decode is fed the continuation.

    Raises:
        Explained: The port raised, or sampled another token than its logits say; begins with the phase.
    """
    from vllm_neuron.simulator import rules

    activate_port(rank, subject)
    rules.reset()
    logits: Logits = {}
    collectives: dict[str, dict[str, int]] = {}
    load = functools.partial(load_port, subject, checkpoint, dtype)
    for run in (_single_shot, _segmented, _sampled):
        harness = run(load, sequences, logits, subject)
        collectives |= {
            f"{step} {bucket}": dict(report.collectives)
            for (step, bucket), report in harness.reports.items()
            if not harness.samples_on_device  # else the same as in the first run
        }
    return SimulatedRun(
        logits=logits,
        hardware=rules_met(),
        collectives=collectives,
    )


def rules_met() -> list[HardwareRecord]:
    """The device rules that this process met since the last reset."""
    from vllm_neuron.simulator import rules

    return [
        HardwareRecord(record.operator, record.kind, record.rule, record.message, record.count)
        for record in rules.records()
    ]


def record_sections(
    rank: Rank, subject: Subject, checkpoint: str, dtype: Dtype, sequences: dict[str, list[int]], phase: str
) -> "PortSections":
    """Run the port once more, and return what its sections give in `phase`; called in a rank process.

    When the port raises, that is what they gave before.
    """
    from autoport.validation.port_sections import Recorder

    activate_port(rank, subject)
    recorder = Recorder(sequences, is_prefill=phase != DECODE)

    def load(**options: Any) -> "Harness":
        harness = load_port(subject, checkpoint, dtype, **options)
        recorder.watch(harness)
        return harness

    runs = {PREFILL: (_single_shot,), SEGMENTED: (_segmented,), DECODE: (_single_shot, _segmented)}
    for run in runs[phase]:
        with contextlib.suppress(Explained):
            run(load, sequences, {}, subject)
    return recorder.result()


def _single_shot(
    load: "Callable[..., Harness]", sequences: dict[str, list[int]], logits: "Logits", subject: Subject
) -> "Harness":
    """Two prompts in one go each, then decode steps of both in one batch."""
    import torch

    short, long = sequences["short"], sequences["long"]
    with phase_of("load", subject):
        harness = load()
    with phase_of(PREFILL, subject):
        first = harness.add(short[: SHORT.prompt_length])
        logits[PREFILL, "short"] = harness.prefill(first)
        second = harness.add(long[: LONG.prompt_length])
        logits[PREFILL, "long"] = harness.prefill(second, all_positions=True)
    with phase_of(DECODE, subject):
        tokens = zip(short[SHORT.prompt_length :], long[LONG.prompt_length :], strict=True)
        steps = [harness.decode([first, second], pair) for pair in tokens]
        logits[DECODE, "short"], logits[DECODE, "long"] = torch.stack(steps, dim=1)
    return harness


def _segmented(
    load: "Callable[..., Harness]", sequences: dict[str, list[int]], logits: "Logits", subject: Subject
) -> "Harness":
    """One prompt in two segments, then decode steps."""
    import torch

    ids = sequences["split"]
    with phase_of("load", subject):
        harness = load(
            max_model_len=scenario.SEGMENTED_MODEL_LEN,
            num_batched_tokens_buckets=[scenario.SEGMENT_SIZE],
            kv_segment_size=scenario.SEGMENT_SIZE,
        )
    with phase_of(SEGMENTED, subject):
        sequence = harness.add(ids[: SPLIT.prompt_length])
        logits[SEGMENTED, "split"] = harness.prefill(sequence, all_positions=True)
    with phase_of(DECODE, subject):
        steps = [harness.decode([sequence], [token]) for token in ids[SPLIT.prompt_length :]]
        logits[DECODE, "split"] = torch.cat(steps)
    return harness


def _sampled(
    load: "Callable[..., Harness]", sequences: dict[str, list[int]], logits: "Logits", subject: Subject
) -> "Harness":
    """A prompt and decode steps with greedy sampling on the device; the logits come beside the tokens."""
    import torch

    ids = sequences["short"]
    with phase_of("load", subject):
        harness = load(neuron_config={})
    rows = []
    with phase_of(SAMPLING, subject):
        sequence = harness.add(ids[: SHORT.prompt_length])
        sampled = harness.prefill(sequence)
        for step in range(SAMPLING_STEPS + 1):
            if step:
                sampled = harness.decode([sequence], [ids[SHORT.prompt_length + step - 1]])
            if harness.gathered_logits is None:
                raise ValueError("no logits beside the sampled tokens, although logprobs are asked for")
            row = harness.gathered_logits[0]
            if row[sampled] < row.max():
                raise ValueError(f"sampled token {int(sampled)}, the logits say {int(row.argmax())}")
            rows.append(row)
        logits[SAMPLING, "short"] = torch.stack(rows)
    return harness


def activate_port(rank: Rank, subject: Subject) -> None:
    """Make this process a rank of the simulator, with the workspace's models laid over the simulator's."""
    from vllm_neuron.simulator.activate import activate

    if subject.platform:
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = subject.platform
    activate(rank.size, rank.index, rank.init_file)
    lay_over(subject)


def lay_over(subject: Subject) -> None:
    """Lay the workspace's models over the simulator's."""
    from vllm_neuron.simulator.overlay import overlay, overlay_package

    if subject.out_of_tree:
        overlay_package(subject.workspace, subject.out_of_tree, subject.package)
    else:
        overlay(subject.workspace, subject.package)


def read_port(subject: Subject, checkpoint: str, dtype: Dtype) -> tuple[Any, Any]:
    """The port's factory, and the Hugging Face config of a checkpoint as it meets it."""
    import torch
    from transformers import AutoConfig

    home = f"{subject.package}.model.{subject.name}"
    if subject.out_of_tree:
        home = f"{subject.out_of_tree}.factory"
    factory = getattr(importlib.import_module(home), subject.factory)
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    config.dtype = getattr(torch, dtype)
    for attribute, value in subject.config.items():
        setattr(config, attribute, value)
    return factory, config


def load_port(subject: Subject, checkpoint: str, dtype: Dtype, **options: Any) -> "Harness":
    """Load a checkpoint into the port.

    Args:
        options: Arguments of the harness in place of the scenario's (single-shot prefill, sampling off).
    """
    from vllm_neuron.simulator.harness import Harness

    factory, config = read_port(subject, checkpoint, dtype)
    defaults: dict[str, Any] = {
        "neuron_config": {"on_device_sampling_config": None},
        "max_model_len": scenario.SINGLE_SHOT_MODEL_LEN,
        "num_batched_tokens_buckets": scenario.SINGLE_SHOT_BUCKETS,
        "num_seqs_buckets": scenario.DECODE_BUCKETS,
        "block_size": scenario.BLOCK_SIZE,
        "num_blocks": scenario.NUM_BLOCKS,
    }
    harness = Harness(factory, config, checkpoint, dtype=config.dtype, **(defaults | options))
    selected = type(harness.model).__module__.rpartition(".")[2]
    if subject.module and selected != subject.module:
        raise ValueError(f"the factory selects {selected}.py, not {subject.module}.py")
    return harness


@contextlib.contextmanager
def phase_of(name: str, subject: Subject) -> Iterator[None]:
    """Say in which phase, and where in the port, an error was raised.

    Raises:
        Explained: Any error was.
    """
    try:
        yield
    except Exception as error:
        text = f"{name}: {type(error).__name__}: {' '.join(str(error).split())}"
        place = port_place(error, subject)
        raise Explained(f"{text} ({place})" if place else text) from error


def port_place(error: BaseException, subject: Subject) -> str:
    """The last line of the port's own files that the error went through: ``model.py:<line>, in <function>``."""
    folder = Path(subject.workspace).resolve() / subject.package / "model" / subject.name
    if isinstance(error, SyntaxError):
        return ""  # its message has the place
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if folder in Path(code.co_filename).parents:
            owner = frame.f_locals.get("self")
            function = f"{type(owner).__name__}.{code.co_name}" if owner is not None else code.co_name
            return f"{Path(code.co_filename).name}:{line}, in {function}"
    return ""
