"""Weight loading: every parameter has its checkpoint keys, every key a parameter or a reason."""

import ast
import re
from collections.abc import Iterator

from autoport.review.finding import Finding, NotApplicable, NotChecked, Subject, check, failed, judge, passed
from autoport.review.names import Mapping, matches
from autoport.review.parameters import Parameter
from autoport.review.source import Class, Function
from autoport.review.syntax import calls, dotted, keyword, last_name, names_in, walk

NO_CHECKPOINT = (
    "the checkpoint's keys are not known: no checkpoint.json (autoport research {name} SOURCE writes it)"
)
NO_LOADER = "no class of the port loads weights"
TIE_FLAG = "tie_word_embeddings"


@check
def parameters_mapped(subject: Subject) -> list[Finding]:
    """Each parameter has a mapping or a key of its own name; with a plan, exactly the planned ones exist."""
    findings: list[Finding] = []
    for head, parameters, unknown in subject.parameters:
        findings += [_mapped(subject, parameter) for parameter in parameters]
        findings += [
            judge(head.at, f"{name}: which class is it, and are its parameters mapped?") for name in unknown
        ]
        if not parameters:
            findings.append(judge(head.at, f"{head.name}: no parameters found in the constructors"))
        if subject.plan:
            findings += _against_plan(subject, head, parameters)
    if not findings:
        raise NotApplicable(NO_LOADER)
    return findings


def _mapped(subject: Subject, parameter: Parameter) -> Finding:
    entry = subject.mappings.of(parameter.name)
    if entry:
        keys = ", ".join(entry.keys[:3]) + (" ..." if len(entry.keys) > 3 else "")
        return passed(parameter.at, f"{parameter.name} <- {keys} at {entry.function.file.at(entry.node)}")
    if subject.checkpoint:
        if any(matches(parameter.name, key) for key in subject.checkpoint.tensors):
            return passed(parameter.at, f"{parameter.name} <- the key of the same name")
        return failed(
            parameter.at, f"{parameter.name}: load_weights does not map it, and no key has this name"
        )
    if subject.mappings.unread:
        function, node = subject.mappings.unread[0]
        return judge(parameter.at, f"{parameter.name}: is it mapped by the loop at {function.file.at(node)}?")
    if re.search(r"_proj_weights?$|_proj_bias$", parameter.name):
        return failed(parameter.at, f"{parameter.name}: load_weights does not map it")
    return passed(
        parameter.at, f"{parameter.name} <- the key of the same name (not checked against a checkpoint)"
    )


def _against_plan(subject: Subject, head: Class, parameters: list[Parameter]) -> Iterator[Finding]:
    assert subject.plan
    planned = {entry.parameter.replace("{i}", "{}") for entry in subject.plan.weights.entries}
    names = {parameter.name for parameter in parameters}
    for name in sorted(planned - names):
        yield failed(head.at, f"{name} is in plan.json and is no parameter of {head.name}")
    for parameter in parameters:
        if parameter.name not in planned:
            yield failed(parameter.at, f"{parameter.name} is not in plan.json")


@check
def keys_covered(subject: Subject, ignored: dict[str, str]) -> list[Finding]:
    """Each checkpoint key has a parameter or a reason, and each mapped key is in the checkpoint.

    Args:
        ignored: Regular expression over a whole key -> reason to leave it out.
    """
    if subject.checkpoint is None:
        raise NotChecked(NO_CHECKPOINT.format(name=subject.name))
    keys = list(subject.checkpoint.tensors)
    reasons = dict(ignored)
    if subject.plan:
        reasons |= {item.pattern: item.reason for item in subject.plan.weights.ignored}
    findings: list[Finding] = []
    for head, parameters, _ in subject.parameters:
        patterns = [pattern for entry in subject.mappings.entries for pattern in entry.keys]
        patterns += [parameter.name for parameter in parameters]
        regexes = [
            re.compile(".+".join(map(re.escape, pattern.split("{}")))) for pattern in dict.fromkeys(patterns)
        ]
        left_out: dict[str, int] = {}
        for key in keys:
            if not any(regex.fullmatch(key) for regex in regexes) and not any(
                re.fullmatch(r, key) for r in reasons
            ):
                name = re.sub(r"\b\d+\b", "{}", key)
                left_out[name] = left_out.get(name, 0) + 1
        load = subject.source.method(head, "load_weights")
        where = load.file.at(load.node) if load else head.at
        findings += [
            failed(where, f"{name} ({count} tensors) is loaded by nothing")
            for name, count in left_out.items()
        ]
        if not left_out:
            findings.append(passed(where, f"all {len(keys)} keys are loaded, or left out for a reason"))
    findings += [finding for entry in subject.mappings.entries for finding in _keys_exist(entry, keys)]
    if not findings:
        raise NotApplicable(NO_LOADER)
    return findings


def _keys_exist(entry: Mapping, keys: list[str]) -> Iterator[Finding]:
    """Mapped keys that no tensor has; mappings under a condition may be for other checkpoints."""
    file = entry.function.file
    if any(isinstance(node, (ast.If, ast.IfExp)) for node in file.ancestors(entry.node)):
        return
    for pattern in dict.fromkeys(entry.keys):
        regex = re.compile(".+".join(map(re.escape, pattern.split("{}"))))
        if not any(regex.fullmatch(key) for key in keys):
            yield failed(file.at(entry.node), f"{pattern} is mapped, and the checkpoint has no such key")


@check
def load_assigns(subject: Subject) -> list[Finding]:
    """`load_state_dict` gets ``assign=True``: there is nothing to copy into on the meta device."""
    findings = []
    for function, call in _load_calls(subject, "load_state_dict"):
        assign = keyword(call, "assign")
        where, text = function.file.at(call), ast.unparse(call)
        right = isinstance(assign, ast.Constant) and assign.value is True
        findings.append(passed(where, text) if right else failed(where, f"{text} has no assign=True"))
    if not findings:
        findings = [
            judge(head.at, f"{head.name}: how do weights get into the parameters?")
            for head in subject.source.heads
        ]
    if not findings:
        raise NotApplicable(NO_LOADER)
    return findings


@check
def missing_refused(subject: Subject) -> list[Finding]:
    """A loader called with ``strict=False`` only lists missing keys; the list has to be looked at."""
    findings = []
    for name in ("load_sharded_pipelined", "load_sharded"):
        for function, call in _load_calls(subject, name):
            strict = keyword(call, "strict")
            where = function.file.at(call)
            strict_ = strict is None or (isinstance(strict, ast.Constant) and strict.value is True)
            if not strict_ and "missing_keys" not in names_in(function.node):
                findings.append(failed(where, f"{ast.unparse(call)}: nobody reads missing_keys"))
            else:
                findings.append(passed(where, f"{name}: a missing key stops the run"))
    if not findings:
        raise NotApplicable("no weights are loaded through SafetensorsCheckpoint")
    return findings


def _load_calls(subject: Subject, name: str) -> Iterator[tuple[Function, ast.Call]]:
    for function in subject.source.load_path:
        for call in calls(function.node):
            if last_name(call.func) == name:
                yield function, call


@check
def tied_head(subject: Subject) -> list[Finding]:
    """A tied head is tied in the weight mapping, an untied one is not."""
    if not any("lm_head" in parameter.name for _, found, _ in subject.parameters for parameter in found):
        raise NotApplicable("no parameter of the port is named lm_head")
    tied = _is_tied(subject)
    entries = [
        entry
        for entry in subject.mappings.entries
        if any(matches(p, "lm_head.weight") for p in entry.parameters)
    ]
    embedding_keys = {
        key
        for entry in subject.mappings.entries
        if any(matches(p, "model.embed_tokens.weight") for p in entry.parameters)
        for key in entry.keys
    }
    to_embedding = [
        entry
        for entry in entries
        if embedding_keys & set(entry.keys)
        or (not embedding_keys and any("embed" in key for key in entry.keys))
    ]
    if not to_embedding:
        if tied is None:
            raise NotChecked("whether the head is tied is not known: no facts.json and no checkpoint.json")
        heads = [(head, subject.source.method(head, "load_weights")) for head in subject.source.heads]
        places = [load.file.at(load.node) if load else head.at for head, load in heads]
        if tied:
            return [
                failed(where, "the head is tied, and lm_head.weight is not mapped to the embedding")
                for where in places
            ]
        return [passed(where, "the head is not tied, and is loaded from its own key") for where in places]
    findings = []
    for entry in to_embedding:
        where = entry.function.file.at(entry.node)
        text = f"lm_head.weight <- {', '.join(entry.keys)}"
        conditional = any(
            isinstance(node, (ast.If, ast.IfExp)) and TIE_FLAG in names_in(node.test)
            for node in entry.function.file.ancestors(entry.node)
        )
        if tied or conditional:
            findings.append(passed(where, text + (f" when {TIE_FLAG}" if conditional else "")))
        elif tied is None:
            findings.append(judge(where, f"{text}: is the head tied in config.json?"))
        else:
            findings.append(failed(where, f"{text}, and the head is not tied"))
    return findings


def _is_tied(subject: Subject) -> bool | None:
    if subject.plan:
        return subject.plan.architecture.head.tied
    if subject.facts and TIE_FLAG in subject.facts.fields:
        return bool(subject.facts.fields[TIE_FLAG].value)
    if subject.checkpoint:
        return not any(key.endswith("lm_head.weight") for key in subject.checkpoint.tensors)
    return None


@check
def tied_before_load(subject: Subject) -> list[Finding]:
    """Nothing shares the embedding's parameter with the head before the weights are loaded."""
    ties = [
        (file, node)
        for file in subject.source.files
        for node in walk(file.tree)
        if isinstance(node, ast.Assign)
        and any(dotted(target).endswith("lm_head.weight") for target in node.targets)
        and "embed" in ast.unparse(node.value)
    ]
    if ties:
        text = "is undone by load_state_dict(assign=True)"
        return [failed(file.at(node), f"{ast.unparse(node)} {text}") for file, node in ties]
    return [passed(head.at, "the head has its own parameter") for head in subject.source.heads]
