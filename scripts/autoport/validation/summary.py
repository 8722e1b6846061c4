"""What a proof says, for the table of steps, the feature table of the port's README and the report."""

from collections.abc import Sequence

from autoport.codegen.features import FeatureResult
from autoport.schema.proof import Proof, ProofRun, RealSize, SectionError
from autoport.validation.scenario import SAMPLING

INTERVAL = "90 % interval"  # between the quantiles of `Ratio`
UNCERTAIN = (
    "the interval reaches the limit {limit} (R is below it and float32 is equal, so at most a rounding differs; the "
    "logit test on the device decides)"
)

# Row of the README's feature table, the phases that show it, and the smallest TP size that does.
FEATURE_PHASES = (
    ("TP (head sharding)", ("prefill", "decode"), 2),
    ("SP (sequence parallel)", ("prefill",), 2),
    ("Segmented prefill", ("segmented prefill",), 1),
    ("On-device sampling", ("on-device sampling",), 1),
)


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
    return f"at the config's own sizes (TP {found.tp_size}, {found.context_length} tokens, shapes only)"


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
        f"equals {proof.reference} on the simulator at TP {sizes}: error {error:.1e} (limit "
        f"{proof.max_relative_error_limit:.1e}) and the same tokens in float32; bfloat16 R {worst.value:.2f} "
        f"({INTERVAL} {worst.low:.2f} to {worst.high:.2f}, limit {proof.r_ratio_limit}), where some tokens may differ"
        + (f", not certain: {UNCERTAIN.format(limit=proof.r_ratio_limit)}" if uncertain else "")
        + "".join(f"; not at TP {size} ({reason})" for size, reason in proof.not_run.items())
        + (f"; {_notes(slow)}" if slow else "")
        + (f"; {_at_real_size(proof.real_size)}: {_count(real_size_notes(proof))}" if proof.real_size else "")
    )


def _count(notes: Sequence[str]) -> str:
    return _notes(len(notes)) if notes else "no rule broken"


def _notes(count: int) -> str:
    return f"{count} slow-path note{'s' if count != 1 else ''}"
