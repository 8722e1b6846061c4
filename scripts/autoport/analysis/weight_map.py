"""The weight map, and the check that it covers the checkpoint in both directions."""

from collections.abc import Iterator, Mapping

import msgspec

from autoport.analysis.keys import CheckpointKeys, fold, ranges
from autoport.errors import Problem
from autoport.schema import Architecture, Checkpoint, IgnoredKeys, TensorHeader, WeightEntry, WeightMap

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
    hidden = architecture.hidden_size
    inner = architecture.mlp.intermediate_size
    attention = architecture.attention
    q_rows = attention.num_heads * attention.head_dim
    kv_rows = attention.num_kv_heads * attention.head_dim
    layer = "model.layers.{i}."
    source = f"{keys.prefix}layers.{{i}}."
    qkv = [f"{source}self_attn.{name}_proj" for name in "qkv"]
    embedding, ignored = _embedding_key(architecture, keys)
    entries = [
        WeightEntry("model.embed_tokens.weight", [embedding], [(architecture.vocab_size, hidden)], "vocab"),
        _copy(f"{layer}input_layernorm.weight", f"{source}input_layernorm.weight", hidden),
        WeightEntry(
            f"{layer}self_attn.qkv_proj_weight",
            [f"{name}.weight" for name in qkv],
            [(q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)],
            "fused_qkv",
        ),
    ]
    if attention.qkv_bias:
        bias_keys, bias_shapes = [f"{name}.bias" for name in qkv], [(q_rows,), (kv_rows,), (kv_rows,)]
        entries.append(
            WeightEntry(f"{layer}self_attn.qkv_proj_bias", bias_keys, [*bias_shapes], "fused_qkv_bias")
        )
    entries += [
        WeightEntry(
            f"{layer}self_attn.o_proj_weight", [f"{source}self_attn.o_proj.weight"], [(hidden, q_rows)], "row"
        ),
        _copy(f"{layer}post_attention_layernorm.weight", f"{source}post_attention_layernorm.weight", hidden),
        WeightEntry(
            f"{layer}mlp.gate_proj_weight", [f"{source}mlp.gate_proj.weight"], [(inner, hidden)], "column"
        ),
        WeightEntry(
            f"{layer}mlp.up_proj_weight", [f"{source}mlp.up_proj.weight"], [(inner, hidden)], "column"
        ),
        WeightEntry(
            f"{layer}mlp.down_proj_weight", [f"{source}mlp.down_proj.weight"], [(hidden, inner)], "row"
        ),
        _copy("model.norm.weight", f"{keys.prefix}norm.weight", hidden),
        WeightEntry(
            "lm_head.weight",
            [embedding if architecture.head.tied else "lm_head.weight"],
            [(architecture.vocab_size, hidden)],
            "vocab",
        ),
    ]
    return WeightMap(entries=entries, ignored=ignored)


def _copy(parameter: str, key: str, size: int) -> WeightEntry:
    return WeightEntry(parameter, [key], [(size,)], "replicated")


def _embedding_key(architecture: Architecture, keys: CheckpointKeys) -> tuple[str, list[IgnoredKeys]]:
    """Key of the embedding (a tied checkpoint may have saved it as the head only) and the keys to leave out."""
    embedding = f"{keys.prefix}embed_tokens.weight"
    if architecture.head.tied and "lm_head.weight" in keys.others:
        if embedding not in keys.others:
            return "lm_head.weight", [INV_FREQ]
        return embedding, [INV_FREQ, TIED_HEAD]
    return embedding, [INV_FREQ]


# --- Coverage -----------------------------------------------------------------------------------------------------


class Coverage(msgspec.Struct):
    """Result of the two-way check. A map that covers its checkpoint has four empty lists.

    Attributes:
        missing: Keys that the map needs and the checkpoint lacks.
        unexpected: Keys of the checkpoint that no parameter takes and no reason leaves out.
        mapped_twice: Keys that two parameters take (a tied head and its embedding may).
        wrong_shape: Keys whose shape is not the one the architecture gives: (key, expected, found).
    """

    missing: list[str]
    unexpected: list[str]
    mapped_twice: list[str]
    wrong_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]]

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mapped_twice or self.wrong_shape)


def expand(weights: WeightMap, num_layers: int) -> Iterator[tuple[WeightEntry, list[str]]]:
    """Yield every parameter's entry with its concrete checkpoint keys, layer by layer."""
    for entry in weights.entries:
        for index in range(num_layers) if "{i}" in entry.parameter else (0,):
            yield entry, [key.replace("{i}", str(index)) for key in entry.keys]


def check_coverage(weights: WeightMap, num_layers: int, checkpoint: Checkpoint) -> Coverage:
    """Compare the map with the checkpoint in both directions."""
    import re

    expected: dict[str, tuple[int, ...]] = {}
    takers: dict[str, list[WeightEntry]] = {}
    for entry, keys in expand(weights, num_layers):
        for key, shape in zip(keys, entry.shapes, strict=True):
            expected[key] = shape
            takers.setdefault(key, []).append(entry)
    ignored = re.compile("|".join(f"(?:{item.pattern})" for item in weights.ignored) or r"(?!)")
    tensors = checkpoint.tensors
    return Coverage(
        missing=[key for key in expected if key not in tensors],
        unexpected=[key for key in tensors if key not in expected and not ignored.fullmatch(key)],
        mapped_twice=[
            key for key, entries in takers.items() if len(entries) > 1 and not _is_tied_pair(entries)
        ],
        wrong_shape=[
            (key, shape, tensors[key].shape)
            for key, shape in expected.items()
            if key in tensors and tensors[key].shape != shape
        ],
    )


def _is_tied_pair(entries: list[WeightEntry]) -> bool:
    return [entry.parameter for entry in entries] == ["model.embed_tokens.weight", "lm_head.weight"]


def coverage_problems(coverage: Coverage, num_layers: int, checkpoint: Checkpoint) -> list[Problem]:
    """One problem per folded key, each with the likely cause."""
    problems = []
    for key, layers in _fold(coverage.missing).items():
        cause = _missing_cause(key, layers, coverage.unexpected)
        problems.append(
            Problem("MAP-MISSING", f"{_with_layers(key, layers)} is not in the checkpoint: {cause}", checkpoint.source,
                    "correct the config, or complete the checkpoint")
        )  # fmt: skip
    for key, layers in _fold(coverage.unexpected).items():
        cause = _unexpected_cause(key, layers, num_layers)
        problems.append(
            Problem("MAP-UNEXPECTED", f"nothing takes {_with_layers(key, layers)}: {cause}", checkpoint.source,
                    "the model has a feature that the port would leave out; it cannot be ported as it is")
        )  # fmt: skip
    for key, layers in _fold(coverage.mapped_twice).items():
        problems.append(
            Problem("MAP-TWICE", f"two parameters take {_with_layers(key, layers)}", checkpoint.source,
                    "report this: a weight map must take each key once")
        )  # fmt: skip
    shapes = {key: (expected, found) for key, expected, found in coverage.wrong_shape}
    for key, layers in _fold(shapes).items():
        first = key.replace("{i}", str(min(layers))) if layers else key
        expected, found = shapes[first]
        problems.append(
            Problem("MAP-SHAPE", f"{_with_layers(key, layers)} is {list(found)}, the config gives {list(expected)}",
                    _file(checkpoint.tensors, first), "correct the size in config.json that disagrees")
        )  # fmt: skip
    return problems


def _fold(keys: Mapping[str, object] | list[str]) -> dict[str, set[int]]:
    folded: dict[str, set[int]] = {}
    for key in keys:
        name, index = fold(key)
        layers = folded.setdefault(name, set())
        if index is not None:
            layers.add(index)
    return folded


def _with_layers(key: str, layers: set[int]) -> str:
    return f"{key} (layers {ranges(layers)})" if layers else key


def _missing_cause(key: str, layers: set[int], unexpected: list[str]) -> str:
    tail = key.removeprefix("model.")
    renamed = next(
        (other for other in unexpected if fold(other)[0].endswith(tail) and fold(other)[0] != key), None
    )
    if renamed:
        return f"under another prefix, e.g. {renamed}"
    if layers:
        return "these layers are incomplete, or num_hidden_layers is too large"
    return "the checkpoint is incomplete, or belongs to a model without this part"


def _unexpected_cause(key: str, layers: set[int], num_layers: int) -> str:
    if layers and min(layers) >= num_layers:
        return f"num_hidden_layers is {num_layers}, so these layers are too many"
    if key.endswith(".bias"):
        return "a bias that the architecture does not have"
    if "norm" in key:
        return "a norm that the architecture does not have"
    return "no part of the architecture has this parameter"


def _file(tensors: Mapping[str, TensorHeader], key: str) -> str:
    return tensors[key].file if key in tensors else "checkpoint"
