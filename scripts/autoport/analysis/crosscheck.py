"""Where config and checkpoint must agree: biases, the head, head sizes."""

from collections.abc import Iterator

from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.traits import Traits
from autoport.errors import Problem
from autoport.families.family import Family
from autoport.research.aliases import ALIASES
from autoport.research.fields import describe
from autoport.research.keys import ranges
from autoport.schema.architecture import Architecture
from autoport.schema.facts import Checkpoint, Facts


def absent_size_problems(
    facts: Facts, family: Family, keys: CheckpointKeys, checkpoint: Checkpoint
) -> Iterator[Problem]:
    """Sizes that config.json leaves to its class, where the class has another than the checkpoint."""
    for name, size, where in _stored_sizes(family, keys, checkpoint):
        fact = facts.fields[name]
        if " default (" not in fact.source or fact.value == size:
            continue
        key = f"{facts.text_path}{ALIASES[name][0]}"
        found = (
            f"{key} is missing, and the class has {fact.value} ({fact.source}); the checkpoint has {where}"
        )
        yield Problem("CFG-MISSING", found, facts.config_file, f"write {key}: {size} in config.json")


def _stored_sizes(
    family: Family, keys: CheckpointKeys, checkpoint: Checkpoint
) -> Iterator[tuple[str, int, str]]:
    """Fields that the headers tell, each with its value and where it shows."""
    layers = set().union(*keys.layers.values())
    if layers == set(range(len(layers))):
        yield "num_layers", len(layers), f"layers {ranges(layers)}"
    embedding = f"{keys.prefix}{keys.names.embedding}.weight"
    shape = _matrix(checkpoint, embedding)
    if shape:
        yield "vocab_size", shape[0], f"{embedding} {list(shape)}"
        yield "hidden_size", shape[1], f"{embedding} {list(shape)}"
    up = keys.layer.replace("{i}", "0") + f"{keys.names.gate_up or keys.names.up}.weight"
    shape = _matrix(checkpoint, up)
    if shape:
        rows = shape[1] if family.transposed else shape[0]
        parts = 2 if family.gate_up_layout == "concat" else 1
        yield "intermediate_size", rows // parts, f"{up} {list(shape)}"


def _matrix(checkpoint: Checkpoint, key: str) -> tuple[int, ...]:
    """Shape of a tensor with two dimensions; empty for another one."""
    tensor = checkpoint.tensors.get(key)
    return tensor.shape if tensor and len(tensor.shape) == 2 else ()


def bias_problems(facts: Facts, family: Family, keys: CheckpointKeys, where: str) -> Iterator[Problem]:
    """Biases: wherever a projection is and on all its parts or nowhere, and as the Hugging Face class has them."""
    names = keys.names
    roles: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("q, k and v have", family.qkv_bias, (names.qkv, names.q, names.k, names.v)),
        ("the attention output has", family.o_bias, (names.o,)),
        ("the MLP has", family.mlp_bias, (names.gate_up, names.gate, names.up, names.down)),
    ]
    for role, expected, parts in roles:
        present = [part for part in parts if keys.in_layers(part, "weight")]
        yield from _mixed(keys, present, where)
        if expected is None or not present:
            continue
        found = any(keys.in_layers(part, "bias") for part in present)
        fact = Traits(family, facts).fact(expected)
        if fact.value is None or bool(fact.value) == found:
            continue
        if expected in ("True", "False"):
            why = f"{facts.architecture.value} {'always has one' if fact.value else 'has none'}"
        else:
            why = f"{expected} is {str(fact.value).lower()} ({fact.source})"
        text = f"{role} {'a' if found else 'no'} bias in the checkpoint, but {why}"
        next_step = "correct the config, or pass the checkpoint that belongs to it"
        yield Problem("BIAS-CONFLICT", text, facts.config_file, next_step)


def ignored_problems(facts: Facts, architecture: Architecture) -> Iterator[Problem]:
    """What config.json asks for and the Hugging Face class does not do, so that neither does the port."""
    windows = architecture.layers.windows or any("sliding_window" in text for text in architecture.checks)
    attention, name = architecture.attention, architecture.hf_name
    for key, rule, present in (
        ("sliding_window", "SCOPE-WINDOW", bool(windows)),
        ("attention_bias", "SCOPE-BIAS", attention.qkv_bias or attention.o_bias),
        ("mlp_bias", "SCOPE-BIAS", architecture.mlp.bias),
    ):
        value = facts.config.get(key)
        if value and not present:
            found = f"{key} is {describe(value)}, which {name} ignores"
            next_step = (
                f"remove {key} from config.json if the model was trained without, else it is no {name}"
            )
            yield Problem(rule, found, facts.config_file, next_step)


def _mixed(keys: CheckpointKeys, parts: list[str], where: str) -> Iterator[Problem]:
    """Layers that have a part without its bias, where others have both; experts stand in other layers."""
    with_bias = {name: keys.layers.get(f"{name}.bias", set()) for name in parts}
    without = any(keys.layers[f"{name}.weight"] - indices for name, indices in with_bias.items())
    if any(with_bias.values()) and without:
        listing = ", ".join(
            f"{name} on layers {ranges(indices) or 'none'}" for name, indices in with_bias.items()
        )
        text = f"only some have a bias: {listing}"
        yield Problem("BIAS-MIXED", text, where, "complete the checkpoint; a mixture cannot be ported")


def head_problems(facts: Facts, keys: CheckpointKeys, where: str) -> Iterator[Problem]:
    """The tie flag against the presence and the values of the head."""
    tied = facts.fields["tie_word_embeddings"]
    same = facts.fields.get("head_equals_embedding")
    head = f"{keys.names.head}.weight"
    if not tied.value and head not in keys.others:
        text = f"tie_word_embeddings is false ({tied.source}) and there is no {head}"
        next_step = (
            "write tie_word_embeddings: true if the head is tied; an embedding model has no head to port"
        )
        yield Problem("HEAD-MISSING", text, where, next_step)
    bias = facts.fields.get("head_bias")
    found_bias = f"{keys.names.head}.bias" in keys.others
    if bias is not None and bias.value != found_bias:
        text = f"the head has {'a' if found_bias else 'no'} bias in the checkpoint, but lm_head_bias is "
        next_step = "correct the config, or pass the checkpoint that belongs to it"
        yield Problem("BIAS-CONFLICT", f"{text}{str(bias.value).lower()} ({bias.source})", where, next_step)
    if tied.value and same is not None and not same.value:
        text = f"tie_word_embeddings is true ({tied.source}), but {head} is not the embedding"
        next_step = f"write tie_word_embeddings: false to use {head}"
        yield Problem("HEAD-TIED", f"{text} ({same.source})", where, next_step)


def projection_problems(facts: Facts, keys: CheckpointKeys, checkpoint: Checkpoint) -> Iterator[Problem]:
    """head_dim and the head counts against the rows of q_proj and k_proj in layer 0."""
    layer = keys.layer.replace("{i}", "0")
    tensors = [checkpoint.tensors.get(f"{layer}{name}.weight") for name in (keys.names.q, keys.names.k)]
    if any(tensor is None or len(tensor.shape) != 2 for tensor in tensors):
        return
    (q_rows, k_rows), file = (tensor.shape[0] for tensor in tensors if tensor), tensors[0] and tensors[0].file
    heads, kv_heads, head_dim = (facts.fields[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    if q_rows != heads.value * head_dim.value:
        text = (
            f"head_dim {head_dim.value} ({head_dim.source}) times {heads.value} heads is "
            f"{heads.value * head_dim.value}, but q_proj has {q_rows} rows"
        )
        right = q_rows // heads.value
        fits = right * heads.value == q_rows and right * kv_heads.value == k_rows
        next_step = f"write head_dim: {right}" if fits else "correct num_attention_heads or head_dim"
        yield Problem("HEAD-DIM", text, str(file), f"{next_step} in config.json")
    elif k_rows != kv_heads.value * head_dim.value:
        text = (
            f"{kv_heads.value} KV heads ({kv_heads.source}) of {head_dim.value} are "
            f"{kv_heads.value * head_dim.value} rows, but k_proj has {k_rows}"
        )
        right, rest = divmod(k_rows, head_dim.value)
        next_step = "correct num_key_value_heads" if rest else f"write num_key_value_heads: {right}"
        if " default (" in heads.source:
            next_step = "write num_attention_heads, which is missing,"
        yield Problem("KV-HEADS", text, str(file), f"{next_step} in config.json")
