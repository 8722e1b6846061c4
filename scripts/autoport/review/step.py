"""Step 7: check the port's files against the checklists; writes review.json."""

from collections import Counter
from typing import Literal

import msgspec

import autoport.review.checks  # noqa: F401  (registers the checks)
from autoport.analysis.draft import DraftPlan
from autoport.errors import refuse
from autoport.files import read_json
from autoport.port_state import Port
from autoport.review.checklist import Rule, load_checklists
from autoport.review.finding import CHECKS, Finding, NotApplicable, NotChecked, Subject
from autoport.review.reference import reference_places
from autoport.review.source import PortSource, SourceFile
from autoport.schema.facts import Checkpoint, Facts
from autoport.schema.plan import Plan
from autoport.step import Options, Outcome

# Rules about what a draft model has not, and why.
NOT_FOR_DRAFTS = {
    "RUN-SAMPLING": "a draft model returns drafts, its target samples",
    "FILES": "a draft model has neither results nor a logit test of its own",
    "WGT-KEYS": "autoport draft compares the keys both ways before it writes anything",
    "WGT-TIED": "the head of a draft model is its own",
    "CFG-UNREAD": "autoport draft refuses what a draft's config asks and the port does not do (DRAFT-SCOPE)",
}

RuleStatus = Literal["pass", "fail", "judge", "not checked", "not applicable"]


class RuleResult(msgspec.Struct):
    """What became of one rule.

    Attributes:
        status: ``judge`` where a reader has to answer `question` at each finding; ``not checked`` where the
            check needs something that is missing; ``not applicable`` where the port has nothing of the kind.
        reason: Why it was not checked or does not apply, or what a reader lacks to judge.
        reference: Where the reference's modeling source has what `question` asks about, as ``path:line  subject``.
    """

    id: str
    checklist: str
    severity: str
    title: str
    status: RuleStatus
    findings: list[Finding] = []
    reason: str = ""
    question: str = ""
    reference: list[str] = []
    text: str = ""
    why: str = ""


class Review(msgspec.Struct):
    """review.json.

    Attributes:
        status: Red when a rule of severity ``error`` failed.
        counts: Rules by status; a failed rule of severity ``warning`` counts as ``warning``.
    """

    name: str
    status: Literal["done", "red"]
    counts: dict[str, int]
    rules: list[RuleResult]


def run(port: Port, options: Options) -> Outcome:
    """Review the port, whether it was generated or written by hand; writes review.json.

    Raises:
        Refusal: REV-NONE when there is no model folder, REV-SYNTAX for files that cannot be parsed, and
            faults of the checklists.
    """
    review = review_port(subject_of(port))
    path = port.write_state("review.json", review)
    return Outcome(
        review.status, summarize(review), data=review, files=[str(path.relative_to(port.workspace.root))]
    )


def subject_of(port: Port) -> Subject:
    folder = port.workspace.model_dir(port.name)
    if not any(folder.glob("*.py")):
        raise refuse(
            "REV-NONE",
            "there is no Python file",
            folder,
            f"write the port first: autoport port {port.name} SOURCE; models here: {_models(port)}",
        )
    root = port.workspace.root

    def state(filename: str, kind: type) -> object:
        return read_json(port.state_dir / filename, kind) if port.has_state(filename) else None

    try:
        registry = SourceFile(port.workspace.registry_path, root)
    except (OSError, SyntaxError, ValueError):
        registry = None
    return Subject(
        port.workspace,
        port.name,
        PortSource.load(folder, root),
        registry,
        plan=state("plan.json", Plan),  # type: ignore[arg-type]
        facts=state("facts.json", Facts),  # type: ignore[arg-type]
        checkpoint=state("checkpoint.json", Checkpoint),  # type: ignore[arg-type]
        unregistered=port.manifest.unregistered,
        draft=state("draft.json", DraftPlan),  # type: ignore[arg-type]
    )


def _models(port: Port) -> str:
    folders = port.workspace.registry_path.parent.glob("*/__init__.py")
    return ", ".join(sorted(path.parent.name for path in folders)) or "none"


def review_port(subject: Subject) -> Review:
    """Decide every rule of every checklist."""
    results = [
        _decide(subject, stem, rule)
        for stem, checklist in load_checklists().items()
        for rule in checklist.rules
    ]
    red = any(result.status == "fail" and result.severity == "error" for result in results)
    counts = Counter("warning" if is_warning(result) else result.status for result in results)
    return Review(subject.name, "red" if red else "done", dict(counts), results)


def is_warning(result: RuleResult) -> bool:
    return result.status == "fail" and result.severity == "warning"


def _decide(subject: Subject, checklist: str, rule: Rule) -> RuleResult:
    result = RuleResult(
        id=rule.id,
        checklist=checklist,
        severity=rule.severity,
        title=rule.title,
        status="pass",
        question=rule.question or "",
        text=rule.text,
        why=rule.why,
    )
    if subject.draft and rule.id in NOT_FOR_DRAFTS:
        result.status, result.reason = "not applicable", NOT_FOR_DRAFTS[rule.id]
        return result
    try:
        result.findings = CHECKS[rule.check](subject, **rule.parameters)
    except NotApplicable as reason:
        result.status, result.reason = "not applicable", str(reason)
        return result
    except NotChecked as reason:
        result.status, result.reason = "not checked", str(reason)
        return result
    statuses = {finding.status for finding in result.findings}
    result.status = "fail" if "fail" in statuses else "judge" if "judge" in statuses else "pass"
    if result.status == "judge" and subject.facts:
        result.reference = reference_places(subject.facts, rule.reference)
    elif result.status == "judge" and subject.draft:
        result.reason = "compare with vLLM's vllm/model_executor/models/llama_eagle3.py"
    elif result.status == "judge":
        result.reason = f"the places to compare with come from: autoport research {subject.name} SOURCE"
    return result


def summarize(review: Review) -> str:
    """One line: how many rules passed, which failed, how many are left to a reader."""
    failed = [result for result in review.rules if result.status == "fail"]
    errors = [result.id for result in failed if not is_warning(result)]
    warnings = [result.id for result in failed if is_warning(result)]
    parts = [f"{review.counts.get('pass', 0)} rules passed"]
    if errors:
        parts.append(f"{len(errors)} failed ({', '.join(errors)})")
    if warnings:
        parts.append(f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''} ({', '.join(warnings)})")
    for status, text in (("judge", "to judge"), ("not checked", "not checked")):
        if review.counts.get(status):
            parts.append(f"{review.counts[status]} {text}")
    return ", ".join(parts)
