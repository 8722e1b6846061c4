"""Tensor-parallel sizes: five divisibility rules, the memory of a rank, and a recommendation."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from autoport.analysis.device_rules import device_violations, has_segments, slow_paths
from autoport.analysis.dimensions import EXPERT, Dimensions
from autoport.analysis.head_rules import candidate_sizes, head_violations
from autoport.analysis.instances import Instance, find_instance
from autoport.analysis.padding import padded_sizes, padding
from autoport.errors import refuse
from autoport.schema.architecture import Architecture, Attention
from autoport.schema.facts import Fact
from autoport.schema.parallel import TpCandidate, TpPlan, Violation, WeightBytes
from autoport.schema.weights import WeightEntry, WeightMap
from autoport.units import size_text

DEFAULT_CONTEXT = 4096  # tokens per sequence
KV_BYTES_PER_ELEMENT = 2  # the cache is bfloat16

RELAXABLE = {"even-heads": "R2"}
RELAXED_PRICE = {
    "R2": "gives up the fused decode kernel: decode attention is composed of torch operators, which is slower"
}


def parameter_bytes(
    weights: WeightMap, architecture: Architecture, element_bytes: int
) -> dict[str, WeightBytes]:
    """Bytes of each parameter of the port, all layers together, by how they are sharded.

    A tied head counts twice: the port holds it as a parameter of its own.

    Args:
        weights: A map whose shapes were checked against the headers.
        element_bytes: Bytes per element of the port's dtype, whatever the checkpoint's is.
    """
    has_experts = architecture.layers.moe
    layers = {
        "all": architecture.num_layers,
        "moe": sum(has_experts) if has_experts else architecture.num_layers,
        "dense": len(has_experts) - sum(has_experts),
    }
    found: dict[str, WeightBytes] = {}
    for entry in weights.entries:
        copies = (layers[entry.layers] if "{i}" in entry.parameter else 1) * (entry.experts or 1)
        halved = 2 if "split gate, up" in entry.steps else 1  # the tensor belongs to two parameters
        size = 4 if _is_float32(entry) else element_bytes
        sizes = [copies * math.prod(shape) * size // halved for shape in entry.shapes]
        total = _by_sharding(entry, sizes, architecture.attention)
        found[entry.parameter] = found.get(entry.parameter, WeightBytes()) + total
    return found


def _is_float32(entry: WeightEntry) -> bool:
    """Whether the port holds it in float32 whatever its dtype is: routers, and norms that multiply by 1 + w."""
    name = entry.parameter.rpartition(".")[2]
    return name in ("router_weight", "router_bias", "correction_bias") or "add one" in entry.steps


def _by_sharding(entry: WeightEntry, sizes: Sequence[int], attention: Attention) -> WeightBytes:
    """The bytes of an entry's keys, as its transform distributes them."""
    whole = sum(sizes)
    if entry.transform in ("replicated", "row_bias"):
        return WeightBytes(copied=whole)
    if entry.transform == "vocab":
        return WeightBytes(split=whole, embeddings=whole)
    if entry.transform == "kv_heads":
        return WeightBytes(kv_heads=whole)
    if not entry.transform.startswith("fused_qkv"):
        return WeightBytes(split=whole)
    kv_heads = sum(sizes[1:])
    if len(sizes) == 1:
        kv_heads = whole * 2 * attention.num_kv_heads // (attention.num_heads + 2 * attention.num_kv_heads)
    return WeightBytes(split=whole - kv_heads, kv_heads=kv_heads)


def total_bytes(parts: Mapping[str, WeightBytes]) -> WeightBytes:
    return sum(parts.values(), WeightBytes())


def check_rules(size: Dimensions, tp: int, exempt: Collection[str] = ()) -> list[Violation]:
    """Return the rules R1 to R4 that `tp` breaks, with the numbers.

    Args:
        exempt: Names of the sizes that R4 is not about: those that the port pads, or that a rule of their own is for.
    """
    broken = head_violations(size, tp)
    for name, inner in {"intermediate_size": size.intermediate_size, **size.expert_sizes}.items():
        if inner % tp and name not in exempt:
            broken.append(Violation("R4", f"{name} {inner} is not a multiple of {tp}"))
    return broken


def planned_context(wanted: int | None, positions: Fact) -> int:
    """Tokens per sequence that the KV cache is planned for: `wanted`, else 4096 or the model's positions if fewer.

    Raises:
        Refusal: TP-CONTEXT for more tokens than the model has positions, which vLLM does not serve.
    """
    if wanted is None:
        return min(DEFAULT_CONTEXT, positions.value)
    if wanted > positions.value:
        raise refuse(
            "TP-CONTEXT",
            f"a context of {wanted} tokens is longer than the model's {positions.value} positions "
            f"({positions.source})",
            "option --context-length",
            f"use at most {positions.value}; more needs a config.json that says so, such as one with RoPE scaling",
        )
    return wanted


def plan_tensor_parallel(
    size: Dimensions,
    parts: Mapping[str, WeightBytes],
    context_length: int,
    batch_size: int,
    relax: Sequence[str] = (),
    instance: Instance | None = None,
) -> TpPlan:
    """Check every candidate size and recommend the smallest valid one of two or more (else 1).

    A size that needs padding is recommended only where it is a power of two.

    The KV cache of a rank is ``layers * 2 * KV heads per rank * head_dim * tokens * 2 bytes``; of latent attention
    ``layers * (kv_lora_rank + qk_rope_head_dim) * tokens * 2 bytes`` on every rank. A size fits when the weights stay
    below the instance's limit, and weights, cache and reserve together below the memory of a logical core.

    Args:
        parts: Bytes of the weights by part of the model.

    Raises:
        Refusal: TP-RELAX for a rule that cannot be relaxed.
    """
    instance = instance or find_instance()
    relaxed_rules = _relaxed_rules(relax)
    tokens = context_length * batch_size
    bytes_per_kv_head = size.num_layers * 2 * size.head_dim * tokens * KV_BYTES_PER_ELEMENT
    candidates = []
    weights = total_bytes(parts)
    padded = padded_sizes(size)
    latent_bytes = size.num_layers * size.latent_kv * tokens * KV_BYTES_PER_ELEMENT
    for tp in candidate_sizes(size.num_heads, instance.cores):
        broken = check_rules(size, tp, padded)
        divides = not any(violation.rule in ("R1", "R3") for violation in broken)
        if divides and EXPERT not in padded:
            broken += device_violations(size, tp)
        kv_heads = max(1, size.num_kv_heads // tp)
        bytes_per_rank = weights.per_rank(tp, size.num_kv_heads)
        violations = [violation for violation in broken if violation.rule not in relaxed_rules]
        kv_bytes = latent_bytes or kv_heads * bytes_per_kv_head
        violations += memory_violations(bytes_per_rank, kv_bytes, instance)
        candidates.append(
            TpCandidate(
                tp_size=tp,
                violations=violations,
                relaxed=[
                    violation
                    if size.composed
                    else Violation(violation.rule, f"{violation.text}; {RELAXED_PRICE[violation.rule]}")
                    for violation in broken
                    if violation.rule in relaxed_rules
                ],
                kv_heads_per_rank=kv_heads,
                kv_replicas=max(1, tp // size.num_kv_heads),
                weight_bytes_per_rank=bytes_per_rank,
                kv_bytes_per_rank=kv_bytes,
                embedding_bytes_per_rank=-(-weights.embeddings // tp),
                reserve_bytes=instance.reserve_bytes,
                padded_vocab_size=-(-size.vocab_size // tp) * tp,
                padded=padding(size, tp),
                slow_paths=[*slow_paths(size, tp)] if divides else [],
            )
        )
    valid = [candidate.tp_size for candidate in candidates if candidate.valid]
    usual = [item.tp_size for item in candidates if item.valid and _is_usual(item)]
    return TpPlan(
        candidates=candidates,
        recommended=min((tp for tp in usual if tp >= 2), default=1 if 1 in valid else None),
        context_length=context_length,
        batch_size=batch_size,
        weight_limit_bytes=instance.weight_limit_bytes,
        instance=instance.name,
        lnc=instance.lnc,
        cores=instance.cores,
        bytes_per_core=instance.bytes_per_core,
        parts=dict(parts),
        latent_cache=bool(size.latent_kv),
        num_kv_heads=size.num_kv_heads,
        hardware_assumed=bool(instance.assumed),
        reserve_assumed=instance.reserve_assumed,
        assumptions=[*instance.assumptions],
    )


def _is_usual(candidate: TpCandidate) -> bool:
    return not candidate.padded or candidate.tp_size.bit_count() == 1


def memory_violations(weights: int, cache: int, instance: Instance) -> list[Violation]:
    """Rule MEM: the weights alone, then everything that a logical core has to hold."""
    limit, reserve = instance.weight_limit_bytes, instance.reserve_bytes
    hardware = " (assumed)" if instance.assumed else ""
    if weights > limit:
        text = f"{weights / 1e9:.1f} GB of weights per rank, the limit is {limit / 1e9:.0f} GB{hardware}"
        return [Violation("MEM", text)]
    total = weights + cache + reserve
    if total > instance.bytes_per_core:
        kept = (
            f"{'an assumed' if instance.reserve_assumed else 'the given'} reserve of {reserve / 1e9:.0f} GB"
        )
        text = (
            f"{weights / 1e9:.1f} GB of weights, {cache / 1e9:.1f} GB of KV cache and {kept} are "
            f"{total / 1e9:.1f} GB; a logical core has {instance.bytes_per_core / 1e9:.0f} GB{hardware}"
        )
        return [Violation("MEM", text)]
    return []


def _relaxed_rules(relax: Iterable[str]) -> set[str]:
    unknown = sorted(set(relax) - RELAXABLE.keys())
    if unknown:
        raise refuse(
            "TP-RELAX",
            f"cannot relax {', '.join(unknown)}",
            "option --relax",
            f"use {' or '.join(RELAXABLE)}",
        )
    return {RELAXABLE[name] for name in relax}


def recommendation(plan: TpPlan) -> str:
    """The recommendation as a sentence."""
    valid = [candidate.tp_size for candidate in plan.candidates if candidate.valid]
    if plan.recommended is None:
        return "no valid TP"
    if valid == [1]:
        return "TP 1 (the only valid size)"
    text = f"TP {plan.recommended} (valid: {', '.join(map(str, valid))})"
    faster = _without_slow_paths(plan)
    return f"{text}; TP {faster} is the smallest without slow paths" if faster else text


def _without_slow_paths(plan: TpPlan) -> int | None:
    """The smallest size without slow paths and with segments; None when it is the recommended one, or for none."""
    fast = (
        item.tp_size
        for item in plan.candidates
        if item.valid and _is_usual(item) and has_segments(item.tp_size)
        if not item.slow_paths and not item.relaxed
    )
    smallest = min(fast, default=None)
    return None if smallest == plan.recommended else smallest


def no_valid_tp(plan: TpPlan) -> str:
    """Why no size is valid, one rule per size, and which sizes relaxing would allow."""
    rules = ", ".join(f"{item.tp_size}: {item.violations[0].rule}" for item in plan.candidates)
    first = plan.candidates[0].violations[0]
    text = f"no valid TP ({rules}); {first.rule}: {first.text}"
    for name, rule in RELAXABLE.items():
        broken = {item.tp_size: {violation.rule for violation in item.violations} for item in plan.candidates}
        allowed = [tp for tp, only in broken.items() if only == {rule}]
        if allowed:
            text += f"; --relax {name} would allow TP {', '.join(map(str, allowed))}"
    return text


def candidate_rows(plan: TpPlan) -> list[tuple[str, ...]]:
    """The plan as table rows: TP, verdict, reasons, KV heads, weights and KV cache per rank."""
    rows = []
    vocabulary = plan.candidates[0].padded_vocab_size  # the first one is TP 1
    for candidate in plan.candidates:
        verdict = "no" if candidate.violations else ("relaxed" if candidate.relaxed else "yes")
        if candidate.tp_size == plan.recommended:
            verdict += " (recommended)"
        reasons = [f"{item.rule}: {item.text}" for item in candidate.violations]
        reasons += [f"{item.rule} relaxed: {item.text}" for item in candidate.relaxed]
        if candidate.valid:
            reasons += [f"{item.rule}: {item.text}" for item in candidate.padded]
            if candidate.padded_vocab_size != vocabulary:
                filled = candidate.padded_vocab_size
                reasons.append(f"R5: vocab_size {vocabulary} is filled up with zeros to {filled}")
            reasons += [f"slow: {item.rule}: {item.text}" for item in candidate.slow_paths]
        if all(violation.rule == "MEM" for violation in candidate.violations):
            kv = str(candidate.kv_heads_per_rank)
            if plan.latent_cache:
                kv = "latent"
            elif candidate.kv_replicas > 1:
                kv += f" (replicated x{candidate.kv_replicas}: {candidate.kv_replicas} ranks share a head)"
            sizes = [candidate.weight_bytes_per_rank, candidate.kv_bytes_per_rank]
            numbers = [kv, *map(size_text, sizes)]
        else:
            numbers = ["", "", ""]
        rows.append((str(candidate.tp_size), verdict, "\n".join(reasons), *numbers))
    return rows


CANDIDATE_COLUMNS = ("TP", "Valid", "Why", "KV heads per rank", "Weights per rank", "KV cache per rank")
