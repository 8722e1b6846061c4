"""What the runner calls and passes: methods, arguments, layer names, block tables, return values."""

import ast
import re

from autoport.review.finding import Finding, NotApplicable, Subject, check, failed, judge, passed
from autoport.review.names import UNKNOWN, origins, patterns
from autoport.review.source import Class, Function
from autoport.review.syntax import (
    argument,
    calls,
    dotted,
    is_none,
    keyword,
    last_name,
    names_in,
    self_attribute,
    walk,
)

STANDARD_LAYER_NAME = "layers.{}.self_attn"
NO_HEAD = "no class of the port has both load_weights and get_kv_spec"


@check
def head_methods(subject: Subject, methods: dict[str, list[str]]) -> list[Finding]:
    """The heads have the methods that the runner calls.

    Args:
        methods: Method name -> parameters that it has to take, by position.
    """
    findings = []
    for head in subject.source.heads:
        for name, parameters in methods.items():
            method = subject.source.method(head, name)
            if method is None:
                findings.append(failed(head.at, f"{head.name} has no {name}"))
                continue
            where = method.file.at(method.node)
            if len(method.positional) < len(parameters) and method.node.args.vararg is None:
                text = f"{name} takes {method.positional} by position, the runner passes {parameters}"
                findings.append(failed(where, text))
            else:
                findings.append(passed(where, f"{head.name}.{name}"))
    if not findings:
        raise NotApplicable(NO_HEAD)
    return findings


@check
def forward_arguments(subject: Subject, arguments: list[str]) -> list[Finding]:
    """The heads' forward takes what the runner passes by name."""
    findings = []
    for head in subject.source.heads:
        forward = subject.source.method(head, "forward")
        if forward is None:
            continue
        missing = [name for name in arguments if name not in forward.parameters]
        where = forward.file.at(forward.node)
        if missing and forward.node.args.kwarg is None:
            findings.append(failed(where, f"{forward.name} takes neither {', '.join(missing)} nor **kwargs"))
        else:
            findings.append(passed(where, f"{forward.name} takes what the runner passes"))
    if not findings:
        raise NotApplicable(NO_HEAD)
    return findings


@check
def kv_layer_names(subject: Subject) -> list[Finding]:
    """The names in the KV spec are those under which metadata and caches are looked up."""
    findings = []
    for head in subject.source.heads:
        spec = subject.source.method(head, "get_kv_spec")
        if spec is None:
            continue
        described: set[str] = set()
        for function in subject.source.reachable([spec]):
            for call in calls(function.node):
                name = argument(call, "name", 0) if last_name(call.func) == "LayerSpec" else None
                if name is not None:
                    described |= set(patterns(subject.source, function, name))
                    findings.append(_described(function, name, described))
        for function, node, used in _lookups(subject, head):
            where, text = function.file.at(node), f"{function.name} looks up {', '.join(sorted(used))}"
            if described and used and not used <= described:
                findings.append(failed(where, f"{text}; the KV spec has {', '.join(sorted(described))}"))
            elif described and used:
                findings.append(passed(where, text))
    if not findings:
        raise NotApplicable("the port describes no KV cache")
    return findings


def _described(function: Function, node: ast.expr, names: set[str]) -> Finding:
    where = function.file.at(node)
    if not names:
        return judge(where, f"LayerSpec(name={ast.unparse(node)}): is it layers.<index>.self_attn?")
    if names == {STANDARD_LAYER_NAME}:
        return passed(where, f"LayerSpec(name={STANDARD_LAYER_NAME})")
    return judge(
        where,
        f"LayerSpec(name={', '.join(sorted(names))}): the plugin's tools look for {STANDARD_LAYER_NAME}",
    )


def _lookups(subject: Subject, head: Class) -> list[tuple[Function, ast.AST, set[str]]]:
    """Subscripts of attn_metadata and of the caches, with the patterns of their keys."""
    bind = subject.source.method(head, "bind_kv_cache")
    functions = [*subject.source.forward_path, *([bind] if bind else [])]
    found: list[tuple[Function, ast.AST, set[str]]] = []
    for function in functions:
        caches = set(function.parameters[:1]) if bind and function.node is bind.node else set()
        for node in walk(function.node):
            if isinstance(node, ast.Subscript) and last_name(node.value) in {"attn_metadata"} | caches:
                used = set(patterns(subject.source, function, node.slice)) - {UNKNOWN}
                # A number is a lookup of one layer, for what all layers share.
                used = {re.sub(r"\b\d+\b", UNKNOWN, name) for name in used}
                found.append((function, node, used))
    return found


@check
def block_tables_int32(subject: Subject, operators: dict[str, str]) -> list[Finding]:
    """Block tables reach the operators as int32, which is how the runner passes them.

    Args:
        operators: Operator -> its argument for the block table.
    """
    findings = []
    for operator, name in operators.items():
        for function, call in subject.functional_calls(operator):
            value = keyword(call, name)
            for origin in [] if value is None else origins(function, value):
                where, text = function.file.at(value or call), f"{operator}({name}={ast.unparse(origin)})"
                dtypes = _integer_types(origin)
                if dtypes - {"int32", "int"}:
                    findings.append(failed(where, f"{text} is not int32"))
                else:
                    findings.append(passed(where, text))
    if not findings:
        raise NotApplicable("no operator is given a block table by name")
    return findings


def _integer_types(node: ast.expr) -> set[str]:
    """Integer types that an expression is cast to last."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("long", "int", "short"):
            return {node.func.attr}
        if node.func.attr == "to":
            types = names_in(ast.Tuple([*node.args, *(item.value for item in node.keywords)], ast.Load()))
            found = types & {"int64", "long", "int32", "int16", "uint32"}
            if found:
                return found
        return _integer_types(node.func.value)
    return _integer_types(node.value) if isinstance(node, ast.Subscript) else set()


@check
def sampling_returns(subject: Subject) -> list[Finding]:
    """With a sampler the head returns (tokens, logits or None), without one the gathered logits."""
    findings = []
    for head in subject.source.heads:
        forward = subject.source.method(head, "forward")
        samplers = _attributes_of_type(subject, head, "Sampler")
        if forward is None:
            continue
        where = forward.file.at(forward.node)
        if not samplers:
            findings.append(
                failed(
                    where,
                    f"{head.name} has no Sampler; sampling on the device is on unless the user turns it off",
                )
            )
            continue
        returns = [
            node for node in walk(forward.node, nested=False) if isinstance(node, ast.Return) and node.value
        ]
        sampled = _names_from(forward, samplers)
        tokens = [node for node in returns if _first(node.value) & (sampled | samplers)]
        logits = [node for node in returns if node not in tokens]
        if tokens and logits:
            places = ", ".join(forward.file.at(node) for node in (*tokens, *logits))
            findings.append(passed(where, f"tokens with a sampler, logits without: {places}"))
        elif tokens:
            findings.append(
                failed(
                    where, f"{forward.name} returns tokens only; without a sampler the runner takes logits"
                )
            )
        else:
            findings.append(
                judge(where, f"{forward.name}: does it return what the sampler gives, first in a tuple?")
            )
        findings += _gathered(subject, head)
    if not findings:
        raise NotApplicable(NO_HEAD)
    return findings


def _attributes_of_type(subject: Subject, cls: Class, kind: str) -> set[str]:
    found = set()
    for function in subject.source.methods(cls):
        for node in walk(function.node):
            if isinstance(node, ast.Assign):
                for attribute in filter(None, map(self_attribute, node.targets)):
                    kinds = [
                        name.rpartition(".")[2] for name, _ in subject.source.attribute_types(cls, attribute)
                    ]
                    if kind in kinds:
                        found.add(attribute)
    return found


def _names_from(function: Function, samplers: set[str]) -> set[str]:
    """Local names that hold a result of the sampler, directly or through another call."""
    names: set[str] = set()
    for node in walk(function.node):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        if names_in(node.value) & (samplers | names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _first(node: ast.expr | None) -> set[str]:
    """Names in the first element of what is returned."""
    if isinstance(node, ast.Tuple):
        node = node.elts[0] if node.elts else None
    return names_in(node) if node is not None else set()


def _gathered(subject: Subject, head: Class) -> list[Finding]:
    """The output projection gathers the vocabulary exactly when there is no sampler on the device."""
    findings = []
    for function, value in subject.source.assignments(head, "lm_head"):
        if not (isinstance(value, ast.Call) and last_name(value.func) == "ColumnParallelLinear"):
            continue
        gather = keyword(value, "gather_output")
        where = function.file.at(gather or value)
        if gather is None or isinstance(gather, ast.Constant):
            text = ast.unparse(gather) if gather else "False"
            findings.append(
                failed(where, f"gather_output={text} whether or not tokens are sampled on the device")
            )
        elif _is_absence(gather) and "sampl" in ast.unparse(gather):
            findings.append(passed(where, f"gather_output={ast.unparse(gather)}"))
        else:
            findings.append(
                judge(where, f"gather_output={ast.unparse(gather)}: false exactly with a sampler?")
            )
    return findings


def _is_absence(node: ast.expr) -> bool:
    """``not x`` or ``x is None``."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is) and is_none(node.comparators[0])


@check
def factory_delegates(subject: Subject) -> list[Finding]:
    """The factory's `from_configs` validates before it selects, and imports the implementation lazily."""
    findings = []
    for cls in subject.source.factories:
        eager = [
            node
            for node in cls.file.tree.body
            if isinstance(node, ast.ImportFrom)
            and node.level == 1
            and (node.module or "").startswith("model")
        ]
        findings += [
            failed(cls.file.at(node), f"{ast.unparse(node)} loads an implementation before it is chosen")
            for node in eager
        ]
        validated = [
            call for function in subject.source.methods(cls) for call in calls(function.node)
            if "validate" in dotted(call.func)
        ]  # fmt: skip
        if not validated:
            findings.append(failed(cls.at, f"{cls.name} does not call a _validate_config"))
        if not eager and validated:
            findings.append(passed(cls.at, cls.name))
    if not findings:
        raise NotApplicable("the port has no factory.py")
    return findings
