"""Where config and checkpoint must agree: biases, the head, head sizes."""

from collections.abc import Iterator

from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.scope import FAMILIES
from autoport.errors import Problem
from autoport.research.keys import ranges
from autoport.schema import Checkpoint, Facts

QKV = ("q", "k", "v")


def has_qkv_bias(keys: CheckpointKeys) -> bool:
    """Whether any layer has a bias on q, k or v."""
    return any(f"self_attn.{name}_proj.bias" in keys.layers for name in QKV)


def bias_problems(facts: Facts, keys: CheckpointKeys, where: str) -> Iterator[Problem]:
    """Biases on q, k and v: on all layers or on none, and as the Hugging Face class has them."""
    layers = set().union(*keys.layers.values())
    with_bias = {name: keys.layers.get(f"self_attn.{name}_proj.bias", set()) for name in QKV}
    found = has_qkv_bias(keys)
    if found and any(indices != layers for indices in with_bias.values()):
        listing = ", ".join(
            f"{name} on layers {ranges(indices) or 'none'}" for name, indices in with_bias.items()
        )
        text = f"only some of q, k and v have a bias: {listing}"
        yield Problem("BIAS-MIXED", text, where, "complete the checkpoint; a mixture cannot be ported")
    family = FAMILIES.get(facts.architecture.value)
    if family is None or not layers:
        return
    if isinstance(family.qkv_bias, bool):
        expected = family.qkv_bias
        why = f"{facts.architecture.value} {'always has one' if expected else 'has none'}"
    elif family.qkv_bias in facts.fields:
        fact = facts.fields[family.qkv_bias]
        expected, why = fact.value, f"{family.qkv_bias} is {str(fact.value).lower()} ({fact.source})"
    else:
        return
    if expected != found:
        text = f"q, k and v have {'a' if found else 'no'} bias in the checkpoint, but {why}"
        next_step = "correct the config, or pass the checkpoint that belongs to it"
        yield Problem("BIAS-CONFLICT", text, facts.config_file, next_step)


def head_problems(facts: Facts, keys: CheckpointKeys, where: str) -> Iterator[Problem]:
    """The tie flag against the presence and the values of the head."""
    tied = facts.fields["tie_word_embeddings"]
    same = facts.fields.get("head_equals_embedding")
    if not tied.value and "lm_head.weight" not in keys.others:
        text = f"tie_word_embeddings is false ({tied.source}) and there is no lm_head.weight"
        next_step = (
            "write tie_word_embeddings: true if the head is tied; an embedding model has no head to port"
        )
        yield Problem("HEAD-MISSING", text, where, next_step)
    if tied.value and same is not None and not same.value:
        text = f"tie_word_embeddings is true ({tied.source}), but lm_head.weight is not the embedding"
        next_step = "write tie_word_embeddings: false to use lm_head.weight"
        yield Problem("HEAD-TIED", f"{text} ({same.source})", where, next_step)


def projection_problems(facts: Facts, keys: CheckpointKeys, checkpoint: Checkpoint) -> Iterator[Problem]:
    """head_dim and the head counts against the rows of q_proj and k_proj in layer 0."""
    tensors = [
        checkpoint.tensors.get(f"{keys.prefix}layers.0.self_attn.{name}_proj.weight") for name in ("q", "k")
    ]
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
        yield Problem("KV-HEADS", text, str(file), f"{next_step} in config.json")
