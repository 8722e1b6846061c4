"""The reference model: which registered model a port starts from, and what differs from it."""

from typing import Any

import yaml

from autoport.resources import references_dir
from autoport.schema import Architecture, Facts, Pitfall, Rope, Section, TpPlan, WeightMap

TABLE = "reference-models.yaml"


def load_table() -> dict[str, Any]:
    """The selection table and the reference models' sections (`references/reference-models.yaml`)."""
    table: dict[str, Any] = yaml.safe_load((references_dir() / TABLE).read_text(encoding="utf-8"))
    return table


def features(architecture: Architecture) -> set[str]:
    """Names of the traits that the selection table speaks of."""
    return {"gqa_rope"} | ({"qkv_bias"} if architecture.attention.qkv_bias else set())


def choose_reference(architecture: Architecture) -> str:
    """The reference of the first row of the table whose trait the model has."""
    present = features(architecture)
    return next(row["reference"] for row in load_table()["selection"] if row["trait"] in present)


def compare(architecture: Architecture, facts: Facts, weights: WeightMap, reference: str) -> list[Section]:
    """Compare the model with its reference, one row per section of model.py."""
    described = load_table()["models"][reference]["sections"]
    source = {name: fact.source for name, fact in facts.fields.items()}
    attention, rope, mlp = architecture.attention, architecture.rope, architecture.mlp
    bias = "with" if attention.qkv_bias else "without"
    loaded = f"{len(weights.entries)} kinds of parameters; left out: " + (
        "; ".join(f"{item.pattern} ({item.reason})" for item in weights.ignored) or "nothing"
    )
    targets = {
        "norm": (f"RMSNorm, eps {architecture.norm.eps:g}", "eps", source["norm_eps"]),
        "rope": _rope_row(rope, source),
        "attention": (
            f"{attention.num_heads} query and {attention.num_kv_heads} KV heads of {attention.head_dim}, "
            f"{bias} bias on q, k and v",
            "add qkv_proj_bias (2-D for the decode kernel)" if attention.qkv_bias else "sizes",
            f"{source['num_kv_heads']}; {source['head_dim']}; biases: keys of every layer",
        ),
        "mlp": (
            f"{mlp.kind}, {mlp.activation}, intermediate {mlp.intermediate_size}",
            "sizes",
            f"{source['intermediate_size']}; {source['activation']}",
        ),
        "moe": ("none", "none", "checkpoint keys"),
        "decoder": ("pre-norm, sequential", "none", "checkpoint keys"),
        "backbone": (
            f"{architecture.num_layers} layers, hidden {architecture.hidden_size}, "
            f"vocabulary {architecture.vocab_size}",
            "sizes",
            f"{source['num_layers']}; {source['hidden_size']}; {source['vocab_size']}",
        ),
        "head": (
            "tied to the embedding" if architecture.head.tied else "untied",
            "map lm_head.weight to the embedding's key" if architecture.head.tied else "own lm_head.weight",
            source["tie_word_embeddings"],
        ),
        "weights": (loaded, "weight map", "safetensors headers"),
    }
    return [
        Section(name, described[name], target, change, where)
        for name, (target, change, where) in targets.items()
    ]


def _rope_row(rope: Rope | None, source: dict[str, str]) -> tuple[str, str, str]:
    if rope is None:
        return "none", "no rotary embedding", "the class"
    numbers = {name: number for name, number in rope.parameters.items() if isinstance(number, (int, float))}
    scaling = ", ".join(f"{name} {number:g}" for name, number in numbers.items())
    partial = f", {rope.rotary_dim} dimensions of a head" if rope.rotary_dim else ""
    pairs = ", neighbours paired" if rope.pairing == "interleaved" else ""
    return (
        f"{rope.kind}, theta {rope.theta:g}" + (f" ({scaling})" if scaling else "") + partial + pairs,
        "theta" + (" and scaling" if scaling else "; no scaling"),
        f"{source['rope_theta']}; {source['rope_type']}",
    )


def pitfalls(architecture: Architecture, facts: Facts, tp: TpPlan) -> list[Pitfall]:
    """What is known to go wrong with a model of this shape, by rule id."""
    value, source = facts.fields["norm_eps"].value, facts.fields["norm_eps"].source
    found = [
        Pitfall(
            "PIT-META",
            "the model is built on the meta device: inv_freq is computed in forward, not in __init__",
        ),
        Pitfall("PIT-NORM-EPS", f"norm eps is {value:g} ({source})"),
    ]
    rope = architecture.rope
    if rope is not None:
        text = f"rope_theta is {rope.theta:g}; a fallback of 10000 passes a smoke test"
        found.insert(1, Pitfall("PIT-ROPE-THETA", text))
    if architecture.attention.composed:
        reasons = "; ".join(architecture.attention.composed)
        text = f"attention is composed of smaller operators, which is slower than the fused ones: {reasons}"
        found.append(Pitfall("PERF-COMPOSED", text))
    if architecture.attention.qkv_bias:
        found.append(Pitfall("PIT-BIAS-2D", "the decode kernel takes biases of shape [1, size], not [size]"))
    if rope is not None and rope.kind == "llama3":
        original = rope.parameters["original_max_position_embeddings"]
        found.append(
            Pitfall(
                "PIT-ROPE-LONG",
                f"a missing RoPE scaling shows only in positions beyond {original:g}; compare inv_freq",
            )
        )
    if architecture.head.tied:
        found.append(
            Pitfall("PIT-TIED", "lm_head.weight must be mapped to the embedding's key, or it stays random")
        )
    if "derived" in facts.fields["head_dim"].source:
        found.append(
            Pitfall(
                "PIT-HEAD-DIM", "head_dim is derived; it was checked against the rows of q_proj and k_proj"
            )
        )
    if any(candidate.valid and candidate.kv_replicas > 1 for candidate in tp.candidates):
        kv = architecture.attention.num_kv_heads
        found.append(
            Pitfall(
                "PIT-KV-REPLICAS", f"above TP {kv} ranks hold copies of KV heads: load by copy, not by slice"
            )
        )
    if any(candidate.valid and candidate.relaxed for candidate in tp.candidates):
        found.append(
            Pitfall(
                "PIT-ODD-HEADS", "an odd number of heads per rank: decode does not run in the fused kernel"
            )
        )
    if facts.remote_code:
        found.append(
            Pitfall("PIT-REMOTE-CODE", "the checkpoint ships its own classes (auto_map); they were not run")
        )
    return found
