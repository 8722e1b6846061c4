"""What one rank holds at a tensor-parallel size, part by part, as rows of a table."""

from autoport.errors import refuse
from autoport.schema.parallel import TpCandidate, TpPlan
from autoport.units import size_text

MEMORY_COLUMNS = ("What", "Per rank", "How")


def memory_rows(plan: TpPlan, tp: int) -> list[tuple[str, str, str]]:
    """Weights as they are sharded, the KV cache, the reserve, the sum, and what is broken, slow or padded.

    Raises:
        Refusal: TP-EXPLAIN for a size that the plan does not have.
    """
    candidate = next((item for item in plan.candidates if item.tp_size == tp), None)
    if candidate is None:
        sizes = ", ".join(str(item.tp_size) for item in plan.candidates)
        why = "R1: the query heads are not a multiple of it"
        if tp > plan.cores:
            why = f"{plan.instance} has {plan.cores} logical cores at LNC {plan.lnc}"
        found = f"TP {tp} is not in the table: {why}"
        raise refuse("TP-EXPLAIN", found, "option --explain", f"use one of {sizes}")
    rows = [
        (name, size_text(part.per_rank(tp, plan.num_kv_heads)), _how(plan, tp, name))
        for name, part in plan.parts.items()
    ]
    total = candidate.weight_bytes_per_rank + candidate.kv_bytes_per_rank + candidate.reserve_bytes
    reserve = "assumed: " if plan.reserve_assumed else "as given: "
    hardware = ", assumed" if plan.hardware_assumed else ""
    rows += [
        (
            "all weights",
            size_text(candidate.weight_bytes_per_rank),
            f"{size_text(candidate.embedding_bytes_per_rank)} of it embeddings and head",
        ),
        ("KV cache", size_text(candidate.kv_bytes_per_rank), _cache(plan, candidate)),
        (
            "reserve",
            size_text(candidate.reserve_bytes),
            f"{reserve}compiled graphs, activations, collectives",
        ),
        ("total", size_text(total), f"of {size_text(plan.bytes_per_core)} per logical core{hardware}"),
    ]
    if candidate.padded_vocab_size != plan.candidates[0].padded_vocab_size:  # the first one is TP 1
        rows.append(("padding", "", f"vocabulary to {candidate.padded_vocab_size}, with rows of zeros"))
    rows += [("padding", "", item.text) for item in candidate.padded]
    rows += [(violation.rule, "broken", violation.text) for violation in candidate.violations]
    return rows + [(slow.rule, "slow", slow.text) for slow in candidate.slow_paths]


def _cache(plan: TpPlan, candidate: TpCandidate) -> str:
    copies = f", {candidate.kv_replicas} ranks share each" if candidate.kv_replicas > 1 else ""
    heads = f"{candidate.kv_heads_per_rank} KV heads{copies}"
    if plan.latent_cache:
        heads = "latent, whole on every rank"
    return f"{heads}; {plan.batch_size} x {plan.context_length} tokens in bfloat16"


def _how(plan: TpPlan, tp: int, name: str) -> str:
    part = plan.parts[name]
    if tp == 1:
        return "whole"
    ways = [f"split {tp} ways"] if part.split else []
    if part.kv_heads:
        ways.append(f"k and v split {min(tp, plan.num_kv_heads)} ways")
    if part.copied:
        ways.append(
            "whole on every rank"
            if part.copied == part.total
            else f"{size_text(part.copied)} whole on every rank"
        )
    return ", ".join(ways)
