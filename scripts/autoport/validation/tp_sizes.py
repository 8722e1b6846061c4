"""The tensor-parallel sizes that a proof runs at."""

from collections.abc import Sequence

from autoport.errors import Problem, Refusal
from autoport.schema.parallel import TpCandidate, TpPlan
from autoport.validation.shrink import TP_SIZES

DEFAULT_TP_SIZES = (1, 2)


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
