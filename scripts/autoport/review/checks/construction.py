"""What may not be computed while the model is constructed: vLLM constructs it on the meta device."""

import ast
from collections.abc import Iterable, Iterator

from autoport.review.finding import Finding, NotApplicable, Subject, check, failed, passed
from autoport.review.source import Function, SourceFile
from autoport.review.syntax import argument, calls, dotted, keyword, last_name, walk

# Functions of torch that make or compute no tensor.
NOT_COMPUTING = {
    "device", "no_grad", "inference_mode", "compile", "finfo", "iinfo", "is_tensor", "Size", "Generator",
    "get_default_dtype", "set_default_dtype", "manual_seed", "is_grad_enabled", "set_num_threads",
}  # fmt: skip


def _tensor_calls(file: SourceFile, nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Calls of torch that make a tensor, except those that make the storage of an `nn.Parameter`."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        module, _, name = dotted(node.func).rpartition(".")
        if module == "torch" and name not in NOT_COMPUTING and not _in_parameter(file, node):
            yield node


def _in_parameter(file: SourceFile, node: ast.AST) -> bool:
    return any(
        isinstance(item, ast.Call) and last_name(item.func) == "Parameter" for item in file.ancestors(node)
    )


def _on_cpu(file: SourceFile, node: ast.AST) -> bool:
    """Whether the CPU is asked for: in the same statement, or in a ``with torch.device("cpu")`` around."""
    around = [node, *file.ancestors(node)]
    statement = next(item for item in around if isinstance(item, ast.stmt))
    if any("cpu" in ast.unparse(keyword(call, "device") or call.func) for call in calls(statement)):
        return True
    contexts = [entry.context_expr for item in around if isinstance(item, ast.With) for entry in item.items]
    return any(
        "torch.device" in ast.unparse(context) and "cpu" in ast.unparse(context) for context in contexts
    )


@check
def computed_in_constructor(subject: Subject, device: str) -> list[Finding]:
    """No tensor is made in a constructor.

    Args:
        device: ``meta`` for tensors on the device in force, ``cpu`` for those made on the CPU explicitly.
    """
    functions = subject.source.constructor_path
    if not functions:
        raise NotApplicable("no class of the port has a constructor and a forward")
    findings: dict[tuple[str, str], Finding] = {}
    for function in functions:
        for call in _tensor_calls(function.file, walk(function.node, nested=False)):
            if _on_cpu(function.file, call) == (device == "cpu"):
                where = function.file.at(call)
                text = f"{function.name}: {ast.unparse(call)} makes a tensor while the model is constructed"
                findings[where, text] = failed(where, text)
    return list(findings.values()) or _clean(functions)


def _clean(functions: list[Function]) -> list[Finding]:
    by_file: dict[str, list[Function]] = {}
    for function in functions:
        by_file.setdefault(function.file.relative, []).append(function)
    return [
        passed(
            group[0].file.at(group[0].node),
            f"no tensor is made in the {len(group)} functions that construct the model",
        )
        for group in by_file.values()
    ]


@check
def computed_at_import(subject: Subject) -> list[Finding]:
    findings = []
    for file in subject.source.files:
        nodes = (node for statement in file.tree.body for node in _outside_functions(statement))
        hits = list(_tensor_calls(file, nodes))
        findings += [
            failed(file.at(call), f"{ast.unparse(call)} makes a tensor when the file is imported")
            for call in hits
        ]
        if not hits:
            findings.append(passed(file.at(file.tree), "no tensor is made at import"))
    return findings


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run at import: module level and class bodies, but no function bodies."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_functions(child)


@check
def computed_buffers(subject: Subject) -> list[Finding]:
    findings = []
    for function in subject.source.constructor_path:
        for call in calls(function.node, nested=False):
            if last_name(call.func) != "register_buffer":
                continue
            value = argument(call, "tensor", 1)
            empty = value is None or (isinstance(value, ast.Constant) and value.value is None)
            on_cpu = value is not None and _on_cpu(function.file, call)
            text = f"{function.name}: {ast.unparse(call)}"
            where = function.file.at(call)
            findings.append(
                passed(where, text) if empty or on_cpu else failed(where, f"{text} registers a meta tensor")
            )
    if not findings:
        raise NotApplicable("the port registers no buffers")
    return findings
