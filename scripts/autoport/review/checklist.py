"""The rules of Step 7, read from `checklists/*.yaml`."""

import functools
import inspect
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoport.errors import Problem, Refusal
from autoport.resources import checklists_dir
from autoport.review.finding import CHECKS

Severity = Literal["error", "warning"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule.

    Attributes:
        severity: A failed ``error`` turns the review red, a failed ``warning`` does not.
        why: What happens on the device, or to the output, when the rule is broken.
        check: Name of the check that decides the rule, or, with `question`, that finds the places to look at.
        parameters: Keyword arguments of the check.
        question: Set on rules of judgement: what the reader has to answer at those places.
        reference: Topics of the modeling source's findings where the reader compares (see `schema.Finding`).
    """

    id: str
    severity: Severity
    title: str
    text: str
    why: str
    check: str
    parameters: dict[str, Any] = msgspec.field(name="with", default_factory=dict)
    question: str | None = None
    reference: list[str] = []


class Checklist(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    rules: list[Rule]


@functools.cache
def load_checklists(folder: Path | None = None) -> dict[str, Checklist]:
    """Read every checklist, by file stem, in name order.

    Raises:
        Refusal: CHK-FILE for a file that is no checklist, CHK-CHECK for a rule that names an unknown check or
            gives it parameters it does not take, CHK-ID for an id used twice; all of them at once.
    """
    folder = folder or checklists_dir()
    problems: list[Problem] = []
    checklists: dict[str, Checklist] = {}
    seen: set[str] = set()
    for path in sorted(folder.glob("*.yaml")):
        try:
            checklists[path.stem] = msgspec.yaml.decode(path.read_bytes(), type=Checklist)
        except (msgspec.MsgspecError, OSError) as error:
            problems.append(
                Problem("CHK-FILE", f"cannot be read: {error}", str(path), "correct the checklist")
            )
            continue
        for rule in checklists[path.stem].rules:
            where = f"{path}: {rule.id}"
            if rule.id in seen:
                problems.append(Problem("CHK-ID", "the id is used twice", where, "give each rule its own id"))
            seen.add(rule.id)
            fault = _fault(rule)
            if fault:
                problems.append(Problem("CHK-CHECK", fault, where, f"use one of {', '.join(sorted(CHECKS))}"))
    if not checklists and not problems:
        problems.append(Problem("CHK-FILE", "no checklists", str(folder), "reinstall the bundle"))
    if problems:
        raise Refusal(*problems)
    return checklists


def _fault(rule: Rule) -> str:
    if rule.check not in CHECKS:
        return f"there is no check named {rule.check!r}"
    try:
        inspect.signature(CHECKS[rule.check]).bind(None, **rule.parameters)
    except TypeError as error:
        return f"{rule.check}: {error}"
    return ""
