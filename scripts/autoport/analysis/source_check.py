"""What the modeling file was read to compute against what the port will compute; they must be the same."""

from collections.abc import Iterator
from typing import Any

from autoport.errors import Problem
from autoport.families.family import Family, names_read
from autoport.research.modeling.traits import QK_NORMS
from autoport.schema.architecture import Architecture, Norm
from autoport.schema.facts import Facts, Finding

NEXT_STEP = "read the place; the declaration of this class or the reading of its file has to be corrected"


Conflict = tuple[Finding, str]


def source_problems(facts: Facts, family: Family, architecture: Architecture) -> list[Problem]:
    """One problem (SOURCE-CONFLICT) for each finding that the plan contradicts or leaves out."""
    found = source_conflicts(facts, family, architecture)
    return [Problem("SOURCE-CONFLICT", text, finding.where, NEXT_STEP) for finding, text in found]


def source_conflicts(facts: Facts, family: Family, architecture: Architecture) -> list[Conflict]:
    """Each finding that the plan contradicts or leaves out, and what is wrong."""
    return [
        *_norm_conflicts(facts, architecture),
        *_rope_conflicts(facts, architecture),
        *_block_conflicts(facts, architecture),
        *_attention_conflicts(facts, architecture),
        *_left_out(facts, family),
    ]


def _of(facts: Facts, topic: str) -> list[Finding]:
    return [finding for finding in facts.modeling.findings if finding.topic == topic]


def _norm_conflicts(facts: Facts, architecture: Architecture) -> Iterator[Conflict]:
    """The norms of the decoder layer that the forward was seen to use, and those of queries and keys."""
    used = {
        f"{block.subject}.{name}" for block in _of(facts, "block") for name in block.value.get("norms", [])
    }
    by_subject: dict[str, list[Conflict]] = {}
    for finding in _of(facts, "norm"):
        attribute = finding.subject.rpartition(".")[2]
        qk_norm = architecture.attention.qk_norm if attribute in QK_NORMS else None
        norm = qk_norm.norm if qk_norm else architecture.norm if finding.subject in used else None
        if norm is not None:
            by_subject.setdefault(finding.subject, []).append((finding, _norm_conflict(finding, norm)))
    for conflicts in by_subject.values():
        if all(text for _, text in conflicts):  # the class may choose between several
            yield conflicts[0]


def _norm_conflict(finding: Finding, norm: Norm) -> str:
    read = finding.value
    planned: dict[str, Any] = {"kind": norm.kind, "weight": norm.weight}
    if norm.weight != "none" and read["rounding"] != "once":
        planned["rounding"] = norm.rounding
    differing = [name for name, value in planned.items() if read[name] != value]
    differing = [name for name in differing if not str(read[name]).startswith("plain if")]
    return "; ".join(f"{finding.subject} has {n} {read[n]!r}, the plan has {planned[n]!r}" for n in differing)


def _rope_conflicts(facts: Facts, architecture: Architecture) -> Iterator[Conflict]:
    ropes = [architecture.rope, *architecture.ropes.values()]
    planned = {(rope.pairing, rope.sign) for rope in ropes if rope is not None}
    findings = _of(facts, "rope")
    read = {(finding.value["pairing"], finding.value["sign"]) for finding in findings}
    if planned and read and not planned <= read:
        (pairing, sign) = next(iter(planned - read))
        text = f"{findings[0].subject} rotates {sorted(read)}, the plan has {pairing!r} with sign {sign}"
        yield findings[0], text


def _block_conflicts(facts: Facts, architecture: Architecture) -> Iterator[Conflict]:
    findings = _of(facts, "block")
    topology = architecture.block.topology
    if findings and topology not in {finding.value["topology"] for finding in findings}:
        read = findings[0].value["topology"]
        yield findings[0], f"{findings[0].subject} is {read!r}, the plan has {topology!r}"


def _attention_conflicts(facts: Facts, architecture: Architecture) -> Iterator[Conflict]:
    attention = architecture.attention
    for finding in _of(facts, "qk_norm"):
        if attention.qk_norm is not None and attention.qk_norm.place != finding.value["place"]:
            text = f"{finding.subject} norms q and k {finding.value['place']!r}, the plan {attention.qk_norm.place!r}"
            yield finding, text
    sinks = _of(facts, "sinks")
    if attention.sinks and facts.modeling.findings and not sinks:
        yield facts.modeling.findings[0], "the plan has attention sinks, the modeling file has none"
    if sinks and not attention.sinks:
        yield sinks[0], f"{sinks[0].subject}: attention sinks, which the plan leaves out"


def _left_out(facts: Facts, family: Family) -> Iterator[Conflict]:
    """Factors that the class applies and that no part of the plan reads."""
    read = names_read(family)
    for finding in _of(facts, "scale"):
        name = finding.value["config"]
        value = facts.config.get(name)
        if name not in read and isinstance(value, (int, float)) and value not in (0, 1, True, False):
            yield finding, f"the class {finding.value['way']} by {name} {value!r}, which the plan leaves out"
