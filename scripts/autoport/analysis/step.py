"""Step 2: plan the port; writes plan.json."""

from autoport.analysis.architecture import describe_architecture, element_bytes
from autoport.analysis.coverage import check_coverage, coverage_problems
from autoport.analysis.families import FAMILIES
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.reference import choose_reference, compare, pitfalls
from autoport.analysis.source_check import source_problems, unconsumed_keys
from autoport.analysis.tensor_parallel import (
    Dimensions,
    no_valid_tp,
    plan_tensor_parallel,
    recommendation,
    weight_bytes,
)
from autoport.analysis.weight_map import build_weight_map
from autoport.errors import Refusal
from autoport.port import Options, Outcome, Port
from autoport.schema import Checkpoint, Facts, Plan
from autoport.workspace import class_prefix


def make_plan(name: str, facts: Facts, checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a port from what research found.

    Raises:
        Refusal: for everything that is out of scope, and for every key that the weight map does not cover.
    """
    architecture = describe_architecture(facts, checkpoint)
    family = FAMILIES[architecture.hf_name]
    conflicts = source_problems(facts, family, architecture)
    if conflicts:
        raise Refusal(*conflicts)
    weights = build_weight_map(architecture, CheckpointKeys(checkpoint.tensors, family.keys), family.moe)
    coverage = check_coverage(weights, architecture.num_layers, checkpoint, architecture.layers.moe)
    if not coverage.complete:
        raise Refusal(*coverage_problems(coverage, architecture.num_layers, checkpoint))
    tp = plan_tensor_parallel(
        Dimensions.from_architecture(architecture),
        weight_bytes(weights, architecture, element_bytes(architecture.dtype)),
        options.context_length,
        options.batch_size,
        options.relax,
    )
    reference = choose_reference(architecture)
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
    )


def run(port: Port, options: Options) -> Outcome:
    facts = port.read_state("facts.json", Facts, "research")
    checkpoint = port.read_state("checkpoint.json", Checkpoint, "research")
    plan = make_plan(port.name, facts, checkpoint, options)
    port.write_state("plan.json", plan)
    summary = f"reference {plan.reference_model}, {recommendation(plan.tp)}"
    data = {
        "reference_model": plan.reference_model,
        "sections": plan.sections,
        "tensor_parallel": plan.tp,
        "pitfalls": plan.pitfalls,
        "unconsumed": unconsumed_keys(facts, FAMILIES[plan.architecture.hf_name]),
        "remote_code": facts.remote_code,
        "warnings": facts.warnings,
    }
    if plan.tp.recommended is None:
        return Outcome("red", no_valid_tp(plan.tp), data=data)
    if options.review and not options.confirm:
        return Outcome("waiting", f"{summary}; waiting for review", data=data)
    return Outcome("done", summary, data=data)
