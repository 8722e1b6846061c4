"""Step 2: plan the port; writes plan.json."""

from collections.abc import Sequence

import msgspec

from autoport.analysis import decisions
from autoport.analysis.architecture import describe_architecture, element_bytes
from autoport.analysis.comparison import compare
from autoport.analysis.coverage import check_coverage, coverage_problems
from autoport.analysis.dimensions import Dimensions
from autoport.analysis.expert_parallel import plan_expert_parallel
from autoport.analysis.incomplete import describe_with_gaps, with_way_in
from autoport.analysis.instances import find_instance
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.pitfalls import pitfalls
from autoport.analysis.reference import choose_reference, load_table
from autoport.analysis.source_check import source_problems
from autoport.analysis.tensor_parallel import (
    no_valid_tp,
    parameter_bytes,
    plan_tensor_parallel,
    planned_context,
    recommendation,
    total_bytes,
)
from autoport.analysis.weight_map import build_weight_map, second_copies
from autoport.errors import Refusal, refuse
from autoport.families import find_family
from autoport.naming import class_prefix
from autoport.port_state import Port
from autoport.research.config import config_digest
from autoport.research.stale import what_changed
from autoport.schema.architecture import Architecture
from autoport.schema.facts import Checkpoint, Facts
from autoport.schema.parallel import EpPlan, TpPlan
from autoport.schema.plan import Gap, Override, Plan
from autoport.schema.weights import WeightMap
from autoport.search_ops import search
from autoport.step import Options, Outcome, command_line
from autoport.workspace import Workspace

NEAREST = 3  # operators that are named for a gap


def make_plan(
    name: str, facts: Facts, checkpoint: Checkpoint, options: Options, overrides: Sequence[Override] = ()
) -> Plan:
    """Plan a port from what research found.

    Args:
        overrides: Decisions that a person took.

    Raises:
        Refusal: for everything that is out of scope, and for every key that the weight map does not cover.
    """
    if not checkpoint.tensors:
        raise refuse(
            "CKPT-NONE",
            "Step 1 found a config and no weights; a plan needs the keys and shapes of a checkpoint",
            checkpoint.source,
            "add the .safetensors files and run Step 1 again; 'autoport compute-tp' needs the config only",
        )
    gaps: list[Gap] = []
    if options.incomplete:
        described = describe_with_gaps(facts, checkpoint)
        architecture, applied = decisions.apply(described.architecture, overrides)
        weights, gaps = described.weights, described.gaps
    else:
        try:
            architecture, weights, applied = _complete(facts, checkpoint, overrides)
        except Refusal as refusal:
            raise with_way_in(refusal, facts, checkpoint) from refusal
    context = planned_context(options.context_length, facts.fields["max_position_embeddings"])
    tp, ep = _plan_parallel(architecture, weights, context, options)
    size = decisions.chosen(applied, decisions.TP_SIZE)
    if size is not None:
        tp.recommended = _chosen_size(size, tp)
    reference = choose_reference(architecture, tp)
    wanted = decisions.chosen(applied, decisions.REFERENCE)
    if wanted is not None:
        reference = _chosen_reference(wanted)
    return Plan(
        name=name,
        class_prefix=class_prefix(name),
        source=facts.source,
        reference_model=reference,
        architecture=architecture,
        weights=weights,
        tp=tp,
        sections=compare(architecture, facts, weights, reference),
        pitfalls=pitfalls(architecture, facts, tp),
        overrides=applied,
        ep=ep,
        gaps=gaps,
        stored_as=facts.stored_as,
    )


def _complete(
    facts: Facts, checkpoint: Checkpoint, overrides: Sequence[Override]
) -> tuple[Architecture, WeightMap, list[Override]]:
    described = describe_architecture(facts, checkpoint)
    family = find_family(described.hf_name, described.model_type)
    assert family is not None, "describe_architecture refuses other classes"
    conflicts = source_problems(facts, family, described)
    if conflicts:
        raise Refusal(*conflicts)
    architecture, applied = decisions.apply(described, overrides)
    weights = build_weight_map(architecture, CheckpointKeys(checkpoint.tensors, family.keys), family.moe)
    coverage = check_coverage(weights, architecture.num_layers, checkpoint, architecture.layers.moe)
    if not coverage.complete:
        raise Refusal(*coverage_problems(coverage, architecture.num_layers, checkpoint, facts))
    weights.ignored += second_copies(weights, checkpoint.left_out)
    return architecture, weights, applied


def _with_operators(gap: Gap, workspace: Workspace) -> Gap:
    """The gap with what the workspace has for it, the nearest first."""
    word = {"attention": "attention", "mlp": "mlp", "decoder": "norm"}[gap.section]
    offers = search(workspace, [word])[:NEAREST]
    return msgspec.structs.replace(gap, operators=[f"{offer.name} ({offer.where})" for offer in offers])


def _plan_parallel(
    architecture: Architecture, weights: WeightMap, context_length: int, options: Options
) -> tuple[TpPlan, EpPlan | None]:
    instance = find_instance(options.instance, options.lnc)
    size = Dimensions.from_architecture(architecture)
    parts = parameter_bytes(weights, architecture, element_bytes(architecture.dtype))
    tp = plan_tensor_parallel(size, parts, context_length, options.batch_size, options.relax, instance)
    if architecture.moe is None:
        return tp, None
    routed = {entry.parameter for entry in weights.entries if entry.transform.startswith("expert_")}
    experts = total_bytes({name: part for name, part in parts.items() if name in routed}).total
    dense = total_bytes({name: part for name, part in parts.items() if name not in routed})
    count = architecture.moe.routing.num_experts
    return tp, plan_expert_parallel(size, count, dense, experts, tp, instance)


def _chosen_size(size: object, tp: TpPlan) -> int:
    valid = [item.tp_size for item in tp.candidates if item.valid]
    if size in valid:
        return valid[valid.index(size)] if isinstance(size, int) else valid[0]
    raise refuse("DEC-VALUE", f"TP {size!r} is not valid", decisions.TP_SIZE, f"choose one of {valid}")


def _chosen_reference(name: object) -> str:
    known = list(load_table()["models"])
    if name in known:
        return str(name)
    raise refuse(
        "DEC-VALUE", f"no reference model {name!r}", decisions.REFERENCE, f"choose one of {', '.join(known)}"
    )


def read_current_facts(port: Port) -> Facts:
    """What research found, as long as it is whole and config.json is still the same.

    Raises:
        Refusal: PORT-STATE, PORT-STALE, what `what_changed` and `read_state` refuse.
    """
    again = f"run '{port.command('research')}' again"
    facts = port.read_state("facts.json", Facts, "research")
    if facts.config_digest and not facts.stored_as and config_digest(facts.config) != facts.config_digest:
        found = "is damaged: not the content of config.json at research - at `$.config`"
        raise refuse("PORT-STATE", found, port.state_dir / "facts.json", again)
    changed = what_changed(port.source, facts)
    if changed:
        raise refuse("PORT-STALE", changed, facts.config_file, again)
    return facts


def run(port: Port, options: Options) -> Outcome:
    facts = read_current_facts(port)
    checkpoint = port.read_state("checkpoint.json", Checkpoint, "research")
    plan = make_plan(port.name, facts, checkpoint, options, decisions.load(port))
    plan.gaps = [_with_operators(gap, port.workspace) for gap in plan.gaps]
    port.write_state("plan.json", plan)
    gates = {"unconsumed": facts.unconsumed} if facts.unconsumed else {}
    if facts.remote_code:
        gates["remote_code"] = facts.remote_code
    digest = decisions.write_decisions(port, plan, gates, command_line(port, options))
    summary = f"reference {plan.reference_model}, {recommendation(plan.tp)}"
    if plan.gaps:
        summary += f"; left to be written by hand: {', '.join(gap.section for gap in plan.gaps)}"
    if plan.overrides:
        summary += f"; overridden: {', '.join(item.field for item in plan.overrides)}"
    data = {
        "reference_model": plan.reference_model,
        "sections": plan.sections,
        "tensor_parallel": plan.tp,
        "expert_parallel": plan.ep,
        "composed": {
            "attention": plan.architecture.attention.composed,
            "experts": plan.architecture.moe.composed if plan.architecture.moe else (),
        },
        "pitfalls": plan.pitfalls,
        "gaps": plan.gaps,
        "overrides": plan.overrides,
        "unconsumed": facts.unconsumed,
        "inert": facts.inert,
        "remote_code": facts.remote_code,
        "warnings": facts.warnings,
    }
    if plan.tp.recommended is None:
        return Outcome("red", no_valid_tp(plan.tp) + _expert_parallel_hint(plan.ep), data=data)
    if options.confirm:
        decisions.confirm(port, digest)
    elif not decisions.is_confirmed(port, digest) and (
        options.review or gates or port.has_state(decisions.CONFIRMED) or _is_waiting(port)
    ):
        because = "; ".join(_gate_text(name, value) for name, value in gates.items())
        text = f"{summary}; waiting for review" + (f" of {because}" if because else "")
        return Outcome("waiting", f"{text} ({port.state_dir / decisions.DECISIONS})", data=data)
    return Outcome("done", summary, data=data)


def _is_waiting(port: Port) -> bool:
    """Whether the last run paused: only a confirmation ends that."""
    record = port.manifest.steps.get("analyze")
    return record is not None and record.status == "waiting"


def _expert_parallel_hint(ep: EpPlan | None) -> str:
    if ep is None or ep.recommended is None:
        return ""
    chosen = next(item for item in ep.candidates if item.tp_size == ep.recommended)
    return (
        f"; with expert parallelism, sub-groups of {chosen.tp_size} ranks and ep_degree {chosen.ep_degree} fit "
        "(references/expert-parallelism.md)"
    )


def _gate_text(name: str, value: dict[str, object]) -> str:
    if name == "remote_code":
        return "the checkpoint's own code (auto_map), which was not run"
    return "config keys that nothing took: " + ", ".join(f"{key} {item!r:.40}" for key, item in value.items())
