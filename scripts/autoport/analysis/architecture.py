"""Facts and checkpoint headers -> `Architecture`, or a refusal that names everything out of scope."""

from collections import Counter
from typing import Any

from autoport.analysis.keys import CheckpointKeys, ranges
from autoport.analysis.scope import (
    ACTIVATIONS,
    DTYPES,
    FAMILIES,
    LLAMA3_PARAMETERS,
    facts_problems,
    foreign_key_problems,
)
from autoport.errors import Problem, Refusal
from autoport.schema import Architecture, Attention, Block, Checkpoint, Facts, Head, Mlp, Norm, Rope

QKV = ("q", "k", "v")


def describe_architecture(facts: Facts, checkpoint: Checkpoint) -> Architecture:
    """Return the typed description of the decoder.

    Raises:
        Refusal: with every feature that is out of scope and every disagreement of config and checkpoint.
    """
    keys = CheckpointKeys(checkpoint.tensors)
    problems = facts_problems(facts) + foreign_key_problems(keys, checkpoint.source)
    if not keys.layers:
        sample = ", ".join(sorted(keys.others)[:3])
        problems.append(
            Problem("SCOPE-KEYS", f"no key begins with model.layers. or layers.; there are {sample}",
                    checkpoint.source, "only checkpoints with Llama's key names can be ported")
        )  # fmt: skip
    qkv_bias = _qkv_bias(facts, checkpoint, keys, problems)
    problems += _head_problems(facts, keys, checkpoint) + _projection_problems(facts, keys, checkpoint)
    dtype = _dtype(facts, checkpoint, problems)
    if problems:
        raise Refusal(*problems)
    return assemble(facts, qkv_bias, dtype)


def assemble(facts: Facts, qkv_bias: bool, dtype: Any) -> Architecture:
    """Put facts that are known to be in scope into an `Architecture`."""
    value = {name: fact.value for name, fact in facts.fields.items()}
    rope_type = value["rope_type"]
    scaling = (
        {name: value["rope_parameters"][name] for name in LLAMA3_PARAMETERS} if rope_type == "llama3" else {}
    )
    return Architecture(
        hf_name=facts.architecture.value,
        model_type=facts.model_type.value,
        vocab_size=value["vocab_size"],
        hidden_size=value["hidden_size"],
        num_layers=value["num_layers"],
        max_position_embeddings=value["max_position_embeddings"],
        dtype=dtype,
        norm=Norm(kind="rms", eps=float(value["norm_eps"])),
        rope=Rope(kind=rope_type, theta=value["rope_theta"], parameters=scaling),
        attention=Attention(
            num_heads=value["num_heads"],
            num_kv_heads=value["num_kv_heads"],
            head_dim=value["head_dim"],
            qkv_bias=qkv_bias,
        ),
        mlp=Mlp(kind="gated", activation="silu", intermediate_size=value["intermediate_size"]),
        block=Block(topology="pre_norm"),
        head=Head(tied=value["tie_word_embeddings"]),
    )


def _qkv_bias(facts: Facts, checkpoint: Checkpoint, keys: CheckpointKeys, problems: list[Problem]) -> bool:
    """Whether q, k and v have biases: the keys of every layer decide, the config must agree."""
    layers = set().union(*keys.layers.values()) if keys.layers else set()
    with_bias = {name: keys.layers.get(f"self_attn.{name}_proj.bias", set()) for name in QKV}
    found = any(with_bias.values())
    if found and any(indices != layers for indices in with_bias.values()):
        listing = ", ".join(
            f"{name} on layers {ranges(indices) or 'none'}" for name, indices in with_bias.items()
        )
        problems.append(
            Problem("BIAS-MIXED", f"only some projections have a bias: {listing}", checkpoint.source,
                    "complete the checkpoint; a mixture cannot be ported")
        )  # fmt: skip
    family = FAMILIES.get(facts.architecture.value)
    if family is None:
        return found
    if isinstance(family.qkv_bias, bool):
        expected, why = (
            family.qkv_bias,
            f"{facts.architecture.value} {'always' if family.qkv_bias else 'never'} has one",
        )
    else:
        fact = facts.fields[family.qkv_bias]
        expected, why = bool(fact.value), f"{family.qkv_bias} is {str(fact.value).lower()} ({fact.source})"
    if expected != found and keys.layers:
        what = "have a bias" if found else "have no bias"
        problems.append(
            Problem("BIAS-CONFLICT", f"q, k and v {what} in the checkpoint, but {why}", facts.config_file,
                    "correct the config, or pass the checkpoint that belongs to it")
        )  # fmt: skip
    return found


def _head_problems(facts: Facts, keys: CheckpointKeys, checkpoint: Checkpoint) -> list[Problem]:
    """The tie flag against the presence and the values of the head."""
    tied, source = facts.fields["tie_word_embeddings"].value, facts.fields["tie_word_embeddings"].source
    same = facts.fields.get("head_equals_embedding")
    if not tied and "lm_head.weight" not in keys.others and keys.layers:
        found = f"tie_word_embeddings is false ({source}) and there is no lm_head.weight"
        step = "write tie_word_embeddings: true if the head is tied; an embedding model has no head to port"
        return [Problem("HEAD-MISSING", found, checkpoint.source, step)]
    if tied and same is not None and not same.value:
        found = f"tie_word_embeddings is true ({source}), but lm_head.weight differs from the embedding ({same.source})"
        return [
            Problem(
                "HEAD-TIED",
                found,
                checkpoint.source,
                "write tie_word_embeddings: false to use lm_head.weight",
            )
        ]
    return []


def _projection_problems(facts: Facts, keys: CheckpointKeys, checkpoint: Checkpoint) -> list[Problem]:
    """head_dim and head counts against the rows of q_proj and k_proj in layer 0."""
    heads, kv_heads = facts.fields["num_heads"].value, facts.fields["num_kv_heads"].value
    head_dim = facts.fields["head_dim"]
    shapes = {}
    for name in ("q", "k"):
        key = f"{keys.prefix}layers.0.self_attn.{name}_proj.weight"
        if key not in checkpoint.tensors or len(checkpoint.tensors[key].shape) != 2:
            return []
        shapes[name] = checkpoint.tensors[key].shape[0]
    where = checkpoint.tensors[f"{keys.prefix}layers.0.self_attn.q_proj.weight"].file
    if shapes["q"] != heads * head_dim.value:
        found = (
            f"head_dim {head_dim.value} ({head_dim.source}) times {heads} heads is {heads * head_dim.value}, "
            f"but q_proj has {shapes['q']} rows"
        )
        right = shapes["q"] // heads
        fits = right * heads == shapes["q"] and right * kv_heads == shapes["k"]
        step = (
            f"write head_dim: {right} in config.json" if fits else "correct num_attention_heads and head_dim"
        )
        return [Problem("HEAD-DIM", found, where, step)]
    if shapes["k"] != kv_heads * head_dim.value:
        found = (
            f"{kv_heads} key/value heads ({facts.fields['num_kv_heads'].source}) of {head_dim.value} give "
            f"{kv_heads * head_dim.value} rows, but k_proj has {shapes['k']}"
        )
        right, rest = divmod(shapes["k"], head_dim.value)
        step = f"write num_key_value_heads: {right}" if not rest else "correct num_key_value_heads"
        return [Problem("KV-HEADS", found, where, step + " in config.json")]
    return []


def _dtype(facts: Facts, checkpoint: Checkpoint, problems: list[Problem]) -> str:
    """The config's dtype, else the one that most of the checkpoint's bytes have."""
    if "dtype" in facts.fields:
        return str(facts.fields["dtype"].value)
    counts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        counts[tensor.dtype] += tensor.num_bytes
    most = counts.most_common(1)[0][0]
    name = next((name for name, header in DTYPES.items() if header == most), None)
    if name is None:
        problems.append(
            Problem("SCOPE-DTYPE", f"the config has no dtype and most of the checkpoint is {most}", checkpoint.source,
                    "write dtype: bfloat16, float16 or float32 in config.json")
        )  # fmt: skip
    return name or "bfloat16"


def port_dtype_bytes(dtype: str) -> int:
    """Bytes per element of a weight in the port."""
    return 4 if dtype == "float32" else 2


def normalised_activation(name: str) -> str:
    return ACTIVATIONS[name]
