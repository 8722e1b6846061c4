"""Step "prove": the port on the simulator against the Hugging Face class; writes proof.json."""

import msgspec

from autoport.codegen.document import record_results
from autoport.codegen.gaps import unwritten
from autoport.errors import refuse
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.schema.plan import Plan
from autoport.step import Options, Outcome
from autoport.validation import real_size
from autoport.validation.prove import FOLDER, prepare, prove
from autoport.validation.ranks import check_installed
from autoport.validation.simulated import Subject
from autoport.validation.summary import feature_results, summarise
from autoport.validation.tp_sizes import choose_tp_sizes
from autoport.validation.variant_proof import run as prove_variant


def run(port: Port, options: Options) -> Outcome:
    plan = port.read_state("plan.json", Plan, "analyze")
    facts = port.read_state("facts.json", Facts, "research")
    model_dir = port.workspace.model_dir(port.name)
    if not (model_dir / "model.py").is_file():
        raise refuse(
            "PORT-ORDER", "model.py is missing", model_dir, f"run '{port.command('generate')}' first"
        )
    check_installed()
    tp_sizes, not_run = choose_tp_sizes(plan.tp, options.tp_sizes)
    subject = Subject(
        workspace=str(port.workspace.root),
        package=port.workspace.package,
        name=port.name,
        factory=plan.architecture.hf_name,
        out_of_tree=port.workspace.module if isinstance(port.workspace, PackageWorkspace) else "",
    )
    port.manifest.incomplete = unwritten(port)
    (port.state_dir / "proof.json").unlink(missing_ok=True)
    prepared = prepare(facts, port.state_dir)
    proof = prove(subject, prepared, tp_sizes, not_run, port.state_dir)
    if proof.passed:
        found = real_size.check(subject, facts, plan, port.state_dir / FOLDER)
        proof = msgspec.structs.replace(proof, real_size=found, passed=not (found and found.failure))
    port.write_state("proof.json", proof)
    variant = prove_variant(port, plan.stored_as, tp_sizes) if plan.stored_as and proof.passed else None
    changed = record_results(port, feature_results(proof))
    if variant is not None:
        summary = f"{summarise(proof)}; {plan.stored_as}: {variant.summary}"
        return Outcome(variant.status, summary, data=proof, files=changed)
    return Outcome("done" if proof.passed else "red", summarise(proof), data=proof, files=changed)
