"""Step "prove": the port on the simulator against the Hugging Face class; writes proof.json."""

from collections.abc import Sequence

import msgspec

from autoport.codegen.document import record_results
from autoport.codegen.features import FeatureResult
from autoport.codegen.gaps import unwritten
from autoport.errors import Problem, Refusal, refuse
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.schema.parallel import TpCandidate, TpPlan
from autoport.schema.plan import Plan
from autoport.schema.proof import Proof, ProofRun, RealSize, SectionError
from autoport.step import Options, Outcome
from autoport.validation import real_size
from autoport.validation.prove import FOLDER, prepare, prove
from autoport.validation.ranks import check_installed
from autoport.validation.scenario import SAMPLING
from autoport.validation.shrink import TP_SIZES
from autoport.validation.simulated import Subject

DEFAULT_TP_SIZES = (1, 2)
UNCERTAIN = (
    "the band reaches the limit {limit} (R is below it and float32 is equal, so at most a rounding differs; the "
    "logit test on the device decides)"
)

# Row of the README's feature table, the phases that show it, and the smallest TP size that does.
FEATURE_PHASES = (
    ("TP (head sharding)", ("prefill", "decode"), 2),
    ("SP (sequence parallel)", ("prefill",), 2),
    ("Segmented prefill", ("segmented prefill",), 1),
    ("On-device sampling", ("on-device sampling",), 1),
)


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
    variant = _prove_variant(port, plan.stored_as, tp_sizes) if plan.stored_as and proof.passed else None
    changed = record_results(port, feature_results(proof))
    if variant is not None:
        summary = f"{summarise(proof)}; {plan.stored_as}: {variant.summary}"
        return Outcome(variant.status, summary, data=proof, files=changed)
    return Outcome("done" if proof.passed else "red", summarise(proof), data=proof, files=changed)


def _prove_variant(port: Port, name: str, tp_sizes: Sequence[int]) -> Outcome:
    """The proof of the implementation that loads the checkpoint that is ported."""
    from autoport.validation.variant_proof import run as prove_variant  # it takes the sizes from this module

    return prove_variant(port, name, tp_sizes)


def _first_section(run: ProofRun) -> str:
    section = run.diverges
    if section is None and run.sections:
        return f"; equal to the reference before that: {', '.join(map(_name, run.sections))}"
    if section is None:
        return ""
    place = f" at {section.where}" if section.where else ""
    return f"; first section that differs: {_name(section)}{place}"


def _name(section: SectionError) -> str:
    return section.section if section.layer is None else f"{section.section} of layer {section.layer}"


def feature_results(proof: Proof) -> dict[str, FeatureResult]:
    """What the proof says of each row of the README's feature table: passed where every run of it passed."""
    results = {}
    for feature, phases, smallest_tp in FEATURE_PHASES:
        runs = [run for run in proof.runs if run.tp_size >= smallest_tp]
        compared = [phase for run in runs for phase in run.phases if phase.phase in phases]
        if not compared:
            continue
        # A run that is red in no phase (a device rule, an exception) is red in all of them.
        everywhere = [run.failure for run in runs if not any(phase.failure for phase in run.phases)]
        failures = [
            text for text in (*proof.too_short, *everywhere, *(phase.failure for phase in compared)) if text
        ]
        first = next((_first_section(run) for run in runs if run.diverges), "")
        sizes = ", ".join(str(size) for size in sorted({run.tp_size for run in runs}))
        note = (
            f"{proof.ran_on}, TP {sizes}: {failures[0] + first if failures else f'equals {proof.reference}'}"
        )
        results[feature] = FeatureResult(passed=not failures, note=note)
    return results


def choose_tp_sizes(plan: TpPlan, wanted: Sequence[int]) -> tuple[list[int], dict[int, str]]:
    """Return the TP sizes to prove, and why a default one or the recommended one is left out.

    By default TP 1 (also where its number of heads is odd, R2) and TP 2 where the plan has it as valid.
    Memory does not count: the twin is tiny.

    Raises:
        Refusal: PROOF-TP for each size in `wanted` that breaks a rule, or that the twin is not made for.
    """
    candidates = {candidate.tp_size: candidate for candidate in plan.candidates}
    if wanted:
        problems = [
            Problem(
                "PROOF-TP",
                f"TP {size}: {reason}",
                "option --tp",
                _other_sizes(size),
            )
            for size in wanted
            if (reason := _reason_against(candidates.get(size), allowed=("MEM",)))
        ]
        if problems:
            raise Refusal(*problems)
        return sorted(set(wanted)), _recommended_left_out(plan, wanted)
    reasons = {
        size: _reason_against(candidates.get(size), allowed=("MEM", "R2") if size == 1 else ("MEM",))
        for size in DEFAULT_TP_SIZES
    }
    chosen = [size for size in reasons if not reasons[size]]
    left_out = {size: why for size, why in reasons.items() if why}
    return chosen, _recommended_left_out(plan, chosen) | left_out


def _other_sizes(size: int) -> str:
    if size in TP_SIZES:
        return "choose one that is valid, see 'autoport compute-tp'"
    return f"choose from {', '.join(map(str, TP_SIZES))}; a green proof runs the shapes at the recommended size too"


def _recommended_left_out(plan: TpPlan, chosen: Sequence[int]) -> dict[int, str]:
    size = plan.recommended
    if size is None or size in chosen:
        return {}
    candidate = next((item for item in plan.candidates if item.tp_size == size), None)
    why = _reason_against(candidate, allowed=("MEM",)) or f"'autoport prove NAME --tp {size}' runs it"
    return {size: f"recommended; {why}"}


def _reason_against(candidate: TpCandidate | None, allowed: tuple[str, ...]) -> str:
    if candidate is None or candidate.tp_size not in TP_SIZES:
        return f"the twin keeps the model's structure at TP {', '.join(map(str, TP_SIZES))} only"
    broken = [violation for violation in candidate.violations if violation.rule not in allowed]
    return "; ".join(f"{violation.rule}: {violation.text}" for violation in broken)


def slow_notes(proof: Proof) -> list[str]:
    """Where the device would leave a fused operator, each once, with the TP sizes of the twin that showed it."""
    sizes: dict[str, dict[int, None]] = {}
    for run in proof.runs:
        for record in run.hardware:
            if record.kind == "fallback":
                sizes.setdefault(f"{record.operator}: {record.message}", {})[run.tp_size] = None
    return [f"TP {', '.join(map(str, found))}: {text}" for text, found in sizes.items()]


def real_size_notes(proof: Proof) -> list[str]:
    """The rules that the shapes at real size met, each once; none if they were not run."""
    found = proof.real_size
    return [f"{record.operator}: {record.message}" for record in found.hardware] if found else []


def _at_real_size(found: RealSize) -> str:
    return f"at real size (TP {found.tp_size}, {found.context_length} tokens, shapes only)"


def summarise(proof: Proof) -> str:
    """One line for the table of steps."""
    if not proof.runs:
        reasons = "; ".join(f"TP {size}: {reason}" for size, reason in proof.not_run.items())
        return f"no tensor-parallel size to prove ({reasons})"
    for run in proof.runs:
        if run.failure:
            found = f"red at TP {run.tp_size}, {run.dtype}: {run.failure}"
            return f"{found}{_first_section(run)} (log: {run.log})"
    if proof.too_short:
        return f"not a proof: {'; '.join(proof.too_short)}"
    if proof.real_size and proof.real_size.failure:
        return f"red {_at_real_size(proof.real_size)}: {proof.real_size.failure}"
    sizes = ", ".join(str(size) for size in dict.fromkeys(run.tp_size for run in proof.runs))
    phases = [phase for run in proof.runs for phase in run.phases]
    error = max(phase.max_relative_error or 0.0 for phase in phases if phase.r_ratio is None)
    ratios = [phase.r_ratio for phase in phases if phase.r_ratio and phase.phase != SAMPLING]
    worst = max(ratios, key=lambda ratio: ratio.value or 0.0)
    uncertain = any((ratio.high or 0.0) >= proof.r_ratio_limit for ratio in ratios)
    slow = len(slow_notes(proof))
    return (
        f"equals {proof.reference} on the simulator at TP {sizes}: error {error:.1e} and the same tokens in float32; "
        f"bfloat16 R {worst.value:.2f} [{worst.low:.2f}, {worst.high:.2f}], where some tokens may differ"
        + (f", not certain: {UNCERTAIN.format(limit=proof.r_ratio_limit)}" if uncertain else "")
        + "".join(f"; not at TP {size} ({reason})" for size, reason in proof.not_run.items())
        + (f"; {_notes(slow)}" if slow else "")
        + (f"; {_at_real_size(proof.real_size)}: {_count(real_size_notes(proof))}" if proof.real_size else "")
    )


def _count(notes: Sequence[str]) -> str:
    return _notes(len(notes)) if notes else "no rule broken"


def _notes(count: int) -> str:
    return f"{count} slow-path note{'s' if count != 1 else ''}"
