"""Runs the tiny twin through the port and through the Hugging Face class, and judges the differences."""

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autoport.codegen.gaps import MARK
from autoport.research.config import read_facts
from autoport.research.source import open_source
from autoport.schema.facts import Facts
from autoport.schema.proof import PhaseProof, Proof, ProofRun, SectionError
from autoport.validation import divergence, metrics, ranks, reference
from autoport.validation.norm_eps import shown_eps, with_eps
from autoport.validation.reach import beyond_reach
from autoport.validation.scenario import PHASES, SAMPLING, SEQUENCES, SPANS, draw_sequences
from autoport.validation.shrink import shrink
from autoport.validation.simulated import DTYPES, Dtype, SimulatedRun, Subject, run_scenario
from autoport.validation.twin import build

if TYPE_CHECKING:
    import torch

SEED = 0
RELATIVE_ERROR_LIMIT = 1e-4  # float32, at every position; a correct port is at a few 1e-6
R_LIMIT = 1.2  # bfloat16, the usual limit of the three-tensor comparison
# R of one twin spreads: over the few positions of decode it was seen from 0.6 to 1.6 for ports that are right.
# An R over the limit is estimated again from more twins, all pooled; beyond the spread, one twin is enough.
R_SPREAD = 2.0
MORE_TWINS = 5
# Rounding makes a token whose experts are nearly tied change experts, in the port as in the reference, and its
# error then says nothing about the arithmetic. In the twins of Mixtral that is up to one position in ten.
TRIMMED_WITH_EXPERTS = 0.2
TIME_LIMIT = 600.0  # seconds for one run
FOLDER = "proof"  # in the port's state folder


class Reference(NamedTuple):
    """The Hugging Face class on the twin: token ids by sequence, logits [positions, vocab_size]."""

    sequences: dict[str, list[int]]
    logits: "dict[Dtype, dict[str, torch.Tensor]]"


class Twin(NamedTuple):
    """A twin's checkpoint, and what the reference computes from it."""

    checkpoint: Path
    reference: Reference


class Prepared(NamedTuple):
    """What every run is compared with: the twin's config and checkpoint, and the reference's logits.

    Attributes:
        eps: Eps of norms by config key, which float32 runs have in place of the twin's.
        float32: What float32 runs load: the same weights, with `eps`.
        error_limit: Limit of the relative error in float32.
        sections: Whether a red run looks for the first section that differs.
        trimmed: Share of the positions that R leaves out, see `metrics.r_ratio`.
        more: Builds twins with other weights and prompts, to estimate R from.
        too_short: What the prompts are too short for; a proof is not green with any.
    """

    config: dict[str, Any]
    checkpoint: Path
    reference: Reference
    eps: dict[str, float]
    float32: Twin
    error_limit: float = RELATIVE_ERROR_LIMIT
    sections: bool = True
    trimmed: float = 0.0
    more: Callable[[], list[Twin]] = list
    too_short: Sequence[str] = ()


def prepare(facts: Facts, state_dir: Path) -> Prepared:
    """Build the twin in ``<state_dir>/proof/twin`` and run the reference on it.

    Raises:
        Refusal: PROOF-VLLM, PROOF-CLASS or TWIN-SHRINK.
    """
    ranks.check_installed()
    ranks.warm_up()
    folder = state_dir / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    config = shrink(facts)

    def twin(name: str, seed: int) -> Twin:
        checkpoint = build(config, folder / name, seed)
        return Twin(checkpoint, run_reference(checkpoint, seed))

    @functools.cache
    def more() -> list[Twin]:
        return [twin(f"twin-{seed}", seed) for seed in range(SEED + 1, SEED + 1 + MORE_TWINS)]

    trimmed = TRIMMED_WITH_EXPERTS if "num_experts" in facts.fields else 0.0
    first = twin("twin", SEED)
    eps = shown_eps(facts)
    float32 = float32_twin(first.checkpoint, first.checkpoint, eps)
    too_short = beyond_reach(read_facts(open_source(str(first.checkpoint))))
    return Prepared(config, *first, eps, float32, trimmed=trimmed, more=more, too_short=too_short)


def float32_twin(checkpoint: Path, plain: Path, eps: dict[str, float]) -> Twin:
    """What float32 runs load: `checkpoint` with `eps`; the reference runs `plain`, which has the same values."""
    return Twin(with_eps(checkpoint, eps), run_reference(with_eps(plain, eps), dtypes=("float32",)))


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
        passed=bool(runs) and not any(run.failure for run in runs) and not prepared.too_short,
        ran_on="simulator",
        reference=subject.factory,
        twin=prepared.config,
        seed=SEED,
        max_relative_error_limit=prepared.error_limit,
        r_ratio_limit=R_LIMIT,
        runs=runs,
        not_run=not_run,
        versions=ranks.versions(),
        too_short=list(prepared.too_short),
    )


def run_reference(twin: Path, seed: int = SEED, dtypes: Sequence[Dtype] = DTYPES) -> Reference:
    """Draw the sequences, and compute all their logits in each dtype.

    The tokens of the decode steps are drawn, too: a model with random weights repeats itself, and repeated
    tokens are no sample to estimate R from.
    """
    import torch

    logits: dict[Dtype, dict[str, torch.Tensor]] = {}
    sequences: dict[str, list[int]] = {}
    for dtype in dtypes:
        model = reference.load(twin, getattr(torch, dtype))
        sequences = draw_sequences(model.config.vocab_size, seed)
        logits[dtype] = {name: reference.logits(model, ids) for name, ids in sequences.items()}
    return Reference(sequences, logits)


def prove_run(subject: Subject, prepared: Prepared, tp_size: int, dtype: Dtype, state_dir: Path) -> ProofRun:
    """Run the port at one TP size and dtype, and compare."""
    log_dir = state_dir / FOLDER / f"tp{tp_size}-{dtype}"
    started = time.monotonic()
    observed: list[SimulatedRun] = []
    phases: list[PhaseProof] = []
    failure, log = "", log_dir / "rank0.log"
    twins = [prepared.float32 if dtype == "float32" else Twin(prepared.checkpoint, prepared.reference)]

    def run_twins() -> list[PhaseProof]:
        for twin in twins[len(observed) :]:
            arguments = (subject, str(twin.checkpoint), dtype, twin.reference.sequences)
            observed.append(ranks.run(run_scenario, tp_size, *arguments, log_dir=log_dir, timeout=TIME_LIMIT))
        pairs = [(run.logits, twin.reference) for run, twin in zip(observed, twins, strict=True)]
        return [compare(phase, dtype, pairs, prepared.error_limit, prepared.trimmed) for phase in PHASES]

    try:
        phases = run_twins()
        if _within_spread(phases):
            twins += prepared.more()
            phases = run_twins()
    except ranks.RankError as error:
        failure, log = error.error, error.log
    else:
        failure = "; ".join(phase.failure for phase in phases if phase.failure)
        failure = failure or _hardware_failure(observed[0])
    sections, diverges = (
        _sections(subject, twins[0], tp_size, dtype, phases, failure, log_dir)
        if prepared.sections
        else ([], None)
    )
    return ProofRun(
        tp_size=tp_size,
        dtype=dtype,
        phases=phases,
        hardware=observed[0].hardware if observed else [],
        collectives=observed[0].collectives if observed else {},
        seconds=round(time.monotonic() - started, 2),
        failure=failure,
        log=str(log.relative_to(subject.workspace)),
        sections=sections,
        diverges=diverges,
        twins=len(observed),
    )


def _within_spread(phases: list[PhaseProof]) -> bool:
    """Whether an R is over the limit, but none by more than R of one twin spreads."""
    failed = [phase.r_ratio for phase in phases if phase.failure]
    return bool(failed) and all(ratio and ratio.value and ratio.value < R_SPREAD for ratio in failed)


def _sections(
    subject: Subject,
    twin: Twin,
    tp_size: int,
    dtype: Dtype,
    phases: Sequence[PhaseProof],
    failure: str,
    log_dir: Path,
) -> tuple[list[SectionError], SectionError | None]:
    """The sections of the first red phase, or before what is not written yet, and the first that differs."""
    red = next((phase for phase in phases if phase.failure), None)
    if red is None and MARK not in failure:
        return [], None
    try:
        sections = divergence.find(
            subject,
            twin.checkpoint,
            twin.reference.sequences,
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
    pairs: "Sequence[tuple[dict[tuple[str, str], torch.Tensor], Reference]]",
    limit: float = RELATIVE_ERROR_LIMIT,
    trimmed: float = 0.0,
) -> PhaseProof:
    """Judge one phase: in float32 by error and greedy tokens, in bfloat16 by R.

    Args:
        pairs: The port's logits and the reference, for each twin.
        limit: Of the relative error in float32.
        trimmed: See `metrics.r_ratio`.
    """
    import torch

    spans = [span for span in SPANS if span.phase == phase]
    places = [(span.sequence, position) for span in spans for position in range(span.start, span.stop)]

    def reference_rows(kind: Dtype) -> "torch.Tensor":
        rows = [
            expected.logits[kind][span.sequence][span.start : span.stop]
            for _, expected in pairs
            for span in spans
        ]
        return torch.cat(rows)

    port = torch.cat([observed[phase, span.sequence] for observed, _ in pairs for span in spans])
    places *= len(pairs)
    expected32 = reference_rows("float32")
    if port.shape != expected32.shape:
        found = f"{phase}: logits {list(port.shape)}, the reference has {list(expected32.shape)}"
        return PhaseProof(phase, len(places), None, "", 0, 0, failure=found)
    errors = metrics.relative_errors(port, expected32)
    worst = int(errors.argmax())
    error = float(errors[worst])
    # A token is sampled at the last position of a prompt and in decode.
    sampled = [row for row, (name, at) in enumerate(places) if at >= SEQUENCES[name].prompt_length - 1]
    differ = int((port[sampled].argmax(-1) != expected32[sampled].argmax(-1)).sum())
    ratio = None
    if dtype == "bfloat16":
        ratio = metrics.r_ratio(port, reference_rows("bfloat16"), expected32, SEED, trimmed)
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
