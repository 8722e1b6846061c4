"""No silent defaults: a number that shapes the computation comes from the config, or nothing starts."""

import ast

from autoport.review.finding import Finding, Subject, check, failed, passed
from autoport.review.syntax import last_name, names_in, number

# Configs whose numbers are switches of the plugin or of vLLM rather than facts about the model.
NOT_THE_MODEL = {
    "neuron_config",
    "parallel_config",
    "vllm_config",
    "cache_config",
    "scheduler_config",
    "sampling_config",
}


@check
def silent_defaults(subject: Subject, flags: list[str]) -> list[Finding]:
    """``getattr(config, "x", <number>)`` and ``config.get("x", <number>)``.

    Args:
        flags: Names whose true-or-false default counts as well.
    """
    findings = []
    for file in subject.source.files:
        hits = []
        for node in ast.walk(file.tree):
            default = _default(node, flags)
            if default is not None:
                hits.append(
                    failed(
                        file.at(node),
                        f"{ast.unparse(node)} goes on with {default} when the config says nothing",
                    )
                )
        findings += hits or [passed(file.at(file.tree), "no default for a number of the config")]
    return findings


def _default(node: ast.AST, flags: list[str]) -> str | None:
    """The default of a getattr or get on a config, when it is a number or the name is one of `flags`."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 3:
        owner, name, default = node.args
    elif last_name(node.func) == "get" and len(node.args) == 2 and isinstance(node.func, ast.Attribute):
        owner, (name, default) = node.func.value, node.args
    else:
        return None
    words = names_in(owner)
    about_model = (
        any("config" in word or word.startswith("rope") for word in words) and not words & NOT_THE_MODEL
    )
    key = name.value if isinstance(name, ast.Constant) else None
    a_flag = key in flags and isinstance(default, ast.Constant) and isinstance(default.value, bool)
    if about_model and (number(default) is not None or a_flag):
        return ast.unparse(default)
    return None


@check
def dataclass_defaults(subject: Subject, allowed: list[str]) -> list[Finding]:
    """Numbers as defaults of a config dataclass's fields.

    Args:
        allowed: Names of fields that do not shape the computation.
    """
    findings = []
    for cls in subject.source.classes:
        if not any("dataclass" in ast.unparse(decorator) for decorator in cls.node.decorator_list):
            continue
        hits = [
            failed(cls.file.at(field), f"{cls.name}.{field.target.id} = {ast.unparse(field.value)}")
            for field in cls.node.body
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and field.value is not None
            and number(field.value) is not None
            and field.target.id not in allowed
        ]
        findings += hits or [passed(cls.at, f"{cls.name}: no field has a number as its default")]
    return findings or [passed(file.at(file.tree), "no config dataclass") for file in subject.source.files]
