"""Finders for rules of judgement: they say where to look, and decide nothing."""

import ast
import re

from autoport.review.finding import (
    NO_CONFIG,
    Finding,
    NotApplicable,
    NotChecked,
    Subject,
    check,
    judge,
    passed,
)


@check
def call_places(
    subject: Subject, operators: list[str], keywords: list[str], classes: str = ""
) -> list[Finding]:
    """Where a reader has to look at calls of operators, and at what these keywords are given there.

    Args:
        classes: Regular expression; where none of the operators is called, forwards of such classes are looked at.
    """
    findings = []
    for function, call in subject.functional_calls(*operators):
        given = {item.arg: ast.unparse(item.value) for item in call.keywords if item.arg in keywords}
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        text = text or f"none of {', '.join(keywords)}"
        findings.append(judge(function.file.at(call), f"{subject.functional_op(function, call)}: {text}"))
    if not findings and classes:
        findings = _forwards(subject, classes)
    if not findings:
        raise NotApplicable(f"the forward path calls none of {', '.join(operators)}")
    return findings


@check
def class_places(subject: Subject, pattern: str, methods: str = "") -> list[Finding]:
    """Where a reader has to look at the classes whose names match a regular expression.

    Args:
        methods: Regular expression of methods, in any class of the port, that go with them.
    """
    findings = _forwards(subject, pattern)
    if not findings:
        raise NotApplicable(f"no class of the port matches {pattern}")
    return findings + (_methods(subject, methods) if methods else [])


def _methods(subject: Subject, pattern: str) -> list[Finding]:
    return [
        judge(cls.file.at(node), f"{cls.name}.{node.name}")
        for cls in subject.source.modules
        for node in cls.node.body
        if isinstance(node, ast.FunctionDef) and re.fullmatch(pattern, node.name)
    ]


def _forwards(subject: Subject, pattern: str) -> list[Finding]:
    matching = [cls for cls in subject.source.modules if re.search(pattern, cls.name)]
    forwards = [(cls, subject.source.method(cls, "forward")) for cls in matching]
    return [
        judge(forward.file.at(forward.node), f"{cls.name}.forward") for cls, forward in forwards if forward
    ]


@check
def unconsumed_fields(subject: Subject) -> list[Finding]:
    """Config keys that nothing took: a reader has to say what becomes of each."""
    if subject.facts is None:
        raise NotChecked(NO_CONFIG.format(name=subject.name))
    if not subject.facts.unconsumed:
        raise NotApplicable("no config key was left over")
    text = "\n".join(file.text for file in subject.source.files)
    return [
        passed(subject.facts.config_file, f"{key} is read by the port")
        if re.search(rf"\b{re.escape(key)}\b", text)
        else judge(subject.facts.config_file, f"{key} = {value!r} is read nowhere in the port")
        for key, value in subject.facts.unconsumed.items()
    ]
