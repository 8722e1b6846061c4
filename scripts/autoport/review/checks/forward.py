"""What may not stand in the forward path: it passes on a CPU and fails on the device."""

import ast
from collections.abc import Callable, Iterator

from autoport.codegen.gaps import stubs
from autoport.review.finding import Finding, NotApplicable, Subject, check, failed, passed
from autoport.review.names import origins
from autoport.review.source import Function
from autoport.review.syntax import argument, calls, dotted, keyword, last_name, walk
from autoport.review.tensors import Tensors

Hits = Iterator[tuple[ast.AST, str]]

DEVICE_METHODS = {"cuda", "cpu", "numpy"}
SCALAR_METHODS = {"item", "tolist"}
DYNAMIC_FUNCTIONS = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"}
DEBUGGERS = ("pdb", "ipdb", "pudb")


def over_forward_path(subject: Subject, hits: Callable[[Function], Hits], what: str) -> list[Finding]:
    """Run `hits` on every function of the forward path: each hit fails; a file without any passes."""
    functions = subject.source.forward_path
    if not functions:
        raise NotApplicable("no class of the port has a forward")
    found: dict[tuple[str, str], Finding] = {}
    clean: dict[str, list[Function]] = {}
    for function in functions:
        clean.setdefault(function.file.relative, []).append(function)
        for node, text in hits(function):
            where = function.file.at(node)
            found[where, text] = failed(where, f"{function.name}: {text}")
    if found:
        return list(found.values())
    return [
        passed(file.at(functions[0].node), f"no {what} in the {len(functions)} functions that a forward runs")
        for functions in clean.values()
        for file in [functions[0].file]
    ]


@check
def sections_written(subject: Subject) -> list[Finding]:
    """Nothing that `autoport port --incomplete` left open is still open."""
    files = subject.source.files
    found = [failed(file.at(node), text) for file in files for node, text in stubs(file.tree)]
    return found or [passed(file.at(file.tree.body[0]), "no section is open") for file in files[:1]]


@check
def device_moves(subject: Subject) -> list[Finding]:
    return over_forward_path(subject, _device_moves, "move to a device")


def _device_moves(function: Function) -> Hits:
    for call in calls(function.node):
        if not isinstance(call.func, ast.Attribute):
            continue
        method = call.func.attr
        if method in DEVICE_METHODS and not call.args:
            yield call, f".{method}() moves a tensor off the device"
        elif method == "to" and _is_device(
            function, argument(call, "device", 0), keyword(call, "device") is not None
        ):
            yield call, f"{ast.unparse(call)} moves a tensor to a device"


def _is_device(function: Function, node: ast.expr | None, named: bool) -> bool:
    if node is None:
        return False
    if named:
        return True
    for origin in origins(function, node):
        if isinstance(origin, ast.Constant):
            if isinstance(origin.value, str):
                return True
        elif (
            last_name(origin) == "device"
            or last_name(origin).endswith("_device")
            or (isinstance(origin, ast.Call) and dotted(origin.func) == "torch.device")
        ):
            return True
    return False


@check
def scalar_extraction(subject: Subject) -> list[Finding]:
    def hits(function: Function) -> Hits:
        tensors = Tensors(subject.source, function)
        for call in calls(function.node):
            if (
                isinstance(call.func, ast.Attribute) and call.func.attr in SCALAR_METHODS and not call.args
            ) or (
                isinstance(call.func, ast.Name)
                and call.func.id in ("int", "float", "bool")
                and len(call.args) == 1
                and tensors.is_tensor(call.args[0])
            ):
                yield call, f"{ast.unparse(call)} reads a tensor's value"

    return over_forward_path(subject, hits, "reading of a tensor's value")


@check
def tensor_branches(subject: Subject) -> list[Finding]:
    def hits(function: Function) -> Hits:
        tensors = Tensors(subject.source, function)
        for node in walk(function.node):
            if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)) and tensors.is_tensor(node.test):
                yield node, f"branches on a tensor: {ast.unparse(node.test)}"

    return over_forward_path(subject, hits, "branch on a tensor")


@check
def dynamic_shapes(subject: Subject) -> list[Finding]:
    def hits(function: Function) -> Hits:
        tensors = Tensors(subject.source, function)
        for node in walk(function.node):
            if isinstance(node, ast.Call):
                name = last_name(node.func)
                if name in DYNAMIC_FUNCTIONS or (dotted(node.func) == "torch.where" and len(node.args) == 1):
                    yield node, f"{ast.unparse(node.func)} gives a shape that depends on values"
            elif (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Load)
                and isinstance(node.slice, ast.Compare)
                and tensors.is_tensor(node.slice)
            ):
                yield node, f"{ast.unparse(node)}: a boolean mask gives a shape that depends on values"

    return over_forward_path(subject, hits, "shape that depends on values")


@check
def debug_left(subject: Subject) -> list[Finding]:
    """Looks at every file of the port, not only at the forward path."""
    findings = []
    for file in subject.source.files:
        hits: list[tuple[ast.AST, str]] = []
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                if name in ("print", "breakpoint") or name.endswith((".set_trace", ".set_printoptions")):
                    hits.append((node, f"{name}(...) left in the code"))
            elif isinstance(node, ast.Import) and any(alias.name in DEBUGGERS for alias in node.names):
                hits.append((node, f"import of a debugger: {ast.unparse(node)}"))
        findings += [failed(file.at(node), text) for node, text in hits] or [
            passed(file.at(file.tree), "clean")
        ]
    return findings
