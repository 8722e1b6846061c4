"""Finders for rules of judgement: they say where to look, and decide nothing."""

import ast
import re

from autoport.review.finding import Finding, NotApplicable, Subject, check, judge, passed


@check
def call_places(subject: Subject, operators: list[str], keywords: list[str]) -> list[Finding]:
    """Where a reader has to look at calls of operators, and at what these keywords are given there."""
    findings = []
    for function, call in subject.functional_calls(*operators):
        given = {item.arg: ast.unparse(item.value) for item in call.keywords if item.arg in keywords}
        text = ", ".join(f"{name}={value}" for name, value in given.items()) or "none of " + ", ".join(
            keywords
        )
        findings.append(judge(function.file.at(call), f"{subject.functional_op(function, call)}: {text}"))
    if not findings:
        raise NotApplicable(f"the forward path calls none of {', '.join(operators)}")
    return findings


@check
def class_places(subject: Subject, pattern: str) -> list[Finding]:
    """Where a reader has to look at the classes whose names match a regular expression."""
    findings = []
    for cls in subject.source.modules:
        forward = subject.source.method(cls, "forward")
        if re.search(pattern, cls.name) and forward:
            findings.append(judge(forward.file.at(forward.node), f"{cls.name}.forward"))
    if not findings:
        raise NotApplicable(f"no class of the port matches {pattern}")
    return findings


@check
def unconsumed_fields(subject: Subject) -> list[Finding]:
    """Config keys that nothing took: a reader has to say what becomes of each."""
    if subject.facts is None or not subject.facts.unconsumed:
        raise NotApplicable("no config key was left over" if subject.facts else "no facts.json")
    text = "\n".join(file.text for file in subject.source.files)
    return [
        passed(subject.facts.config_file, f"{key} is read by the port")
        if re.search(rf"\b{re.escape(key)}\b", text)
        else judge(subject.facts.config_file, f"{key} = {value!r} is read nowhere in the port")
        for key, value in subject.facts.unconsumed.items()
    ]
