"""The weight map: which checkpoint keys each parameter of the port is loaded from."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.moe import has_dense_layers
from autoport.analysis.moe_weights import moe_entries
from autoport.families.family import NORM_NAMES
from autoport.families.moe_style import MoeStyle
from autoport.schema.architecture import Architecture, Norm
from autoport.schema.weights import IgnoredKeys, WeightEntry, WeightMap

LAYER = "model.layers.{i}."
INV_FREQ = IgnoredKeys(
    pattern=r".*rotary_emb\.inv_freq",
    reason="computed from rope_theta; older versions of transformers saved it",
)
TIED_HEAD = IgnoredKeys(
    pattern=r"lm_head\.weight",
    reason="tied: the head is loaded from the embedding, which holds the same values",
)
# Repositories of Mistral's models hold the weights a second time, beside the files of the index.
CONSOLIDATED = IgnoredKeys(
    pattern=r"(layers|tok_embeddings|norm|output)\..*",
    reason="the same weights under the names of the original code, in consolidated.safetensors",
)


def build_weight_map(
    architecture: Architecture, keys: CheckpointKeys, experts: MoeStyle | None = None
) -> WeightMap:
    """Return where each parameter of the port comes from."""
    ignored = [IgnoredKeys(pattern, reason) for pattern, reason in keys.names.ignored]
    if any(key.endswith("rotary_emb.inv_freq") for key in (*keys.layers, *keys.others)):
        ignored.append(INV_FREQ)
    embedding = _embedding_key(architecture, keys, ignored)
    head_key = f"{keys.names.head}.weight"
    entries = [
        WeightEntry(
            "model.embed_tokens.weight",
            [embedding],
            [(architecture.vocab_size, architecture.hidden_size)],
            "vocab",
        ),
        *_embedding_extras(architecture, keys),
        *_layer_norms(architecture, keys),
        *_attention(architecture, keys),
        *_mlp(architecture, keys),
        *(moe_entries(architecture, keys, experts) if experts else ()),
    ]
    if architecture.final_norm:
        entries += norm_entries(
            architecture.norm, "model.norm", f"{keys.prefix}{keys.names.final_norm}", architecture.hidden_size
        )
    head = embedding if architecture.head.tied else head_key
    vocabulary: list[tuple[int, ...]] = [(architecture.vocab_size, architecture.hidden_size)]
    entries.append(WeightEntry("lm_head.weight", [head], vocabulary, "vocab"))
    if architecture.head.bias:
        bias = f"{keys.names.head}.bias"
        entries.append(WeightEntry("lm_head.bias", [bias], [(architecture.vocab_size,)], "column_bias"))
    return WeightMap(entries=entries, ignored=ignored)


def second_copies(weights: WeightMap, left_out: Sequence[str]) -> list[IgnoredKeys]:
    """Keys in files beside the checkpoint's, which the plugin reads as well.

    Args:
        left_out: Names of these files.
    """
    is_there = any(name.startswith("consolidated") for name in left_out)
    apart = all(key.startswith(("model.", "lm_head.")) for entry in weights.entries for key in entry.keys)
    return [CONSOLIDATED] if is_there and apart else []


def possibly_unused(architecture: Architecture, weights: WeightMap) -> list[IgnoredKeys]:
    """Keys that some checkpoints of this architecture have and no parameter needs."""
    head = next(entry for entry in weights.entries if entry.parameter == "lm_head.weight")
    possible = [INV_FREQ] if architecture.rope else []
    possible += [TIED_HEAD] if architecture.head.tied and "lm_head.weight" not in head.keys else []
    return possible + weights.ignored


def unused_pattern(ignored: Iterable[IgnoredKeys]) -> str:
    """One regular expression for all of them; it matches no key when there are none."""
    return "|".join(dict.fromkeys(item.pattern for item in ignored))


def norm_entries(norm: Norm, parameter: str, key: str, size: int) -> list[WeightEntry]:
    """Weight and bias of a norm that every rank holds whole."""
    steps = ["add one"] if norm.weight == "one_plus" else []
    kinds = [("weight", steps)] if norm.weight != "none" else []
    kinds += [("bias", [])] if norm.bias else []
    return [
        WeightEntry(f"{parameter}.{kind}", [f"{key}.{kind}"], [(size,)], "replicated", done)
        for kind, done in kinds
    ]


def _layer_norms(architecture: Architecture, keys: CheckpointKeys) -> Iterator[WeightEntry]:
    names = NORM_NAMES[architecture.block.topology]
    for name, key in zip(names, keys.names.layer_norms(architecture.block.topology), strict=True):
        yield from norm_entries(
            architecture.norm, f"{LAYER}{name}", f"{keys.layer}{key}", architecture.hidden_size
        )


def _embedding_extras(architecture: Architecture, keys: CheckpointKeys) -> Iterator[WeightEntry]:
    embedding, hidden = architecture.embedding, architecture.hidden_size
    if embedding.positions == "learned":
        rows = architecture.max_position_embeddings + embedding.position_offset
        key = f"{keys.prefix}{keys.names.positions}.weight"
        yield WeightEntry("model.embed_positions", [key], [(rows, hidden)], "replicated")
    if embedding.norm:
        key = f"{keys.prefix}{keys.names.embedding_norm}"
        yield from norm_entries(architecture.norm, "model.embed_norm", key, hidden)


def _attention(architecture: Architecture, keys: CheckpointKeys) -> Iterator[WeightEntry]:
    attention, names, hidden = architecture.attention, keys.names, architecture.hidden_size
    q_rows = attention.num_heads * attention.head_dim
    kv_rows = attention.num_kv_heads * attention.head_dim
    layout = architecture.storage.qkv
    separate = layout == "separate"
    sources = [names.q, names.k, names.v] if separate else [names.qkv]
    rows = [q_rows, kv_rows, kv_rows] if separate else [q_rows + 2 * kv_rows]
    halves = ["head dimensions to halves"] if reorders_heads(architecture) else []
    steps = ([] if separate else [f"split q, k, v: {layout}"]) + halves
    stored = ["transposed"] if architecture.storage.transposed else []
    yield WeightEntry(
        f"{LAYER}self_attn.qkv_proj_weight",
        [f"{keys.layer}{name}.weight" for name in sources],
        [_stored(architecture, count, hidden) for count in rows],
        "fused_qkv",
        steps + stored,
    )
    if attention.qkv_bias:
        yield WeightEntry(
            f"{LAYER}self_attn.qkv_proj_bias",
            [f"{keys.layer}{name}.bias" for name in sources],
            [(count,) for count in rows],
            "fused_qkv_bias",
            steps,
        )
    yield from _qk_norms(architecture, keys, halves)
    if attention.output_gate:
        gates = q_rows if attention.output_gate.width == "element" else attention.num_heads
        key = f"{keys.layer}{names.output_gate}.weight"
        yield WeightEntry(f"{LAYER}self_attn.output_gate_weight", [key], [(gates, hidden)], "column")
    if attention.sinks:
        yield WeightEntry(
            f"{LAYER}self_attn.sinks", [f"{keys.layer}{names.sinks}"], [(attention.num_heads,)], "heads"
        )
    yield WeightEntry(
        f"{LAYER}self_attn.o_proj_weight",
        [f"{keys.layer}{names.o}.weight"],
        [_stored(architecture, hidden, q_rows)],
        "row",
        stored,
    )
    if attention.o_bias:
        key = f"{keys.layer}{names.o}.bias"
        yield WeightEntry(f"{LAYER}self_attn.o_proj_bias", [key], [(hidden,)], "row_bias")


def _qk_norms(architecture: Architecture, keys: CheckpointKeys, halves: list[str]) -> Iterator[WeightEntry]:
    attention, qk_norm = architecture.attention, architecture.attention.qk_norm
    if qk_norm is None:
        return
    kinds = [] if qk_norm.norm.weight == "none" else ["weight"]
    kinds += ["bias"] if qk_norm.norm.bias else []
    parts: list[tuple[str, Literal["q_heads", "kv_heads"], int]] = [
        ("q", "q_heads", attention.num_heads),
        ("k", "kv_heads", attention.num_kv_heads),
    ]
    for part, split, heads in parts:
        source = keys.names.q_norm if part == "q" else keys.names.k_norm
        for kind in kinds:
            steps = halves + (["add one"] if kind == "weight" and qk_norm.norm.weight == "one_plus" else [])
            parameter = f"{LAYER}self_attn.{part}_norm_{kind}"
            size = attention.head_dim
            if qk_norm.width == "head":
                key = f"{keys.layer}{source}.{kind}"
                yield WeightEntry(parameter, [key], [(size,)], "replicated", steps)
            elif qk_norm.width == "each_head" and "{h}" in source:
                found = [f"{keys.layer}{source}.{kind}".replace("{h}", str(head)) for head in range(heads)]
                yield WeightEntry(parameter, found, [(size,)] * heads, split, steps)
            else:
                key = f"{keys.layer}{source}.{kind}"
                shape = (heads, size) if qk_norm.width == "each_head" else (heads * size,)
                yield WeightEntry(parameter, [key], [shape], split, steps)


def _mlp(architecture: Architecture, keys: CheckpointKeys) -> Iterator[WeightEntry]:
    """The MLP of the layers without experts."""
    mlp, names, hidden = architecture.mlp, keys.names, architecture.hidden_size
    if not has_dense_layers(architecture):
        return
    layers: Literal["all", "dense"] = "dense" if architecture.moe else "all"
    inner, fused = mlp.intermediate_size, architecture.storage.gate_up == "concat"
    stored = ["transposed"] if architecture.storage.transposed else []
    split = ["split gate, up"] if fused else []
    sources = {"gate": names.gate_up or names.gate, "up": names.gate_up or names.up}
    if mlp.kind == "plain":
        del sources["gate"]
    for part, source in sources.items():
        rows = 2 * inner if fused else inner
        yield WeightEntry(
            f"{LAYER}mlp.{part}_proj_weight",
            [f"{keys.layer}{source}.weight"],
            [_stored(architecture, rows, hidden)],
            "column",
            split + stored,
            layers,
        )
        if mlp.bias:
            key = f"{keys.layer}{source}.bias"
            yield WeightEntry(f"{LAYER}mlp.{part}_proj_bias", [key], [(rows,)], "column_bias", split, layers)
    if mlp.activation == "xielu":
        yield from _xielu(keys)
    yield WeightEntry(
        f"{LAYER}mlp.down_proj_weight",
        [f"{keys.layer}{names.down}.weight"],
        [_stored(architecture, hidden, inner)],
        "row",
        stored,
        layers,
    )
    if mlp.bias:
        key = f"{keys.layer}{names.down}.bias"
        yield WeightEntry(f"{LAYER}mlp.down_proj_bias", [key], [(hidden,)], "row_bias", [], layers)


def _xielu(keys: CheckpointKeys) -> Iterator[WeightEntry]:
    """The four scalars of the activation, which every rank holds."""
    for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
        key = f"{keys.layer}mlp.act_fn.{name}"
        yield WeightEntry(f"{LAYER}mlp.{name}", [key], [shape], "replicated")


def _stored(architecture: Architecture, rows: int, columns: int) -> tuple[int, int]:
    return (columns, rows) if architecture.storage.transposed else (rows, columns)


def reorders_heads(architecture: Architecture) -> bool:
    """Whether the dimensions of q and k heads are reordered, so that halves of a head rotate."""
    rope = architecture.rope
    return rope is not None and (rope.pairing == "interleaved" or rope.rotary_dim is not None)


def _embedding_key(architecture: Architecture, keys: CheckpointKeys, ignored: list[IgnoredKeys]) -> str:
    """Key of the embedding. A tied checkpoint may hold it as the head, too (ignored then), or only."""
    embedding, head = f"{keys.prefix}{keys.names.embedding}.weight", f"{keys.names.head}.weight"
    if architecture.head.tied and head in keys.others:
        if embedding not in keys.others:
            return head
        ignored.append(IgnoredKeys(head.replace(".", r"\."), TIED_HEAD.reason))
    return embedding


def expand(
    weights: WeightMap, num_layers: int, has_experts: Sequence[bool] = ()
) -> Iterator[tuple[WeightEntry, list[tuple[str, tuple[int, ...]]]]]:
    """Yield every parameter's entry with its concrete checkpoint keys and their shapes, layer by layer.

    Args:
        has_experts: Whether each layer has experts; empty when layers do not differ in that.
    """
    for entry in weights.entries:
        patterns = [
            (key.replace("{e}", str(expert)), shape)
            for key, shape in zip(entry.keys, entry.shapes, strict=True)
            for expert in range(entry.experts or 1)
        ]
        for index in range(num_layers) if "{i}" in entry.parameter else (0,):
            kind = "moe" if has_experts and has_experts[index] else "dense"
            if not has_experts or entry.layers in ("all", kind):
                yield entry, [(key.replace("{i}", str(index)), shape) for key, shape in patterns]
