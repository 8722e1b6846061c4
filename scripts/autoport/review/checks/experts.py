"""Mixture of experts and expert parallelism."""

import ast
import re
from collections.abc import Iterator

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
from autoport.review.parameters import Parameter, rank_of, tensor_call
from autoport.review.reductions import COLLECTIVES
from autoport.review.source import Class, Function, SourceFile
from autoport.review.syntax import argument, calls, dotted, keyword, last_name, names_in, self_attribute, walk

EXPERT_KERNELS = ("moe_cte", "moe_block_tkg", "moe_tkg")
SUBGROUP_GETTERS = {"get_neuron_ep_group", "get_neuron_ep_tp_group"}
EXPERT_FILTERS = {
    "expert_parallel_tensor_dim_loader", "expert_parallel_grouped_loader", "get_neuron_ep_rank", "ep_rank",
    "expert_parallel_interleaved_loader", "calculate_local_expert_indices", "local_expert_indices",
}  # fmt: skip
ROUTED = re.compile(r"(?<!shared_)expert")
ROUTER = re.compile(r"router_weight$|router\.weight$|(^|\.)gate_weight$|(^|\.)gate\.weight$")


def _is_expert(parameter: Parameter) -> bool:
    """Whether a parameter belongs to routed experts: by its name, or because it is stacked over experts."""
    return ROUTED.search(parameter.name) is not None or rank_of(parameter) == 3


def _require_ep(subject: Subject) -> None:
    if not subject.expert_parallel:
        raise NotApplicable("the port has no expert parallelism")


def _expert_classes(subject: Subject) -> list[Class]:
    """Modules that call an expert kernel or the router, or hold a list of experts."""
    routing = {*EXPERT_KERNELS, "router", "rmsnorm_router_topk_tkg"}
    found = {}
    for function, call in subject.source.forward_calls:
        if function.owner and subject.functional_op(function, call) in routing:
            found[function.owner.node] = function.owner
    for cls in subject.source.modules:
        if subject.source.assignments(cls, "experts") and re.search(
            r"moe|expert|sparse", cls.name, re.IGNORECASE
        ):
            found[cls.node] = cls
    return list(found.values())


@check
def router_float32(subject: Subject) -> list[Finding]:
    """Router weights are declared, and stay, in float32."""
    findings = []
    routing = {cls.node for cls in _expert_classes(subject)}
    for _, parameters, _ in subject.parameters:
        for parameter in parameters:
            owner = parameter.function.owner
            routes = "router" in parameter.name or (owner is not None and owner.node in routing)
            if routes and ROUTER.search(parameter.name):
                findings.append(_declared_float32(parameter))
    if not findings:
        raise NotApplicable("the port has no router weight")
    for function in subject.source.load_path:
        for node in walk(function.node):
            if isinstance(node, ast.DictComp) and _casts_all(node):
                text = f"{ast.unparse(node)} casts every weight, the router's too"
                findings.append(failed(function.file.at(node), text))
    return findings


def _declared_float32(parameter: Parameter) -> Finding:
    value = parameter.value
    call = tensor_call(parameter) or (value if isinstance(value, ast.Call) else None)
    dtype = keyword(call, "dtype") if call else None
    if dtype is None:
        return failed(parameter.at, f"{parameter.name} is declared without dtype=torch.float32")
    kinds = {ast.unparse(origin) for origin in origins(parameter.function, dtype)}
    if kinds == {"torch.float32"}:
        return passed(parameter.at, f"{parameter.name} is float32")
    return failed(
        parameter.at, f"{parameter.name} is declared with dtype={', '.join(sorted(kinds))}, not torch.float32"
    )


def _casts_all(node: ast.DictComp) -> bool:
    casts = isinstance(node.value, ast.Call) and last_name(node.value.func) == "to"
    return casts and not any(generator.ifs for generator in node.generators)


@check
def expert_loops(subject: Subject) -> list[Finding]:
    """Experts run in one kernel, not in a loop, which the compiler would unroll."""
    findings = []
    for cls in _expert_classes(subject):
        hits, kernels = [], []
        for function in subject.source.forward_path:
            if not function.owner or function.owner.node is not cls.node:
                continue
            hits += [
                failed(
                    function.file.at(node),
                    f"{function.name} loops over experts: for ... in {ast.unparse(node.iter)}",
                )
                for node in walk(function.node)
                if isinstance(node, ast.For) and "expert" in ast.unparse(node.iter).lower()
            ]
            for call in calls(function.node):
                if subject.functional_op(function, call) in EXPERT_KERNELS:
                    kernels.append((function, call))
        findings += hits
        if not hits:
            findings += [
                passed(f.file.at(call), f"{cls.name}: {subject.functional_op(f, call)}")
                for f, call in kernels
            ]
        if not hits and not kernels:
            findings.append(judge(cls.at, f"{cls.name}: which kernel runs its experts?"))
    if not findings:
        raise NotApplicable("the port has no experts")
    return findings


@check
def ep_unified_group(subject: Subject) -> list[Finding]:
    """Every collective of the forward path, and every parallel module, uses one group."""
    _require_ep(subject)
    by_group: dict[str, list[str]] = {}
    for function, call in subject.source.forward_calls:
        if isinstance(call.func, ast.Attribute) and last_name(call.func) in COLLECTIVES:
            group = _group(subject, function, call.func.value)
            by_group.setdefault(group, []).append(function.file.at(call))
    for function in subject.source.constructor_path:
        for call in calls(function.node):
            given = keyword(call, "tp_group") or keyword(call, "process_group")
            if given is not None and not last_name(call.func).endswith("Config"):
                by_group.setdefault(_group(subject, function, given), []).append(function.file.at(given))
    if not by_group:
        raise NotApplicable("the forward path calls no collective")
    if len(by_group) == 1:
        group, places = next(iter(by_group.items()))
        return [passed(place, f"on {group}") for place in places]
    names = ", ".join(sorted(by_group))
    return [
        failed(place, f"on {group}; the port uses {names}")
        for group, places in by_group.items()
        for place in places
    ]


def _group(subject: Subject, function: Function, node: ast.expr, depth: int = 5) -> str:
    """The getter that a group comes from, ``get_tp_group`` for ``self.tp_group.device_group``."""
    if isinstance(node, ast.Attribute) and node.attr in ("device_group", "cpu_group"):
        return _group(subject, function, node.value, depth)
    if isinstance(node, ast.Call):
        return last_name(node.func)
    attribute = self_attribute(node)
    if attribute and function.owner and depth:
        sources = {
            _group(subject, where, origin, depth - 1)
            for where, value in subject.source.assignments(function.owner, attribute)
            for origin in origins(where, value)
        }
        return " or ".join(sorted(sources)) or attribute
    if isinstance(node, ast.Name) and depth:
        sources = {_group(subject, function, o, depth - 1) for o in origins(function, node) if o is not node}
        return " or ".join(sorted(sources)) or node.id
    return ast.unparse(node)


@check
def ep_scaling(subject: Subject) -> list[Finding]:
    """Layers that every EP rank holds are scaled by 1/ep_degree after loading; experts are not."""
    _require_ep(subject)
    findings, scaled = [], ""
    for file, node in _scalings(subject):
        names = _names_around(file, node)
        text = " ".join(names)
        where = file.at(node)
        experts = [name for name in names if ROUTED.search(name)]
        if experts and not _excludes_experts(file, node):
            findings.append(failed(where, f"{ast.unparse(node)} also scales {', '.join(experts)}"))
        else:
            findings.append(passed(where, f"{ast.unparse(node)} for {', '.join(names)}"))
        scaled += f" {text}"
    if not findings:
        subgroup = any(names_in(f.node) & SUBGROUP_GETTERS for f in subject.source.constructor_path)
        if not subgroup:
            raise NotApplicable("the weights are not sized by a sub-group")
        return [
            failed(head.at, "nothing scales o_proj and down_proj by 1/ep_degree after loading")
            for head in subject.source.heads
        ]
    for layer in ("o_proj", "down_proj"):
        held = [
            p for _, found, _ in subject.parameters for p in found if layer in p.name and not _is_expert(p)
        ]
        if held and layer not in scaled:
            findings.append(
                failed(
                    held[0].at, f"{held[0].name} is held by every EP rank and is not scaled by 1/ep_degree"
                )
            )
    return findings


def _scalings(subject: Subject) -> Iterator[tuple[SourceFile, ast.AST]]:
    """Multiplications and divisions of weights by the EP degree in the load path."""
    for function in subject.source.load_path:
        for node in walk(function.node):
            factor: ast.expr | None = None
            if isinstance(node, ast.Call) and last_name(node.func) in ("div_", "mul_", "div", "mul"):
                factor = node.args[0] if node.args else None
            elif isinstance(node, ast.BinOp) and not isinstance(node.left, ast.Constant):
                factor = node.right if isinstance(node.op, (ast.Div, ast.Mult)) else None
            elif isinstance(node, ast.AugAssign):
                factor = node.value if isinstance(node.op, (ast.Div, ast.Mult)) else None
            if factor is not None and any(
                "ep_degree" in names_in(item) for item in origins(function, factor)
            ):
                yield function.file, node


def _names_around(file: SourceFile, node: ast.AST) -> list[str]:
    """Parameter names, or parts of them, that the statements around a scaling select by."""
    names: list[str] = []
    for item in (node, *file.ancestors(node)):
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if not isinstance(item, (ast.If, ast.For, ast.Expr)):
            continue
        scope = item.test if isinstance(item, ast.If) else item.iter if isinstance(item, ast.For) else item
        for part in ast.walk(scope):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                names.append(part.value)
            elif isinstance(part, ast.Attribute) and re.search(r"_(weights?|bias|proj)$", part.attr):
                names.append(dotted(part) or part.attr)
    return list(dict.fromkeys(names))


def _excludes_experts(file: SourceFile, node: ast.AST) -> bool:
    """Whether a condition around the scaling leaves experts out: ``"experts" not in name``."""
    tests = [item.test for item in file.ancestors(node) if isinstance(item, ast.If)]
    return any(
        isinstance(part, ast.Compare)
        and any(isinstance(op, ast.NotIn) for op in part.ops)
        and "expert" in ast.unparse(part.left)
        for test in tests
        for part in ast.walk(test)
    )


@check
def ep_expert_filter(subject: Subject) -> list[Finding]:
    """Expert weights are filtered by EP rank while they are loaded."""
    _require_ep(subject)
    parameters = [p for _, found, _ in subject.parameters for p in found if _is_expert(p)]
    parameters = [parameter for parameter in parameters if "router" not in parameter.name]
    if not parameters:
        raise NotApplicable("no parameter of an expert was found")
    findings = []
    for function in subject.source.constructor_path:
        for call in calls(function.node):
            loader = argument(call, "loader", 1) if last_name(call.func) == "set_weight_loader" else None
            for origin in [] if loader is None else origins(function, loader):
                if used := names_in(origin) & EXPERT_FILTERS:
                    findings.append(
                        passed(function.file.at(call), f"loaded through {', '.join(sorted(used))}")
                    )
    for function in subject.source.load_path:
        selecting = [node for node in walk(function.node) if last_name(node) in EXPERT_FILTERS]
        if selecting and ROUTED.search(ast.unparse(function.node)):
            text = f"{function.name} selects by {last_name(selecting[0])}"
            findings.append(passed(function.file.at(selecting[0]), text))
    return findings or [failed(p.at, f"{p.name}: nothing selects this EP rank's experts") for p in parameters]


@check
def ep_detection(subject: Subject) -> list[Finding]:
    """Expert parallelism is read from vLLM's parallel_config or the EP degree, never from a group's size."""
    _require_ep(subject)
    findings = []
    for file in subject.source.files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Compare) and re.search(
                r"ep_(tp_)?group\b.*world_size", ast.unparse(node.left)
            ):
                findings.append(failed(file.at(node), f"{ast.unparse(node)} decides by a group's size"))
            elif isinstance(node, ast.Attribute) and node.attr == "enable_expert_parallel":
                where, text = file.at(node), ast.unparse(node)
                if "parallel_config" in names_in(node.value):
                    findings.append(passed(where, text))
                else:
                    findings.append(judge(where, f"{text}: does it come from vLLM's parallel_config?"))
            elif isinstance(node, ast.Call) and last_name(node.func) == "get_neuron_ep_degree":
                findings.append(passed(file.at(node), ast.unparse(node)))
            elif (
                isinstance(node, ast.Attribute)
                and node.attr == "ep_degree"
                and "neuron_config" in names_in(node.value)
            ):
                text = f"{ast.unparse(node)} stays 1 when the user leaves it out; use get_neuron_ep_degree()"
                findings.append(failed(file.at(node), text))
    return findings or [
        failed(head.at, "nothing asks whether expert parallelism is on") for head in subject.source.heads
    ]


@check
def ep_guarded(subject: Subject) -> list[Finding]:
    """The EP groups exist only when EP is on: their getters assert otherwise."""
    _require_ep(subject)
    findings = []
    for file in subject.source.files:
        for node in ast.walk(file.tree):
            if not (isinstance(node, ast.Call) and last_name(node.func) in SUBGROUP_GETTERS):
                continue
            guarded = any(
                isinstance(item, (ast.If, ast.IfExp))
                and re.search(r"\bep_|expert_parallel|_ep\b", ast.unparse(item.test))
                for item in file.ancestors(node)
            )
            text = ast.unparse(node)
            findings.append(
                passed(file.at(node), f"{text} under a condition")
                if guarded
                else failed(file.at(node), f"{text} asserts when expert parallelism is off")
            )
    if not findings:
        raise NotApplicable("the port asks for no EP group")
    return findings
