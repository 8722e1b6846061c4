"""Facts and checkpoint headers -> `Architecture`, or a refusal that names everything out of scope."""

from collections import Counter

from autoport.analysis.crosscheck import bias_problems, has_qkv_bias, head_problems, projection_problems
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.scope import (
    DTYPES,
    HEADER_DTYPES,
    LLAMA3_PARAMETERS,
    Dtype,
    facts_problems,
    foreign_key_problems,
)
from autoport.errors import Problem, Refusal
from autoport.schema import Architecture, Attention, Block, Checkpoint, Facts, Head, Mlp, Norm, Rope


def describe_architecture(facts: Facts, checkpoint: Checkpoint) -> Architecture:
    """Return the typed description of the decoder.

    Raises:
        Refusal: with every feature that is out of scope and every disagreement of config and checkpoint.
    """
    keys = CheckpointKeys(checkpoint.tensors)
    where = checkpoint.source
    problems = facts_problems(facts)
    dtype = port_dtype(facts, checkpoint)
    if dtype is None:
        given = facts.fields.get("dtype")
        found = f"dtype {given.value!r} ({given.source})" if given else "no dtype, and no float checkpoint"
        step = f"write dtype: {' or '.join(DTYPES)} in config.json"
        problems.append(Problem("SCOPE-DTYPE", found, facts.config_file, step))
    if keys.layers:
        problems += foreign_key_problems(keys, where)
        problems += bias_problems(facts, keys, where)
        problems += head_problems(facts, keys, where)
        problems += projection_problems(facts, keys, checkpoint)
    else:
        found = f"no key begins with model.layers. or layers.; there are {', '.join(sorted(keys.others)[:3])}"
        problems.append(Problem("SCOPE-KEYS", found, where, "pass a checkpoint with Llama's key names"))
    if problems or dtype is None:
        raise Refusal(*problems)
    return assemble(facts, has_qkv_bias(keys), dtype)


def port_dtype(facts: Facts, checkpoint: Checkpoint) -> Dtype | None:
    """The config's dtype, else that of most of the checkpoint's bytes; None when a port cannot have it."""
    if "dtype" in facts.fields:
        return DTYPES.get(facts.fields["dtype"].value)
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    return HEADER_DTYPES.get(max(sizes, key=sizes.__getitem__))


def element_bytes(dtype: Dtype) -> int:
    """Bytes per element of a weight in the port."""
    return 4 if dtype == "float32" else 2


def assemble(facts: Facts, qkv_bias: bool, dtype: Dtype) -> Architecture:
    value = {name: fact.value for name, fact in facts.fields.items()}
    scaling = LLAMA3_PARAMETERS if value["rope_type"] == "llama3" else ()
    return Architecture(
        hf_name=facts.architecture.value,
        model_type=facts.model_type.value,
        vocab_size=value["vocab_size"],
        hidden_size=value["hidden_size"],
        num_layers=value["num_layers"],
        max_position_embeddings=value["max_position_embeddings"],
        dtype=dtype,
        norm=Norm(kind="rms", eps=float(value["norm_eps"])),
        rope=Rope(
            kind=value["rope_type"],
            theta=value["rope_theta"],
            parameters={name: value["rope_parameters"][name] for name in scaling},
        ),
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
