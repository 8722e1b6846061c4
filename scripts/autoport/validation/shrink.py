"""The twin's config: the real one shrunk to the smallest sizes that keep its structure."""

import copy
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from autoport.analysis.dimensions import EXPERT, SHARED, Dimensions
from autoport.analysis.padding import padded_sizes
from autoport.errors import refuse
from autoport.families import find_family
from autoport.families.family import Family
from autoport.research.aliases import ALIASES
from autoport.research.config_defaults import config_defaults
from autoport.schema.facts import Facts
from autoport.validation.scenario import SEGMENTED_MODEL_LEN, SINGLE_SHOT_MODEL_LEN, SPLIT
from autoport.validation.shrink_experts import expert_sizes

TP_SIZES = (1, 2, 4)  # the sizes that the twin admits exactly when the real model does
MIN_HEAD_DIM = 16  # eight RoPE frequencies
MAX_HEAD_DIM = 128  # the attention kernels' limit
MIN_VOCAB = 512
HIDDEN_MULTIPLES = (256, 128)  # what the decode kernels and the others ask of hidden_size
LONGROPE_CONTEXT = SINGLE_SHOT_MODEL_LEN  # the single-shot run is just within it, the segmented one beyond
YARN_CONTEXT = 256  # of YaRN, and of whatever scaling layers differ in; prompts exceed it
SOFTCAP = 5.0  # bends the twin's scores
WINDOW = 64  # tokens; two blocks, and less than the prompts but the shortest one

# Config keys of sizes that a config leaves to its class, so that no key says where they go.
SIZED_AS_HIDDEN = ("word_embed_proj_dim",)
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Facts of the sizes that a port may pad.
SIZE_FACTS = {
    "intermediate_size": "intermediate_size",
    EXPERT: "moe_intermediate_size",
    SHARED: "shared_intermediate_size",
    "vocab_size": "vocab_size",
}
STANDARD_KEYS = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}


def shrink(facts: Facts) -> dict[str, Any]:
    """Return the config with every dimension shrunk, and everything else untouched.

    Kept: the ratio of query to KV heads, which of TP 1, 2 and 4 are valid (and whether they shard or
    replicate KV heads), whether head_dim is given or derived and how heads * head_dim compares to
    hidden_size, divisibility of the vocabulary and the MLP by the TP sizes (odd where the port pads them),
    every kind of layer, a window that prompts exceed, and every band of the RoPE scaling. Softcaps of logits
    are not kept but made to show.

    Raises:
        Refusal: TWIN-SHRINK when no small config keeps the structure.
    """
    value = {name: fact.value for name, fact in facts.fields.items()}
    family = find_family(facts.architecture.value, facts.model_type.value)
    alibi = family is not None and family.alibi != "False"
    heads, kv_heads = _shrink_heads(value["num_heads"], value["num_kv_heads"], alibi)
    rotated = _rotated_shares(facts, family)
    head_dim, hidden, original_context = _shrink_widths(value, heads, rotated)
    padded = {SIZE_FACTS[name] for name in padded_sizes(Dimensions.from_facts(facts))}

    def divisible_as(name: str, start: int) -> int:
        """Smallest size from `start` on that TP sizes divide as the real one; an odd one where the port pads."""
        return _next_divisible_as(1 if name in padded else value[name], start)

    vocab, intermediate = value["vocab_size"], value["intermediate_size"]
    small_vocab = min(vocab, divisible_as("vocab_size", MIN_VOCAB))
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": min(intermediate, divisible_as("intermediate_size", hidden + hidden // 2)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": small_vocab,
        "max_position_embeddings": SEGMENTED_MODEL_LEN,
        "dtype": "bfloat16",
    }
    sizes |= expert_sizes(value, divisible_as, padded)
    if value.get("sliding_window") is not None:
        sizes["sliding_window"] = min(value["sliding_window"], WINDOW)
    twin = with_few_layers(facts)
    for name, size in sizes.items():
        _set_size(twin, name, size, facts)
    if twin.get("rotary_dim") is not None:
        twin["rotary_dim"] = twin["rotary_dim"] * head_dim // value["head_dim"]
    for key in SIZED_AS_HIDDEN:
        if twin.get(key) == value["hidden_size"]:
            twin[key] = hidden
    for key in SOFTCAPS:
        if twin.get(key):
            twin[key] = min(twin[key], SOFTCAP)
    if original_context is not None:
        _replace(twin, "original_max_position_embeddings", original_context)
    if value["rope_type"] in ("yarn", "per_layer_type"):
        _shorten_original(twin, YARN_CONTEXT)
    if value["rope_type"] == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = value["rope_parameters"][name]
            count = len(factors) * head_dim // value["head_dim"]
            _replace(twin, name, [factors[i * len(factors) // count] for i in range(count)])
    for key, default in config_defaults(facts.model_type.value).items():
        if key.endswith("token_id") and isinstance(default.value, int) and default.value >= small_vocab:
            twin.setdefault(key, default.value)
    _move_token_ids(twin, small_vocab)
    return twin


def with_few_layers(facts: Facts) -> dict[str, Any]:
    """Return the config with as few layers as have every kind of layer, and everything else untouched."""
    value = {name: fact.value for name, fact in facts.fields.items()}
    num_layers = _shrink_layers(facts.config, value)
    config = copy.deepcopy(facts.config)
    for key, item in facts.config.items():
        if isinstance(item, list) and len(item) == value["num_layers"]:
            config[key] = item[:num_layers]
    if "attention_types" in config:  # of GPT-Neo: patterns, each with how often it is repeated
        kinds = [kind for pattern, count in config["attention_types"] for kind in pattern * count]
        config["attention_types"] = [[kinds[:num_layers], 1]]
    _set_size(config, "num_layers", num_layers, facts)
    return config


def _set_size(config: dict[str, Any], name: str, size: Any, facts: Facts) -> None:
    """Write a size where the fact was read from, and in its other spellings; a derived one follows from others."""
    fact = facts.fields.get(name)
    if fact is not None and fact.source.startswith("derived"):
        return
    config[_config_key(name, fact.source if fact else "", facts.config)] = size
    for alias in ALIASES.get(name, ()):
        if fact is not None and alias in config and config[alias] == fact.value:
            config[alias] = size


def _config_key(name: str, source: str, config: Mapping[str, Any]) -> str:
    """The top-level key that a fact was read from."""
    key = source.removeprefix("config.json: ")
    return key if key in config else STANDARD_KEYS.get(name, name)


def _shrink_heads(num_heads: int, num_kv_heads: int, alibi: bool) -> tuple[int, int]:
    """Fewest (query, KV) heads of the same ratio that shard over the TP sizes as the real ones do.

    With ALiBi they are a power of two exactly when the real ones are: the others' slopes are made in two parts.
    """
    ratio = num_heads // num_kv_heads

    def pattern(kv_heads: int) -> list[object]:
        heads = ratio * kv_heads
        sharding: list[object] = [
            (heads % tp == 0, heads % (2 * tp) == 0, kv_heads % tp == 0, tp % kv_heads == 0 and kv_heads < tp)
            for tp in TP_SIZES
        ]
        return [*sharding, alibi and heads.bit_count() == 1]

    kv_heads = next(kv for kv in range(1, num_kv_heads + 1) if pattern(kv) == pattern(num_kv_heads))
    return ratio * kv_heads, kv_heads


def _rotated_shares(facts: Facts, family: Family | None) -> list[float]:
    """Shares of a head that rotate, wherever the config gives one; the family's where it gives none."""
    found = list(_values(facts.config, ("partial_rotary_factor", "rotary_pct")))
    if facts.config.get("rotary_dim") is not None:
        found.append(facts.config["rotary_dim"] / facts.fields["head_dim"].value)
    fact = facts.fields.get("partial_rotary_factor")
    if fact is not None:
        found.append(fact.value)
    elif family is not None:
        found.append(family.partial_rotary_factor)
    return [share for share in found if share is not None and share < 1]


def _values(node: Mapping[str, Any], keys: Collection[str]) -> Iterator[Any]:
    """Values of keys in `node` and in the dicts inside it."""
    for key, child in node.items():
        if key in keys:
            yield child
        elif isinstance(child, dict):
            yield from _values(child, keys)


def _rotates(head_dim: int, share: float) -> bool:
    """Whether that share of a head, however it is rounded, is pairs, and neither none nor all of it."""
    rotated = int(head_dim * share)
    return rotated == int(head_dim * share + 1e-9) and rotated % 2 == 0 and 0 < rotated < head_dim


def _shrink_widths(
    value: Mapping[str, Any], heads: int, rotated: Sequence[float]
) -> tuple[int, int, int | None]:
    """Smallest (head_dim, hidden_size, original context of the RoPE scaling or None) for `heads` heads.

    Args:
        rotated: Shares of a head that rotate; the rotated dimensions stay a part of the head, in pairs.
    """
    real_hidden, real_width = value["hidden_size"], value["num_heads"] * value["head_dim"]

    def as_real(hidden: int) -> bool:
        splits = (hidden % heads == 0) == (real_hidden % value["num_heads"] == 0)  # some classes ask for it
        return splits and all(
            (hidden % multiple == 0) == (real_hidden % multiple == 0) for multiple in HIDDEN_MULTIPLES
        )

    for head_dim in range(min(MIN_HEAD_DIM, value["head_dim"]), MAX_HEAD_DIM + 1, 2):
        width = heads * head_dim
        if real_hidden == real_width:
            hidden = width
        elif real_hidden > real_width:
            hidden = next(filter(as_real, itertools.count(width + 2, 2)))
        else:
            hidden = next(filter(as_real, range(width - 2, 0, -2)), width)
        fits = as_real(hidden) and (hidden < width) == (real_hidden < real_width)
        if not fits or not all(_rotates(head_dim, share) for share in rotated):
            continue
        if value["rope_type"] == "longrope":
            return head_dim, hidden, LONGROPE_CONTEXT
        if value["rope_type"] != "llama3":
            return head_dim, hidden, None
        original_context = _shrink_original_context(value["rope_theta"], value["rope_parameters"], head_dim)
        if original_context is not None:
            return head_dim, hidden, original_context
    raise refuse(
        "TWIN-SHRINK",
        f"no head_dim up to {MAX_HEAD_DIM} keeps the structure with {heads} heads",
        "config.json",
        "report this config: the twin cannot be built, so the port cannot be proven",
    )


def _shrink_original_context(theta: float, scaling: Mapping[str, float], head_dim: int) -> int | None:
    """Smallest original context, below the longest prompt, that leaves no band of llama3 scaling empty.

    Frequencies with a wavelength under context / high_freq_factor are kept, those over context /
    low_freq_factor are divided by the factor, and those between are blended; one must be well inside the
    blend.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = [2 * math.pi * theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    for context in range(64, SPLIT.prompt_length, 32):
        blends = [(context / wavelength - low) / (high - low) for wavelength in wavelengths]
        if min(blends) < 0 and max(blends) > 1 and any(0.25 < blend < 0.75 for blend in blends):
            return context
    return None


def _shrink_layers(config: Mapping[str, Any], value: Mapping[str, Any]) -> int:
    """At least two layers, and as many as it takes to have every kind that a per-layer list or fact names."""
    num_layers = value["num_layers"]
    lists = [*config.values(), *value.values()]
    patterns = [item for item in lists if isinstance(item, list) and len(item) == num_layers]
    kinds = [msgspec.json.encode(kind) for kind in zip(*patterns, strict=True)]
    last_new = max((kinds.index(kind) for kind in kinds), default=0)
    return min(num_layers, max(2, last_new + 1))


def _next_divisible_as(real: int, start: int) -> int:
    """Smallest number from `start` on that is divisible by the TP sizes as `real` is."""
    largest = max(TP_SIZES)
    return next(n for n in range(start, start + largest) if math.gcd(n, largest) == math.gcd(real, largest))


def _shorten_original(node: dict[str, Any], context: int) -> None:
    """Shorten the original context of a RoPE scaling to at most `context`, wherever it is given."""
    for key, child in node.items():
        if key == "original_max_position_embeddings" and child is not None:
            node[key] = min(child, context)
        elif isinstance(child, dict):
            _shorten_original(child, context)


def _replace(node: dict[str, Any], key: str, value: Any) -> None:
    """Set `key` wherever it is present in `node` or a dict inside it."""
    if key in node:
        node[key] = value
    for child in node.values():
        if isinstance(child, dict):
            _replace(child, key, value)


def _move_token_ids(config: dict[str, Any], vocab: int) -> None:
    """Move special token ids that the small vocabulary lacks to its end, each to a place of its own."""
    places: Iterator[int] = iter(range(vocab - 1, -1, -1))
    moved: dict[int, int] = {}

    def move(token: Any) -> Any:
        if isinstance(token, list):
            return [move(item) for item in token]
        if isinstance(token, bool) or not isinstance(token, int) or token < vocab:
            return token
        if token not in moved:
            moved[token] = next(places)
        return moved[token]

    for key in config:
        if key.endswith("token_id"):
            config[key] = move(config[key])
