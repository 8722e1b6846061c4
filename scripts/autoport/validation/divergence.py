"""Which section of a red port is the first that differs from the Hugging Face class."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from autoport.schema.proof import PhaseProof, SectionError
from autoport.validation import metrics, ranks, reference
from autoport.validation.port_sections import Event, PortSections
from autoport.validation.reference_sections import ReferenceSections
from autoport.validation.scenario import PREFILL, SAMPLING
from autoport.validation.simulated import Dtype, Subject, record_sections

if TYPE_CHECKING:
    import torch

# Float32, at every position. Sections of a correct port are at a few 1e-6; what is above this grows to more than
# the limit of the logits.
ERROR_LIMIT = 3e-5
R_LIMIT = 1.5  # bfloat16; single sections of a correct port reach 1.2
ROUNDING = 2**-8  # half a unit in the last place of bfloat16

Readings = dict[str, "list[torch.Tensor]"]  # by sequence, see `reference_sections.Captured`


def find(
    subject: Subject,
    checkpoint: Path,
    sequences: dict[str, list[int]],
    red: PhaseProof | None,
    tp_size: int,
    dtype: Dtype,
    log_dir: Path,
    timeout: float,
) -> list[SectionError]:
    """Run the port once more, and compare what every section gives in the red phase.

    Args:
        red: None when the port raises in prefill; then the sections before that are compared.

    Returns:
        The sections in the order in which the port runs them, those without a counterpart left out; last the
        head, whose output is what the proof compares.

    Raises:
        RankError: A rank died or hung.
    """
    import torch

    heads = [SectionError("head", "lm_head", None, "", red.max_relative_error, red.worst)] if red else []
    if red and red.phase == SAMPLING:
        return heads
    recorded: PortSections = ranks.run(
        record_sections,
        tp_size,
        subject,
        str(checkpoint),
        dtype,
        sequences,
        red.phase if red else PREFILL,
        log_dir=log_dir,
        timeout=timeout,
    )
    names = {row.sequence for rows in recorded.rows.values() for row in rows}
    used = {name: sequences[name] for name in names}
    expected, rounded = (
        ReferenceSections(reference.load(checkpoint, getattr(torch, kind)), recorded.mappings).run(
            recorded.rows, used
        )
        for kind in ("float32", dtype)
    )
    sections = []
    for event in recorded.rows:
        if event in expected:
            section = _compare(event, recorded, expected[event], rounded[event], dtype)
            sections += [section] if section else []
    return sections + [msgspec.structs.replace(head, where=recorded.places[""]) for head in heads]


def first_divergence(sections: list[SectionError], dtype: Dtype) -> SectionError | None:
    """The first section that differs: the head where none before it does, None where there is no head.

    Rotary embeddings count only if attention differs, too: a class may build its tables in another way.
    """
    rope = None
    for section in sections:
        if section.section == "head":
            return section
        if not _differs(section, dtype):
            continue
        if section.section != "rope":
            return rope if rope and section.section == "attention" else section
        rope = rope or section
    return None


def _differs(section: SectionError, dtype: Dtype) -> bool:
    if section.error is None:
        return True
    if dtype == "float32":
        return section.error > ERROR_LIMIT
    # The ratio says nothing where the reference itself rounds little.
    return section.error > ROUNDING and (section.r_ratio is None or section.r_ratio >= R_LIMIT)


def _compare(
    event: Event, recorded: PortSections, expected: Readings, rounded: Readings, dtype: Dtype
) -> SectionError | None:
    """The nearest reading of the reference; None when it has none of this width."""
    import torch

    rows = recorded.rows[event]
    port = torch.cat([row.values for row in rows])
    found = []
    for reading in range(min((len(expected[row.sequence]) for row in rows), default=0)):
        exact, low = (
            torch.cat([side[row.sequence][reading][row.start :][: len(row.values)] for row in rows])
            for side in (expected, rounded)
        )
        part = _leading(port, exact.shape[-1]) if event.section == "rope" else port
        if part.shape == exact.shape:
            found.append((metrics.relative_errors(part, exact), part, low, exact))
    if not found:
        return None
    errors, part, low, exact = min(found, key=lambda item: float(item[0].max()))
    worst, error = int(errors.argmax()), float(errors.max())
    places = [(row.sequence, row.start + at) for row in rows for at in range(len(row.values))]
    return SectionError(
        section=event.section,
        module=event.owner,
        layer=event.layer,
        where=recorded.places[event.owner],
        error=error if math.isfinite(error) else None,
        worst="position {1} of the {0} sequence".format(*places[worst]),
        r_ratio=metrics.r_ratio(part, low, exact).value if dtype == "bfloat16" else None,
    )


def _leading(tables: "torch.Tensor", width: int) -> "torch.Tensor":
    """Cosines and sines of the pairs that rotate; behind them stand those that do not."""
    import torch

    cos, sin = tables.chunk(2, dim=-1)
    return torch.cat((cos[:, : width // 2], sin[:, : width // 2]), dim=-1)
