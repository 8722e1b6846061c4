"""Runs the tiny twin through the port and through the Hugging Face class, and judges the differences."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autoport.codegen.gaps import MARK
from autoport.schema import Facts, PhaseProof, Proof, ProofRun, SectionError
from autoport.validation import divergence, metrics, ranks, reference
from autoport.validation.scenario import PHASES, SAMPLING, SEQUENCES, SPANS, draw_prompts
from autoport.validation.shrink import shrink
from autoport.validation.simulated import DTYPES, Dtype, SimulatedRun, Subject, run_scenario
from autoport.validation.twin import build

if TYPE_CHECKING:
    import torch

SEED = 0
RELATIVE_ERROR_LIMIT = 1e-4  # float32, at every position; a correct port is at a few 1e-6
R_LIMIT = 1.2  # bfloat16, the usual limit of the three-tensor comparison
TIME_LIMIT = 600.0  # seconds for one run
FOLDER = "proof"  # in the port's state folder


class Reference(NamedTuple):
    """The Hugging Face class on the twin: greedily continued prompts, logits [positions, vocab_size]."""

    sequences: dict[str, list[int]]
    logits: "dict[Dtype, dict[str, torch.Tensor]]"


class Prepared(NamedTuple):
    """What every run is compared with: the twin's config and checkpoint, and the reference's logits.

    Attributes:
        error_limit: Limit of the relative error in float32.
        sections: Whether a red run looks for the first section that differs.
    """

    config: dict[str, Any]
    checkpoint: Path
    reference: Reference
    error_limit: float = RELATIVE_ERROR_LIMIT
    sections: bool = True


def prepare(facts: Facts, state_dir: Path) -> Prepared:
    """Build the twin in ``<state_dir>/proof/twin`` and run the reference on it.

    Raises:
        Refusal: PROOF-VLLM, PROOF-CLASS or TWIN-SHRINK.
    """
    ranks.check_installed()
    ranks.warm_up()
    shutil.rmtree(state_dir / FOLDER, ignore_errors=True)
    twin_config = shrink(facts)
    checkpoint = build(twin_config, state_dir / FOLDER / "twin", SEED)
    return Prepared(twin_config, checkpoint, run_reference(checkpoint))


def prove(
    subject: Subject,
    prepared: Prepared,
    tp_sizes: Sequence[int],
    not_run: dict[int, str],
    state_dir: Path,
) -> Proof:
    """Prove a port at `tp_sizes`, in float32 and, where that is green, in bfloat16.

    The logs of the ranks stay in ``<state_dir>/proof``.

    Args:
        not_run: Reasons for TP sizes that are left out, for the report.
    """
    runs: list[ProofRun] = []
    for tp_size in tp_sizes:
        for dtype in DTYPES:
            run = prove_run(subject, prepared, tp_size, dtype, state_dir)
            runs.append(run)
            if run.failure:
                break
    return Proof(
        passed=bool(runs) and not any(run.failure for run in runs),
        ran_on="simulator",
        reference=subject.factory,
        twin=prepared.config,
        seed=SEED,
        max_relative_error_limit=prepared.error_limit,
        r_ratio_limit=R_LIMIT,
        runs=runs,
        not_run=not_run,
        versions=ranks.versions(),
    )


def run_reference(twin: Path) -> Reference:
    """Continue the prompts greedily in float32, then compute all logits in both dtypes."""
    import torch

    model = reference.load(twin, torch.float32)
    prompts = draw_prompts(model.config.vocab_size, SEED)
    sequences = {
        name: prompt + reference.greedy(model, prompt, SEQUENCES[name].steps)
        for name, prompt in prompts.items()
    }
    logits: dict[Dtype, dict[str, torch.Tensor]] = {}
    for dtype in DTYPES:
        model = reference.load(twin, getattr(torch, dtype))
        logits[dtype] = {name: reference.logits(model, ids) for name, ids in sequences.items()}
    return Reference(sequences, logits)


def prove_run(subject: Subject, prepared: Prepared, tp_size: int, dtype: Dtype, state_dir: Path) -> ProofRun:
    """Run the port at one TP size and dtype, and compare."""
    log_dir = state_dir / FOLDER / f"tp{tp_size}-{dtype}"
    started = time.monotonic()
    observed: SimulatedRun | None = None
    phases: list[PhaseProof] = []
    log = log_dir / "rank0.log"
    try:
        observed = ranks.run(
            run_scenario,
            tp_size,
            subject,
            str(prepared.checkpoint),
            dtype,
            prepared.reference.sequences,
            log_dir=log_dir,
            timeout=TIME_LIMIT,
        )
    except ranks.RankError as error:
        failure, log = error.error, error.log
    else:
        phases = [
            compare(phase, dtype, observed.logits, prepared.reference, prepared.error_limit)
            for phase in PHASES
        ]
        failure = "; ".join(phase.failure for phase in phases if phase.failure)
        failure = failure or _hardware_failure(observed)
    sections, diverges = _sections(subject, prepared, tp_size, dtype, phases, failure, log_dir)
    return ProofRun(
        tp_size=tp_size,
        dtype=dtype,
        phases=phases,
        hardware=observed.hardware if observed else [],
        collectives=observed.collectives if observed else {},
        seconds=round(time.monotonic() - started, 2),
        failure=failure,
        log=str(log.relative_to(subject.workspace)),
        sections=sections,
        diverges=diverges,
    )


def _sections(
    subject: Subject,
    prepared: Prepared,
    tp_size: int,
    dtype: Dtype,
    phases: Sequence[PhaseProof],
    failure: str,
    log_dir: Path,
) -> tuple[list[SectionError], SectionError | None]:
    """The sections of the first red phase, or before what is not written yet, and the first that differs."""
    red = next((phase for phase in phases if phase.failure), None)
    if (red is None and MARK not in failure) or not prepared.sections:
        return [], None
    try:
        sections = divergence.find(
            subject,
            prepared.checkpoint,
            prepared.reference.sequences,
            red,
            tp_size,
            dtype,
            log_dir / "sections",
            TIME_LIMIT,
        )
    except ranks.RankError:
        return [], None  # the verdict stands without it
    return sections, divergence.first_divergence(sections, dtype)


def compare(
    phase: str,
    dtype: Dtype,
    observed: "dict[tuple[str, str], torch.Tensor]",
    expected: Reference,
    limit: float = RELATIVE_ERROR_LIMIT,
) -> PhaseProof:
    """Judge one phase: in float32 by error and greedy tokens, in bfloat16 by R."""
    import torch

    spans = [span for span in SPANS if span.phase == phase]
    places = [(span.sequence, position) for span in spans for position in range(span.start, span.stop)]

    def reference_rows(kind: Dtype) -> "torch.Tensor":
        return torch.cat([expected.logits[kind][span.sequence][span.start : span.stop] for span in spans])

    port = torch.cat([observed[phase, span.sequence] for span in spans])
    expected32, expected16 = reference_rows("float32"), reference_rows("bfloat16")
    if port.shape != expected32.shape:
        found = f"{phase}: logits {list(port.shape)}, the reference has {list(expected32.shape)}"
        return PhaseProof(phase, len(places), None, "", 0, 0, failure=found)
    errors = metrics.relative_errors(port, expected32)
    worst = int(errors.argmax())
    error = float(errors[worst])
    # A token is sampled at the last position of a prompt and in decode.
    sampled = [row for row, (name, at) in enumerate(places) if at >= SEQUENCES[name].prompt_length - 1]
    differ = int((port[sampled].argmax(-1) != expected32[sampled].argmax(-1)).sum())
    ratio = metrics.r_ratio(port, expected16, expected32, SEED) if dtype == "bfloat16" else None
    where = "position {1} of the {0} sequence".format(*places[worst])

    failures = []
    if ratio is not None:
        # On-device sampling has too few positions for R; its tokens were compared with the port's logits.
        if phase != SAMPLING and (ratio.value is None or ratio.value >= R_LIMIT):
            failures.append(
                f"R {'not finite' if ratio.value is None else f'{ratio.value:.2f}'}, limit {R_LIMIT}"
            )
    else:
        if error > limit:
            failures.append(f"relative error {error:.1e} at {where}, limit {limit:.0e}")
        if differ:
            failures.append(f"{differ} of {len(sampled)} greedy tokens differ")
    return PhaseProof(
        phase=phase,
        positions=len(places),
        max_relative_error=error if error < float("inf") else None,
        worst=where,
        tokens=len(sampled),
        tokens_differ=differ,
        r_ratio=ratio,
        failure=f"{phase}: {', '.join(failures)}" if failures else "",
    )


def _hardware_failure(observed: SimulatedRun) -> str:
    broken = [record for record in observed.hardware if record.kind == "error"]
    return "; ".join(f"device rule {record.operator}/{record.rule}: {record.message}" for record in broken)
