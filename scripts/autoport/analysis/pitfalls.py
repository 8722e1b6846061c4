"""What is known to go wrong with a model of this shape, by rule id; each is true of the model at hand."""

from collections.abc import Iterator

from autoport.analysis.device_rules import has_segments
from autoport.analysis.moe import has_dense_layers
from autoport.analysis.windows import binds
from autoport.families import find_family
from autoport.schema.architecture import Architecture, Rope
from autoport.schema.facts import Facts
from autoport.schema.parallel import TpPlan
from autoport.schema.plan import Pitfall
from autoport.units import number_text

DEFAULT_THETA = 10_000
SECOND_NORM = "post_attention_layernorm"
# What a fused tensor of the checkpoint holds, by the names in `schema.architecture`.
QKV_LAYOUTS = {
    "concat": "all of q, then all of k, then all of v",
    "groups": "for one KV head after the other its q, k and v",
    "codegen": "four blocks of q, v and k",
}
GATE_UP_LAYOUTS = {"concat": "the gate, then up"}
EXPERT_LAYOUTS = {
    "stacked": "the gate, then up, of all experts ([E, 2I, H])",
    "stacked_transposed": "the gate, then up, of all experts ([E, H, 2I])",
    "interleaved": "gate and up in turn, column by column, of all experts ([E, H, 2I])",
}
MLP_NORM = {"pre_norm": 1, "sandwich": 2}  # place of the norm before the MLP, after the first residual sum


def pitfalls(architecture: Architecture, facts: Facts, tp: TpPlan) -> list[Pitfall]:
    """The pitfalls that apply."""
    found = [
        *_positions(architecture, facts),
        *_norms(architecture, facts),
        *_attention(architecture, facts),
        *_weights(architecture, facts),
        *_experts(architecture),
        *_parallel(architecture, tp),
    ]
    return [Pitfall(rule, text) for rule, text in found]


def _positions(architecture: Architecture, facts: Facts) -> Iterator[tuple[str, str]]:
    rope, layers = architecture.rope, architecture.layers
    if rope is not None:
        yield (
            "PIT-META",
            "the model is built on the meta device: inv_freq is computed in forward, not in __init__",
        )
        ropes = [*architecture.ropes.values()] or [rope]
        thetas = sorted({item.theta for item in ropes} - {DEFAULT_THETA})
        if thetas:
            named = " and ".join(map(number_text, thetas))
            yield (
                "PIT-ROPE-THETA",
                f"rope_theta is {named}; a fallback of {DEFAULT_THETA} passes a smoke test",
            )
        for item in ropes:
            yield from _scaling(item)
        if rope.pairing == "interleaved":
            yield "PIT-ROPE-PAIRS", "neighbours rotate together: rows of q and k are reordered when loaded"
        if rope.rotary_dim:
            head_dim = architecture.attention.head_dim
            yield "PIT-ROPE-PARTIAL", f"only {rope.rotary_dim} of {head_dim} dimensions rotate"
    if None in layers.ropes:
        count, rotated = layers.ropes.count(None), facts.fields.get("layer_rope")
        source = f" ({rotated.source})" if rotated else ""
        yield "PIT-NOPE", f"{count} of {architecture.num_layers} layers do not rotate{source}"
    if any(binds(window, architecture) for window in layers.windows):
        yield "PIT-WINDOW", "a prefill bucket must hold the window, and the window whole cache blocks"


def _scaling(rope: Rope) -> Iterator[tuple[str, str]]:
    original = rope.parameters.get("original_max_position_embeddings")
    if rope.kind == "longrope":
        factors, also = "the short factors, beyond it the long ones", "; cos and sin are scaled, too"
        if rope.mscale:
            factors, also = "short_mscale, beyond it long_mscale", ""
        yield (
            "PIT-LONGROPE",
            f"a server whose max_model_len is up to {original} takes {factors}, for every prompt{also}",
        )
    elif rope.kind == "dynamic":
        yield (
            "PIT-ROPE-DYNAMIC",
            "the scaling begins beyond max_position_embeddings; the port serves no longer contexts",
        )
    elif rope.kind == "llama3":
        yield "PIT-ROPE-LONG", f"a missing scaling hardly shows up to position {original:g}; compare inv_freq"
    elif rope.kind == "yarn":
        yield "PIT-ROPE-YARN", "yarn scales cos and sin too, unless attention_factor or mscale make that 1"


def _norms(architecture: Architecture, facts: Facts) -> Iterator[tuple[str, str]]:
    norm, source = architecture.norm, facts.fields["norm_eps"].source
    yield "PIT-NORM-EPS", f"norm eps is {norm.eps:g} ({source})"
    if norm.kind == "layer":
        yield "PIT-NORM-KIND", "LayerNorm subtracts the mean; RMSNorm in its place passes a smoke test"
    if norm.weight == "one_plus":
        yield "PIT-NORM-ONE", "the checkpoint holds w, the norm multiplies by 1 + w"
    if _second_norm_moves(architecture):
        yield "PIT-BLOCK", f"{SECOND_NORM} stands at another place than in Llama"


def _second_norm_moves(architecture: Architecture) -> bool:
    """Whether the layer has a norm of Llama's name for the one before the MLP at another place."""
    topology = architecture.block.topology
    family = find_family(architecture.hf_name, architecture.model_type)
    names = [name.rpartition(".")[2] for name in family.keys.layer_norms(topology)] if family else []
    return SECOND_NORM in names and names.index(SECOND_NORM) != MLP_NORM.get(topology)


def _attention(architecture: Architecture, facts: Facts) -> Iterator[tuple[str, str]]:
    attention = architecture.attention
    if attention.qk_norm is not None and attention.qk_norm.width == "full":
        yield (
            "PIT-QK-NORM",
            "q and k are normed over all heads: at TP above 1 the ranks add up their squares first",
        )
    if attention.composed:
        reasons = "; ".join(attention.composed)
        yield "PERF-COMPOSED", f"the fused operators lack this attention, smaller ones are slower: {reasons}"
    elif attention.qkv_bias or attention.o_bias:
        yield "PIT-BIAS-2D", "the decode kernel takes biases of shape [1, size], not [size]"
    if "derived" in facts.fields["head_dim"].source:
        yield "PIT-HEAD-DIM", "head_dim is derived; it was checked against the shapes in the checkpoint"


def _weights(architecture: Architecture, facts: Facts) -> Iterator[tuple[str, str]]:
    if architecture.dtype == "float32":
        dtype = facts.fields.get("dtype")
        source = dtype.source if dtype else "most of the checkpoint's bytes"
        yield "PIT-DTYPE", f"weights are held in float32 ({source}), twice the bytes of bfloat16"
    if architecture.head.tied:
        yield "PIT-TIED", "lm_head.weight must be mapped to the embedding's key, or it stays random"
    storage, moe = architecture.storage, architecture.moe
    for layout in (
        QKV_LAYOUTS.get(storage.qkv),
        GATE_UP_LAYOUTS.get(storage.gate_up) if has_dense_layers(architecture) else None,
        EXPERT_LAYOUTS.get(moe.storage) if moe else None,
    ):
        if layout:
            yield (
                "PIT-FUSED",
                f"one tensor holds {layout}: split it first, shard then; a block of it is wrong",
            )
    if storage.transposed:
        yield "PIT-CONV1D", "linear weights are stored as [in, out] (Conv1D), those of nn.Linear as [out, in]"
    if facts.remote_code:
        yield "PIT-REMOTE-CODE", "the checkpoint ships its own classes (auto_map); they were not run"


def _experts(architecture: Architecture) -> Iterator[tuple[str, str]]:
    moe = architecture.moe
    if moe is None:
        return
    yield "PIT-ROUTER-FP32", "router weights and scores stay in float32"
    if moe.shared is not None:
        yield "PIT-SHARED-REDUCE", "experts and shared experts are summed before one all-reduce, not two"
    if moe.composed:
        reasons = "; ".join(moe.composed)
        yield "PERF-EXPERTS", f"the fused decode lacks these experts, smaller operators are slower: {reasons}"


def _parallel(architecture: Architecture, tp: TpPlan) -> Iterator[tuple[str, str]]:
    valid = [candidate for candidate in tp.candidates if candidate.valid]
    if any(candidate.kv_replicas > 1 for candidate in valid):
        kv_heads = architecture.attention.num_kv_heads
        yield (
            "PIT-KV-REPLICAS",
            f"above TP {kv_heads} ranks hold copies of KV heads: load by copy, not by slice",
        )
    if any(candidate.relaxed for candidate in valid) and not architecture.attention.composed:
        yield "PIT-ODD-HEADS", "an odd number of heads per rank: decode does not run in the fused kernel"
    if tp.recommended is not None and not has_segments(tp.recommended):
        yield (
            "PIT-SEGMENT",
            f"at TP {tp.recommended} no prefill in segments, nor prefix caching: no segment is a multiple of "
            f"{tp.recommended}; max_num_batched_tokens has to be one, and max_model_len at most that",
        )
    for candidate in valid:
        if candidate.tp_size == tp.recommended:
            for slow in candidate.slow_paths:
                yield slow.rule, f"at TP {candidate.tp_size}: {slow.text}"
