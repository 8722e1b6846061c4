"""The port's shapes at the sizes of the real config: what the small twin cannot show of the device's rules."""

import math
import os
import time
from pathlib import Path

import msgspec

from autoport.analysis.device_rules import SEGMENT_SIZES
from autoport.files import write_atomic
from autoport.schema.facts import Facts
from autoport.schema.plan import Plan
from autoport.schema.proof import HardwareRecord, RealSize
from autoport.validation import ranks
from autoport.validation.shrink import with_few_layers
from autoport.validation.simulated import Subject, lay_over, phase_of, read_port, rules_met

TIME_LIMIT = 120.0  # seconds
FOLDER = "real-size"  # in the proof's folder
TOKENS = 128  # prompts are multiples of it
LONGEST_SEGMENT = 2048  # tokens


def check(subject: Subject, facts: Facts, plan: Plan, folder: Path) -> RealSize | None:
    """Run the port's forwards on the meta device at the recommended TP size; None where there is none.

    One layer of each kind is built: the others are like them.

    Args:
        folder: Where the config and the log go.
    """
    if plan.tp.recommended is None:
        return None
    started = time.monotonic()
    config = with_few_layers(facts)
    folder = folder / FOLDER
    write_atomic(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    tp_size, batch_size = plan.tp.recommended, plan.tp.batch_size
    unit = math.lcm(TOKENS, tp_size)  # the ranks split a prompt
    context = _at_most(plan.tp.context_length, unit)
    segment = _segment(context, tp_size)
    arguments = (subject, str(folder), tp_size, context, segment, batch_size)
    records: list[HardwareRecord] = []
    num_layers, failure = 0, ""
    try:
        records, num_layers = ranks.run(run_shapes, 1, *arguments, log_dir=folder, timeout=TIME_LIMIT)
    except ranks.RankError as error:
        failure = error.error
    broken = [
        f"device rule {record.operator}/{record.rule}: {record.message}"
        for record in records
        if record.kind == "error"
    ]
    return RealSize(
        tp_size=tp_size,
        num_layers=num_layers,
        context_length=context,
        segment=segment,
        batch_size=batch_size,
        hardware=records,
        seconds=round(time.monotonic() - started, 2),
        failure=failure or "; ".join(broken),
    )


def _segment(context: int, tp_size: int) -> int:
    """Tokens of a step of segmented prefill: half of the prompt at most, where the kernel has such a size.

    0 for a prompt that no size divides, and where the ranks cannot split any of the sizes.
    """
    sizes = [size for size in SEGMENT_SIZES if size <= LONGEST_SEGMENT and size % tp_size == 0]
    longer = [size for size in sizes if size < context]
    return max((size for size in longer if 2 * size <= context), default=min(longer, default=0))


def _at_most(tokens: int, unit: int) -> int:
    """The largest multiple of `unit` up to `tokens`, but not zero."""
    return max(tokens // unit, 1) * unit


def run_shapes(
    rank: ranks.Rank, subject: Subject, folder: str, tp_size: int, context: int, segment: int, num_seqs: int
) -> tuple[list[HardwareRecord], int]:
    """Run the forwards; called in a process of its own.

    Args:
        folder: Has the config.
        segment: 0 for no segmented prefill.

    Returns:
        The rules that were met, and the number of layers.

    Raises:
        Explained: The port raised; begins with what was done.
    """
    from vllm_neuron.simulator import shapes

    os.environ["VLLM_NEURON_SIM_STRICT"] = "0"  # all rules that are broken, not the first one
    shapes.activate_alone(tp_size)
    lay_over(subject)
    with phase_of("build", subject):
        factory, config = read_port(subject, folder, "bfloat16")
        model = shapes.ShapeRun(factory, config, context, segment or context, num_seqs)
    for kind in shapes.KINDS:
        if kind == shapes.SEGMENTED and not segment:
            continue
        with phase_of(kind, subject):
            model.forward(kind)
    return rules_met(), model.num_layers
