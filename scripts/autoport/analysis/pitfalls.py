"""What is known to go wrong with a model of a shape, by rule id."""

from collections.abc import Iterator

from autoport.schema import Architecture, Facts, Pitfall, TpPlan


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
    found += _further(architecture)
    if facts.remote_code:
        found.append(
            Pitfall("PIT-REMOTE-CODE", "the checkpoint ships its own classes (auto_map); they were not run")
        )
    return found


def _further(architecture: Architecture) -> Iterator[Pitfall]:
    """Pitfalls of traits that not every model has."""
    norm, rope, attention = architecture.norm, architecture.rope, architecture.attention
    if norm.kind == "layer":
        yield Pitfall(
            "PIT-NORM-KIND", "LayerNorm subtracts the mean; RMSNorm in its place passes a smoke test"
        )
    if norm.weight == "one_plus":
        yield Pitfall("PIT-NORM-ONE", "the checkpoint holds w, the norm multiplies by 1 + w")
    if rope is not None and rope.pairing == "interleaved":
        yield Pitfall(
            "PIT-ROPE-PAIRS", "neighbours rotate together: rows of q and k are reordered when loaded"
        )
    if rope is not None and rope.rotary_dim:
        yield Pitfall("PIT-ROPE-PARTIAL", f"only {rope.rotary_dim} of {attention.head_dim} dimensions rotate")
    if None in architecture.layers.ropes:
        yield Pitfall("PIT-NOPE", "some layers do not rotate; a list of 1 and 0 has 1 for those that do")
    if any(architecture.layers.windows):
        yield Pitfall(
            "PIT-WINDOW", "a prefill bucket must hold the window, and the window whole cache blocks"
        )
    if architecture.storage.qkv != "separate":
        yield Pitfall(
            "PIT-FUSED", "q, k and v are split first and sharded then; a block of the fused tensor is wrong"
        )
    if architecture.block.topology not in ("pre_norm",):
        yield Pitfall("PIT-BLOCK", "post_attention_layernorm names different places in different models")
    if architecture.moe is not None:
        yield Pitfall("PIT-ROUTER-FP32", "router weights and scores stay in float32")
        if architecture.moe.shared is not None:
            yield Pitfall(
                "PIT-SHARED-REDUCE", "experts and shared experts are summed before one all-reduce, not two"
            )
