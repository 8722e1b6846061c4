"""The weight map: which checkpoint keys each parameter of the port is loaded from."""

from collections.abc import Iterator

from autoport.analysis.keys import CheckpointKeys
from autoport.schema import Architecture, IgnoredKeys, WeightEntry, WeightMap

INV_FREQ = IgnoredKeys(
    pattern=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq|(model\.)?rotary_emb\.inv_freq",
    reason="computed from rope_theta; older versions of transformers saved it",
)
TIED_HEAD = IgnoredKeys(
    pattern=r"lm_head\.weight",
    reason="tied: the head is loaded from the embedding, which holds the same values",
)


def build_weight_map(architecture: Architecture, keys: CheckpointKeys) -> WeightMap:
    """Return where each parameter of the port comes from, for a Llama-shaped checkpoint."""
    hidden, inner = architecture.hidden_size, architecture.mlp.intermediate_size
    attention = architecture.attention
    q_rows = attention.num_heads * attention.head_dim
    kv_rows = attention.num_kv_heads * attention.head_dim
    embedding, ignored = _embedding_key(architecture, keys)
    if any(key.endswith("rotary_emb.inv_freq") for key in (*keys.layers, *keys.others)):
        ignored.append(INV_FREQ)
    head = embedding if architecture.head.tied else "lm_head.weight"
    vocabulary = [(architecture.vocab_size, hidden)]
    layer, source = "model.layers.{i}.", f"{keys.prefix}layers.{{i}}."
    qkv = [f"{source}self_attn.{name}_proj" for name in "qkv"]
    qkv_rows = (q_rows, kv_rows, kv_rows)

    def column(parameter: str, key: str) -> WeightEntry:
        return WeightEntry(f"{layer}{parameter}", [f"{source}{key}"], [(inner, hidden)], "column")

    def row(parameter: str, key: str, columns: int) -> WeightEntry:
        return WeightEntry(f"{layer}{parameter}", [f"{source}{key}"], [(hidden, columns)], "row")

    def norm(name: str) -> WeightEntry:
        return WeightEntry(f"{layer}{name}.weight", [f"{source}{name}.weight"], [(hidden,)], "replicated")

    entries = [
        WeightEntry("model.embed_tokens.weight", [embedding], [*vocabulary], "vocab"),
        norm("input_layernorm"),
        WeightEntry(
            f"{layer}self_attn.qkv_proj_weight",
            [f"{name}.weight" for name in qkv],
            [(rows, hidden) for rows in qkv_rows],
            "fused_qkv",
        ),
        WeightEntry(
            f"{layer}self_attn.qkv_proj_bias",
            [f"{name}.bias" for name in qkv],
            [(rows,) for rows in qkv_rows],
            "fused_qkv_bias",
        ),
        row("self_attn.o_proj_weight", "self_attn.o_proj.weight", q_rows),
        norm("post_attention_layernorm"),
        column("mlp.gate_proj_weight", "mlp.gate_proj.weight"),
        column("mlp.up_proj_weight", "mlp.up_proj.weight"),
        row("mlp.down_proj_weight", "mlp.down_proj.weight", inner),
        WeightEntry("model.norm.weight", [f"{keys.prefix}norm.weight"], [(hidden,)], "replicated"),
        WeightEntry("lm_head.weight", [head], [*vocabulary], "vocab"),
    ]
    if not attention.qkv_bias:
        entries = [entry for entry in entries if entry.transform != "fused_qkv_bias"]
    return WeightMap(entries=entries, ignored=ignored)


def _embedding_key(architecture: Architecture, keys: CheckpointKeys) -> tuple[str, list[IgnoredKeys]]:
    """Key of the embedding (a tied checkpoint may hold it as the head only) and keys to leave out."""
    embedding = f"{keys.prefix}embed_tokens.weight"
    if architecture.head.tied and "lm_head.weight" in keys.others:
        return (embedding, [TIED_HEAD]) if embedding in keys.others else ("lm_head.weight", [])
    return embedding, []


def expand(weights: WeightMap, num_layers: int) -> Iterator[tuple[WeightEntry, list[str]]]:
    """Yield every parameter's entry with its concrete checkpoint keys, layer by layer."""
    for entry in weights.entries:
        for index in range(num_layers) if "{i}" in entry.parameter else (0,):
            yield entry, [key.replace("{i}", str(index)) for key in entry.keys]
