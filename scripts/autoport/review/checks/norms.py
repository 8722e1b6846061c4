"""Normalisation: what a norm's forward does, against its name and the checkpoint."""

import ast
import re
from collections.abc import Iterator

from autoport.review.finding import Finding, NotApplicable, Subject, check, failed, judge, passed
from autoport.review.parameters import declaration
from autoport.review.source import Class
from autoport.review.syntax import last_name, names_in, walk


@check
def norm_forward(subject: Subject) -> list[Finding]:
    """A class named RMSNorm computes one, and a norm has a bias exactly when the checkpoint's has."""
    findings = []
    for cls in _norms(subject):
        centred = _centres(subject, cls)
        is_rms = "rms" in cls.name.lower()
        where = cls.at
        if is_rms and centred is not None:
            where = cls.file.at(centred)
            findings.append(failed(where, f"{cls.name} subtracts the mean, which makes it a LayerNorm"))
        elif "layernorm" in cls.name.lower() and centred is None:
            findings.append(
                failed(where, f"{cls.name} does not subtract the mean, which makes it an RMSNorm")
            )
        else:
            findings.append(
                passed(where, f"{cls.name}: {'no mean is subtracted' if centred is None else 'centred'}")
            )
        findings += _bias_in_checkpoint(subject, cls)
    if not findings:
        raise NotApplicable("the port defines no norm of its own")
    return findings


def _norms(subject: Subject) -> Iterator[Class]:
    return (cls for cls in subject.source.modules if re.search(r"norm$", cls.name, re.IGNORECASE))


def _centres(subject: Subject, cls: Class) -> ast.AST | None:
    """Where the norm subtracts the mean of its input."""
    forward = subject.source.method(cls, "forward")
    if forward is None:
        return None
    means = {
        target.id
        for node in walk(forward.node)
        if isinstance(node, ast.Assign) and _is_plain_mean(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in walk(forward.node):
        if isinstance(node, ast.Call) and last_name(node.func) in ("layer_norm", "var_mean", "var"):
            return node
        subtracted = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) else None
        if subtracted is not None and (_is_plain_mean(subtracted) or last_name(subtracted) in means):
            return node
    return None


def _is_plain_mean(node: ast.expr) -> bool:
    """``x.mean(...)`` or ``torch.mean(x)`` of a value that is not squared."""
    if not (isinstance(node, ast.Call) and last_name(node.func) == "mean"):
        return False
    text = ast.unparse(node)
    return not any(square in text for square in ("pow(", "square(", "** 2")) and "squared" not in names_in(
        node
    )


def _bias_in_checkpoint(subject: Subject, cls: Class) -> Iterator[Finding]:
    if subject.checkpoint is None:
        return
    has_bias = declaration(subject.source, cls, "bias") is not None
    biases = [key for key in subject.checkpoint.tensors if re.search(r"norm\.bias$|ln_\w+\.bias$", key)]
    if biases and not has_bias:
        yield failed(cls.at, f"{cls.name} has no bias, and the checkpoint has {biases[0]}")
    elif biases:
        yield passed(cls.at, f"{cls.name} has a bias, as the checkpoint")


@check
def norm_places(subject: Subject) -> list[Finding]:
    """Where a reader compares the norms with the reference source."""
    findings = []
    for cls in _norms(subject):
        forward = subject.source.method(cls, "forward")
        findings.append(judge(forward.file.at(forward.node) if forward else cls.at, f"{cls.name}.forward"))
    for function, call in subject.functional_calls("mlp", "qkv_proj", "attention_decode", "moe_block_tkg"):
        fused = [
            item.arg for item in call.keywords if item.arg in ("norm_type", "rmsnorm_X_enabled", "gamma")
        ]
        if fused:
            where = function.file.at(call)
            findings.append(
                judge(where, f"{subject.functional_op(function, call)} with {', '.join(map(str, fused))}")
            )
    if not findings:
        raise NotApplicable("the port has no norm of its own and fuses none")
    return findings
