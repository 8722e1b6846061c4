"""The proof of one variant: the port with that implementation selected, against the Hugging Face class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoport.errors import refuse
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.schema.plan import Plan
from autoport.step import Outcome
from autoport.validation.metrics import relative_errors
from autoport.validation.prove import (
    FOLDER,
    RELATIVE_ERROR_LIMIT,
    Prepared,
    Reference,
    float32_twin,
    prepare,
    prove,
    run_reference,
)
from autoport.validation.quantize import quantize
from autoport.validation.ranks import check_installed
from autoport.validation.scenario import SEQUENCES
from autoport.validation.simulated import Subject
from autoport.validation.summary import summarise
from autoport.validation.tp_sizes import choose_tp_sizes
from autoport.variants import Variant, read_variants

# Part of the quantisation error that a proof lets pass: a port that reads the stored values right computes the
# same as the reference with these values, so what is left is the arithmetic's own error.
ERROR_SHARE = 0.01


def run(port: Port, name: str, tp_sizes: Sequence[int]) -> Outcome:
    """Prove a variant; writes ``proof_<name>.json``.

    A weight format is proven on the twin stored in it. The reference is the Hugging Face class with the values
    that the format leaves, and the limit in float32 is `ERROR_SHARE` of what the format changes in its logits,
    or the usual limit where that is less.

    Raises:
        Refusal: VAR-UNKNOWN; PROOF-FORMAT when the twin has nothing to quantise; what the proof refuses.
    """
    variant = next((item for item in read_variants(port.workspace, port.name) if item.name == name), None)
    if variant is None:
        raise refuse(
            "VAR-UNKNOWN",
            f"{port.name} has no variant {name!r}",
            port.state_dir,
            f"autoport add-variant {port.name} {name}",
        )
    plan = port.read_state("plan.json", Plan, "analyze")
    facts = port.read_state("facts.json", Facts, "research")
    check_installed()
    sizes, not_run = choose_tp_sizes(plan.tp, tp_sizes)
    state_dir = port.state_dir / "variants" / name
    prepared, measured = prepare(facts, state_dir), 0.0
    if variant.formats:
        prepared, measured = quantized(prepared, name, state_dir / FOLDER)
    subject = Subject(
        workspace=str(port.workspace.root),
        package=port.workspace.package,
        name=port.name,
        factory=plan.architecture.hf_name,
        platform=next(iter((*variant.default_on, *variant.platforms)), ""),
        config=chosen_by(variant, prepared.config),
        module=variant.module,
        out_of_tree=port.workspace.module if isinstance(port.workspace, PackageWorkspace) else "",
    )
    proof = prove(subject, prepared, sizes, not_run, state_dir)
    state = f"proof_{name}.json"
    port.write_state(state, proof)
    note = f"; {name} changes the reference's logits by {measured:.1e}" if measured else ""
    return Outcome(
        "done" if proof.passed else "red", summarise(proof).replace("proof.json", state) + note, data=proof
    )


def quantized(prepared: Prepared, name: str, folder: Path) -> tuple[Prepared, float]:
    """The same for the twin stored in format `name`, and the largest relative change of the reference's logits.

    Raises:
        Refusal: PROOF-FORMAT.
    """
    checkpoint, plain = folder / name, folder / "dequantized"
    if not quantize(prepared.checkpoint, name, checkpoint, plain):
        raise refuse(
            "PROOF-FORMAT",
            f"the model has no weights that {name} stores",
            prepared.checkpoint,
            "mxfp4 is for stacked experts, the others for linear layers",
        )
    expected = run_reference(plain)
    measured = change(prepared.reference, expected)
    limit = min(RELATIVE_ERROR_LIMIT, ERROR_SHARE * measured)
    changed = prepared._replace(
        checkpoint=checkpoint,
        reference=expected,
        float32=float32_twin(checkpoint, plain, prepared.eps),
        error_limit=limit,
        sections=False,
        more=list,
    )
    return changed, measured


def change(original: Reference, quantized: Reference) -> float:
    """Largest relative difference of the references' logits at the positions of the prompts."""
    return max(
        float(relative_errors(quantized.logits["float32"][key][:end], logits[:end]).max())
        for key, logits in original.logits["float32"].items()
        for end in [SEQUENCES[key].prompt_length]
    )


def chosen_by(variant: Variant, config: dict[str, Any]) -> dict[str, Any]:
    """Attributes that the user would set to select the variant: those of its rules that the config lacks."""
    return {
        condition.field: condition.value
        for condition in variant.when
        if condition.op == "==" and "." not in condition.field and condition.field not in config
    }
