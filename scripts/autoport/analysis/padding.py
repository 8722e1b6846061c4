"""Which sizes are filled up with zeros, so that the ranks hold equal parts.

A column of zeros in the gate and up projections, and in their biases, meets a row of zeros in the down projection:
whatever the activation makes of it adds exactly nothing. The vocabulary is filled up with rows of zeros, which are
never sampled.
"""

from autoport.analysis.attention import PARTITIONS
from autoport.analysis.dimensions import EXPERT, Dimensions
from autoport.analysis.head_rules import candidate_sizes, head_violations
from autoport.schema.parallel import Violation

EXPERT_MULTIPLE = 16  # of an expert's columns on a rank, from 128 on: moe_cte raises an error otherwise


def padded_sizes(size: Dimensions) -> set[str]:
    """Names of the sizes that do not fit one of the TP sizes that the heads allow; the port pads these."""
    allowed = _allowed_by_heads(size)
    return {name for name, real in _sizes(size).items() if not all(_fits(name, real, tp) for tp in allowed)}


def padding(size: Dimensions, tp: int) -> list[Violation]:
    """What the port fills up at `tp`, for the table of sizes (the vocabulary is `TpCandidate.padded_vocab_size`)."""
    notes = []
    for name in sorted(padded_sizes(size) - {"vocab_size"}):
        real, shard = _sizes(size)[name], padded_shard(name, _sizes(size)[name], tp)
        if shard * tp != real:
            more = f"{100 * (shard * tp / real - 1):.2g} % more weights than counted"
            text = f"{name} {real} is filled up with zeros to {shard * tp} ({more})"
            notes.append(Violation("PAD-INNER", text))
    return notes


def padded_shard(name: str, real: int, tp: int) -> int:
    """What a rank holds of a size that is padded."""
    multiple = EXPERT_MULTIPLE if name == EXPERT else 1
    return -(-real // (multiple * tp)) * multiple


def _allowed_by_heads(size: Dimensions) -> list[int]:
    return [tp for tp in candidate_sizes(size.num_heads) if tp == 1 or not head_violations(size, tp)]


def _fits(name: str, real: int, tp: int) -> bool:
    shard, rest = divmod(real, tp)
    return not rest and (name != EXPERT or shard < PARTITIONS or shard % EXPERT_MULTIPLE == 0)


def _sizes(size: Dimensions) -> dict[str, int]:
    return {
        "intermediate_size": size.intermediate_size,
        **size.expert_sizes,
        "vocab_size": size.vocab_size,
    }
