"""The two-way check: every parameter has its checkpoint keys, every key a parameter or a reason."""

import re
from collections.abc import Container, ItemsView, Iterable, Iterator, Sequence

import msgspec

from autoport.analysis.weight_map import expand
from autoport.errors import Problem, refuse
from autoport.research.keys import fold, fold_all, fold_experts, label, ranges
from autoport.schema.facts import Checkpoint, Facts
from autoport.schema.weights import WeightEntry, WeightMap

LARGEST_KEY_COUNT = 1_000_000  # about ten times the keys of the largest mixtures of experts

# Pattern of a key that nothing takes -> why it may be there; the first that matches is said.
UNEXPECTED_CAUSES = [
    (
        r"(^|\.)(mtp|mtp_layers|nextn)\.|\.(enorm|hnorm|eh_proj|shared_head)\.",
        "a multi-token-prediction head",
    ),
    (
        r"vision|visual|image|audio|multi_modal|mm_projector",
        "a part of a larger model that is not its decoder",
    ),
    (r"lora_[AB]|\.adapter", "an adapter: merge it into the base model first"),
    (r"\.(gamma|beta)$", "a LayerNorm under its old names: save the model again with a newer transformers"),
    (r"\.(attn|attention)\.(bias|masked_bias)$", "a buffer that older versions of transformers saved"),
    (r"(inv_freq|position_ids)$", "a buffer that is computed, not loaded"),
    (r"weight_scale|qweight|qzeros|absmax|_blocks$|_scales$", "a part of quantised weights"),
    (r"\.experts\.", "experts in another layout than the class's checkpoints have"),
    (
        r"(qkv_proj|query_key_value|c_attn|W_pack|gate_up_proj)\.",
        "a fused tensor where separate ones are expected",
    ),
    (r"\.(q|k|v)_proj\.weight$|\.(gate|up)_proj\.weight$", "separate tensors where a fused one is expected"),
    (r"\.bias$", "a bias that the architecture does not have"),
    (r"norm", "a norm that the architecture does not have"),
    (r"lm_head|embed_out", "a head beside the one that the architecture has"),
]


class ShapeMismatch(msgspec.Struct, frozen=True):
    key: str
    expected: tuple[int, ...]
    found: tuple[int, ...]


class Coverage(msgspec.Struct):
    """Result of the check. A map that covers its checkpoint has four empty lists.

    Attributes:
        missing: Keys that the map needs and the checkpoint lacks.
        unexpected: Keys of the checkpoint that no parameter takes and no reason leaves out.
        mapped_twice: Keys that two parameters take (see `_may_share`).
        wrong_shape: Keys whose shape is not the one the architecture gives.
        layers: What stands before the index of a layer, e.g. ``model.layers.``; empty for a map without layers.
        absent_layers: Layers that the map needs and of which the checkpoint has no key.
        surplus_layers: Layers of the checkpoint beyond the map's last.
    """

    missing: list[str]
    unexpected: list[str]
    mapped_twice: list[str]
    wrong_shape: list[ShapeMismatch]
    layers: str
    absent_layers: set[int]
    surplus_layers: set[int]

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mapped_twice or self.wrong_shape)


def check_coverage(
    weights: WeightMap, num_layers: int, checkpoint: Checkpoint, has_experts: Sequence[bool] = ()
) -> Coverage:
    """Compare the map with the checkpoint in both directions.

    Args:
        has_experts: Whether each layer has experts; empty when layers do not differ in that.

    Raises:
        Refusal: MAP-MISSING: the map has more than `LARGEST_KEY_COUNT` keys.
    """
    of_layers = [entry for entry in weights.entries if "{i}" in entry.parameter]
    per_layer = sum(len(entry.keys) * (entry.experts or 1) for entry in of_layers)
    if per_layer * num_layers > LARGEST_KEY_COUNT:
        found = f"{num_layers} layers of {per_layer} keys; the checkpoint has {len(checkpoint.tensors)} keys in all"
        step = "correct num_hidden_layers or the number of experts in config.json"
        raise refuse("MAP-MISSING", found, checkpoint.source, step)
    expected: dict[str, tuple[int, ...]] = {}
    takers: dict[str, list[WeightEntry]] = {}
    for entry, keys in expand(weights, num_layers, has_experts):
        for key, shape in keys:
            expected[key] = shape
            takers.setdefault(key, []).append(entry)
    ignored = re.compile("|".join(f"(?:{item.pattern})" for item in weights.ignored) or r"(?!)")
    tensors = checkpoint.tensors
    unexpected = [key for key in tensors if key not in expected and not ignored.fullmatch(key)]
    keys_of_layers = (key for entry in weights.entries for key in entry.keys if "{i}" in key)
    layers = next(keys_of_layers, "").partition("{i}")[0]
    needed, present = _layers_of(expected, layers), _layers_of(tensors, layers)
    return Coverage(
        missing=[key for key in expected if key not in tensors],
        unexpected=unexpected,
        mapped_twice=[key for key, entries in takers.items() if len(entries) > 1 and not _may_share(entries)],
        wrong_shape=[
            ShapeMismatch(key, shape, tensors[key].shape)
            for key, shape in expected.items()
            if key in tensors and tensors[key].shape != shape
        ],
        layers=layers,
        absent_layers=needed - present if present else set(),
        surplus_layers=_layers_of(unexpected, layers) - needed,
    )


def _layer_of(key: str, layers: str) -> int | None:
    index = key[len(layers) :].partition(".")[0]
    return int(index) if layers and key.startswith(layers) and re.fullmatch(r"\d{1,9}", index) else None


def _layers_of(keys: Iterable[str], layers: str) -> set[int]:
    return {index for key in keys if (index := _layer_of(key, layers)) is not None}


def _may_share(entries: list[WeightEntry]) -> bool:
    """A tied head and its embedding, or the parts of a fused gate and up projection."""
    tied = [entry.parameter for entry in entries] == ["model.embed_tokens.weight", "lm_head.weight"]
    return tied or all("split gate, up" in entry.steps for entry in entries)


def coverage_problems(
    coverage: Coverage, num_layers: int, checkpoint: Checkpoint, facts: Facts | None = None
) -> Iterator[Problem]:
    """One problem for whole layers, one per other key with its layers folded, each with the likely cause.

    Args:
        facts: What the sizes come from; None where they are not named.
    """
    where = checkpoint.source
    if coverage.absent_layers:
        layers = ranges(coverage.absent_layers)
        found = f"layers {layers} are not in the checkpoint; num_hidden_layers is {num_layers}"
        step = "correct num_hidden_layers in config.json, or complete the checkpoint"
        yield Problem("MAP-MISSING", found, where, step)
    for key, indices in _folded(coverage.missing, coverage.layers, coverage.absent_layers):
        cause = _missing_cause(key, indices, coverage.unexpected)
        found = f"{label(key, indices)} is not in the checkpoint: {cause}"
        yield Problem("MAP-MISSING", found, where, "correct the config, or complete the checkpoint")
    if coverage.surplus_layers:
        layers = ranges(coverage.surplus_layers)
        found = f"nothing takes layers {layers}: {_surplus_cause(coverage.unexpected, num_layers)}"
        step = "correct num_hidden_layers in config.json; a part that the port lacks stops it"
        yield Problem("MAP-UNEXPECTED", found, where, step)
    for key, indices in _folded(coverage.unexpected, coverage.layers, coverage.surplus_layers):
        found = f"nothing takes {label(key, indices)}: {_unexpected_cause(key)}"
        yield Problem(
            "MAP-UNEXPECTED", found, where, "correct the config; a part that the port lacks stops it"
        )
    for key, indices in _folded(coverage.mapped_twice):
        found = f"two parameters take {label(key, indices)}"
        yield Problem("MAP-TWICE", found, where, "correct the weight map: a key belongs to one parameter")
    by_shape: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for mismatch in coverage.wrong_shape:
        by_shape.setdefault((mismatch.found, mismatch.expected), []).append(mismatch.key)
    for (found_shape, expected), names in by_shape.items():
        where = checkpoint.tensors[names[0]].file
        for key, indices in _folded(names):
            found = f"{label(key, indices)} is {list(found_shape)}, the config gives {list(expected)}"
            found += _sizes(found_shape, expected, facts) if facts else ""
            yield Problem("MAP-SHAPE", found, where, "correct the size in config.json that disagrees")


def _folded(keys: Iterable[str], layers: str = "", but: Container[int] = ()) -> ItemsView[str, set[int]]:
    """Keys with their layers and experts folded, without those of the layers `but`."""
    return fold_experts(fold_all(key for key in keys if _layer_of(key, layers) not in but)).items()


def _sizes(found: tuple[int, ...], expected: tuple[int, ...], facts: Facts) -> str:
    """Where the sizes that disagree come from, and the keys that give those of the checkpoint and nothing reads."""
    wrong = set(expected) - set(found)
    names = (
        "intermediate_size",
        "moe_intermediate_size",
        "shared_intermediate_size",
        "hidden_size",
        "vocab_size",
    )
    texts = [
        f"{name} {fact.value}: {fact.source}"
        for name in names
        if (fact := facts.fields.get(name)) and fact.value in wrong
    ]
    hidden, stored = facts.fields["hidden_size"].value, set(found) - set(expected)
    read = set(re.findall(r"\w+", " ".join(fact.source for fact in facts.fields.values())))
    texts += [
        f"{facts.architecture.value} does not read {key} {value}"
        for key, value in facts.config.items()
        if key not in read and type(value) is int and value > 1 and {value, value * hidden} & stored
    ]
    return f" ({'; '.join(texts)})" if texts else ""


def _missing_cause(key: str, indices: set[int], unexpected: list[str]) -> str:
    tail = key.removeprefix("model.")
    for other in unexpected:
        name = fold(other)[0]
        if name.endswith(tail) and name != key:
            return f"it is there under another prefix, {other}"
    experts = next((other for other in unexpected if "experts" in other), "")
    if "experts" in key and experts:
        return f"the experts are there in another layout, as {experts}"
    if indices:
        return "these layers are incomplete"
    return "the checkpoint is incomplete, or belongs to a model without this part"


def _surplus_cause(unexpected: list[str], num_layers: int) -> str:
    pattern, cause = UNEXPECTED_CAUSES[0]
    if any(re.search(pattern, key) for key in unexpected):
        return cause
    return f"num_hidden_layers is {num_layers}, which leaves these layers out"


def _unexpected_cause(key: str) -> str:
    for pattern, cause in UNEXPECTED_CAUSES:
        if re.search(pattern, key):
            return cause
    return "no part of the architecture has this parameter"
