"""Confirming the reading by running the pieces: norms, rotation and activation of transformers' own class.

The pieces run in a process of their own (`probe_worker`), because they need torch and transformers; the checkpoint's
own code is never run.
"""

import json
import subprocess
import sys
from typing import Any

import msgspec

from autoport.errors import Problem, Refusal, refuse
from autoport.modules import installed, run_module
from autoport.research.nested import find_text_config
from autoport.schema.facts import Facts, Finding

WORKER = "autoport.research.modeling.probe_worker"
LONGEST_SECONDS = 600
COMPARED = {
    "norm": ("kind", "weight", "bias", "rounding"),
    "rope": ("pairing", "sign"),
    "activation": (),
}


def probe(facts: Facts) -> list[str]:
    """Measure what the findings say, mark those that are confirmed, and return what could not be measured.

    Raises:
        Refusal: PROBE-MISSING without torch or transformers, PROBE-FAILED when the class cannot be built,
            PROBE-CONFLICT with every finding that the measurement contradicts.
    """
    if not facts.modeling.findings or "remote code" in facts.modeling.note:
        return [f"nothing to probe: {facts.modeling.note or 'no findings'}"]
    missing = [name for name in ("torch", "transformers") if not installed(name)]
    if missing:
        raise refuse(
            "PROBE-MISSING",
            f"{' and '.join(missing)} not installed",
            sys.prefix,
            "install it, or leave --probe out",
        )
    measured = _run(facts)
    problems: list[Problem] = []
    notes: list[str] = []
    findings = []
    for index, finding in enumerate(facts.modeling.findings):
        result = measured.get(str(index))
        if result is None:
            findings.append(finding)
            if finding.topic in COMPARED:
                notes.append(f"{finding.topic} {finding.subject} was not measured")
            continue
        if "absent" in result:
            findings.append(finding)
            continue
        differing = _differences(finding, result)
        problems += [
            Problem(
                "PROBE-CONFLICT",
                f"{finding.subject}: read as {name} {finding.value.get(name)!r}, measured as {result[name]!r}",
                finding.where,
                "read the place; the measurement is what the class computes",
            )
            for name in differing
        ]
        unmeasured = _unmeasured(finding, result)
        notes += [f"{finding.topic} {finding.subject}: {name} was not measured" for name in unmeasured]
        value = finding.value | {"function": result["function"]} if "function" in result else finding.value
        findings.append(msgspec.structs.replace(finding, value=value, confirmed=not unmeasured))
    if problems:
        raise Refusal(*problems)
    facts.modeling = msgspec.structs.replace(facts.modeling, findings=findings)
    return notes


def _unmeasured(finding: Finding, measured: dict[str, Any]) -> list[str]:
    """What the finding says and the measurement does not; a norm that rounds once has no order to measure."""
    said = [name for name in COMPARED.get(finding.topic, ()) if finding.value.get(name) != "once"]
    return [name for name in said if measured.get(name) is None]


def _differences(finding: Finding, measured: dict[str, Any]) -> list[str]:
    return [
        name
        for name in COMPARED.get(finding.topic, ())
        if measured.get(name) is not None and finding.value.get(name) not in (measured[name], "once")
    ]


def _run(facts: Facts) -> dict[str, Any]:
    _, text = find_text_config(facts.config)
    request = {
        "model_type": facts.model_type.value,
        "config": {key: value for key, value in text.items() if key != "auto_map"},
        "findings": [msgspec.to_builtins(finding) for finding in facts.modeling.findings],
    }
    try:
        done = run_module(WORKER, text=json.dumps(request), timeout=LONGEST_SECONDS)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise refuse(
            "PROBE-FAILED", f"{type(error).__name__}", facts.source, "run without --probe"
        ) from error
    if done.returncode or "error" in answer:
        reason = answer.get("error") or (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise refuse(
            "PROBE-FAILED",
            f"the class could not be built: {reason:.300}",
            facts.source,
            "run without --probe",
        )
    return answer
