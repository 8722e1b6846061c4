"""Collectives: row-parallel outputs are reduced once, the sequence is gathered and scattered in pairs."""

import ast

from autoport.review.finding import (
    Finding,
    NotApplicable,
    Subject,
    check,
    failed,
    judge,
    passed,
)
from autoport.review.names import origins
from autoport.review.partial_sums import Event, Origin
from autoport.review.reductions import COLLECTIVES, ROW_PARALLEL, follow
from autoport.review.source import Class, Function
from autoport.review.syntax import argument, calls, dotted, keyword, last_name, names_in, number, walk

# Modules of the plugin that take a torch process group, and the argument that takes it.
GROUP_ARGUMENTS = {
    "ColumnParallelLinear": "tp_group",
    "RowParallelLinear": "tp_group",
    "VocabDimShardedEmbedding": "tp_group",
    "EmbedDimShardedEmbedding": "tp_group",
    "Sampler": "process_group",
}


@check
def reduced_once(subject: Subject) -> list[Finding]:
    """Each output of a row-parallel operator meets exactly one reduction on every path."""
    reductions = follow(subject)
    by_origin: dict[Origin, list[Event]] = {}
    for event in reductions.events:
        by_origin.setdefault(event.origin, []).append(event)
    for function, call in subject.functional_calls(*ROW_PARALLEL):
        name = subject.functional_op(function, call)
        if name != "attention_decode" or argument(call, "W_out") is not None:
            by_origin.setdefault(Origin(name, function.file.at(call)), [])
    if not by_origin:
        raise NotApplicable("the forward path has no row-parallel operator")
    return [finding for origin, events in by_origin.items() for finding in _verdict(origin, events)]


def _verdict(origin: Origin, events: list[Event]) -> list[Finding]:
    for status in ("fail", "judge"):
        if worst := [event for event in events if event.status == status]:
            return [
                Finding(event.status, origin.where, f"{origin.operator}: {event.text}") for event in worst
            ]
    if events:
        return [passed(origin.where, f"{origin.operator}: {events[0].text}")]
    return [judge(origin.where, f"{origin.operator}: where is its output summed over the ranks?")]


@check
def sequence_parallel_pairs(subject: Subject) -> list[Finding]:
    """A module that scatters the sequence after its row-parallel operator has gathered it before."""
    findings = []
    for cls in subject.source.modules:
        for function, call in _collectives_of(subject, cls, "reduce_scatter"):
            findings.append(_gathered_before(subject, cls, function.file.at(call)))
    for cls in subject.source.modules:
        for function, call, gathered in _scattering_embeddings(subject, cls):
            where = function.file.at(call)
            text = f"{cls.name}: the embedding scatters the sequence"
            findings.append(
                passed(where, f"{text}, gathered again at {gathered}")
                if gathered
                else failed(where, f"{text} and nothing gathers it after the last layer")
            )
    if not findings:
        raise NotApplicable("the port does not split the sequence over the ranks")
    return findings


def _gathered_before(subject: Subject, cls: Class, where: str) -> Finding:
    """Whether a module that scatters at `where` gathers; the module that holds it may do so instead."""
    for holder in (cls, *subject.source.holders(cls)):
        gathers = _collectives_of(subject, holder, "all_gather")
        if gathers:
            text = f"{cls.name}: gathered at {gathers[0][0].file.at(gathers[0][1])}"
            return (
                passed(where, text)
                if holder is cls
                else judge(where, f"{text} by {holder.name}: before its call?")
            )
    return failed(where, f"{cls.name} scatters the sequence and never gathered it")


def _collectives_of(subject: Subject, cls: Class, name: str) -> list[tuple[Function, ast.Call]]:
    """Calls of a collective in the class's own methods of the forward path."""
    owned = [
        function
        for function in subject.source.forward_path
        if function.owner and function.owner.node is cls.node
    ]
    return [(f, call) for f in owned for call in calls(f.node) if last_name(call.func) == name]


def _scattering_embeddings(subject: Subject, cls: Class) -> list[tuple[Function, ast.Call, str]]:
    """Embedding calls that scatter the sequence, with the place where the same class or a head gathers it."""
    found = []
    for function in subject.source.forward_path:
        if not function.owner or function.owner.node is not cls.node:
            continue
        for call in calls(function.node):
            kinds = [
                kind.rpartition(".")[2]
                for kind, _ in subject.source.attribute_types(cls, last_name(call.func))
            ]
            if "VocabDimShardedEmbedding" not in kinds:
                continue
            scatter = argument(call, "scatter_tokens", 1)
            if isinstance(scatter, ast.Constant) and scatter.value is False:
                continue
            gathers = _collectives_of(subject, cls, "all_gather")
            for head in subject.source.heads:
                gathers += _collectives_of(subject, head, "all_gather")
            tokens = [item for item in gathers if _dimension(item[1]) == 0]
            found.append((function, call, tokens[0][0].file.at(tokens[0][1]) if tokens else ""))
    return found


def _dimension(call: ast.Call) -> int | float | None:
    return number(argument(call, "dim", 1))


@check
def collective_results(subject: Subject) -> list[Finding]:
    """all_reduce works in place on a name; the result of all_gather and reduce_scatter must be used."""
    findings = []
    for function, call in subject.source.forward_calls:
        if last_name(call.func) in COLLECTIVES and isinstance(call.func, ast.Attribute):
            where, text = function.file.at(call), ast.unparse(call)
            fault = _misused(call, function.file.parents.get(call))
            findings.append(failed(where, f"{text}: {fault}") if fault else passed(where, text))
    if not findings:
        raise NotApplicable("the forward path calls no collective")
    return findings


def _misused(call: ast.Call, parent: ast.AST | None) -> str:
    """What is wrong with how the result of a collective is used, if anything."""
    discarded = isinstance(parent, ast.Expr)
    if last_name(call.func) != "all_reduce":
        return "the result is a new tensor and is thrown away" if discarded else ""
    operand = call.args[0] if call.args else keyword(call, "input_")
    if discarded and not isinstance(operand, (ast.Name, ast.Attribute, ast.Subscript)):
        return "the sum goes into a temporary and is lost"
    if isinstance(parent, ast.Assign) and isinstance(operand, ast.Name):
        kept = [last_name(target) for target in parent.targets]
        return "" if kept == [operand.id] else f"{operand.id} changes in place and is kept under another name"
    return ""


@check
def collective_groups(subject: Subject) -> list[Finding]:
    """Collectives are methods of the group coordinator, not of `torch.distributed` or of a process group."""
    findings = []
    for function, call in subject.source.forward_calls:
        if last_name(call.func) not in COLLECTIVES | {"all_gather_into_tensor", "reduce_scatter_tensor"}:
            continue
        where, text = function.file.at(call), ast.unparse(call.func)
        origin = function.file.imports.get(text.partition(".")[0], "")
        if origin.startswith("torch") or text.startswith("torch."):
            findings.append(failed(where, f"{text}: call the method of the group coordinator instead"))
        elif "device_group" in text or "cpu_group" in text:
            findings.append(
                failed(where, f"{text}: a process group has no such method; call it on the coordinator")
            )
        else:
            findings.append(passed(where, text))
    if not findings:
        raise NotApplicable("the forward path calls no collective")
    return findings


@check
def device_groups(subject: Subject) -> list[Finding]:
    """The plugin's parallel modules get a coordinator's `device_group`."""
    findings = []
    for function in subject.source.constructor_path:
        for call in calls(function.node):
            name = GROUP_ARGUMENTS.get(last_name(call.func))
            group = keyword(call, name) if name else None
            if group is None:
                continue
            text = f"{last_name(call.func)}({name}={ast.unparse(group)})"
            given = [origin for value in _followed(subject, function, group) for origin in value]
            where = function.file.at(group)
            if any("device_group" in names_in(origin) for origin in given):
                findings.append(passed(where, text))
            elif any("_group" in last_name(o.func) for o in given if isinstance(o, ast.Call)):
                findings.append(failed(where, f"{text} is a group coordinator; pass its .device_group"))
            else:
                findings.append(
                    judge(where, f"{text}: is it a torch process group (coordinator.device_group)?")
                )
    if not findings:
        raise NotApplicable("no parallel module is given a group")
    return findings


def _followed(subject: Subject, function: Function, node: ast.expr) -> list[list[ast.expr]]:
    """What a name or ``self.x`` stands for."""
    if isinstance(node, ast.Attribute) and function.owner and dotted(node.value) == "self":
        assigned = subject.source.assignments(function.owner, node.attr)
        return [origins(where, value) for where, value in assigned] or [[node]]
    return [origins(function, node)]


@check
def prefill_length(subject: Subject) -> list[Finding]:
    """Some function of the forward path raises when the tokens of a prefill do not divide by the ranks."""
    if not any(last_name(call.func) == "reduce_scatter" for _, call in subject.source.forward_calls):
        raise NotApplicable("the port does not split the sequence over the ranks")
    findings = []
    for function in subject.source.forward_path:
        for node in walk(function.node):
            if isinstance(node, ast.If) and any(isinstance(inner, ast.Raise) for inner in node.body):
                remainders = [
                    n for n in ast.walk(node.test) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)
                ]
                if remainders:
                    findings.append(passed(function.file.at(node), f"refused: {ast.unparse(node.test)}"))
    if not findings:
        findings = [
            failed(
                head.at, f"{head.name} splits the sequence, and nothing refuses a length that does not divide"
            )
            for head in subject.source.heads
        ]
    return findings


@check
def even_heads(subject: Subject) -> list[Finding]:
    """A number of query heads per rank that is odd is refused where the decode kernel needs pairs of them."""
    if not list(subject.functional_calls("attention_decode")):
        raise NotApplicable("the port does not call attention_decode")
    sizes = subject.plan.tp.candidates if subject.plan else []
    if any(broken.rule == "R2" for size in sizes for broken in size.relaxed):
        raise NotApplicable("the rule of even heads was relaxed (plan.json)")
    for file in subject.source.files:
        for node in ast.walk(file.tree):
            if _tests_heads_by_two(node):
                return [passed(file.at(node), ast.unparse(node))]
    heads = subject.source.heads
    where = heads[0].at if heads else f"{subject.source.files[0].relative}:1"
    return [failed(where, "no place of the port asks whether the query heads of a rank are an even number")]


def _tests_heads_by_two(node: ast.AST) -> bool:
    """``heads // tp_size % 2``, ``num_heads % (2 * tp_size)``."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)):
        return False
    by_two = any(isinstance(part, ast.Constant) and part.value == 2 for part in ast.walk(node.right))
    return by_two and any("head" in name and "kv" not in name for name in names_in(node.left))
