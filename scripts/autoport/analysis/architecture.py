"""Facts and checkpoint headers -> `Architecture`, or a refusal that names everything out of scope."""

from collections import Counter
from typing import Any

from autoport.analysis.attention import describe_attention
from autoport.analysis.crosscheck import (
    absent_size_problems,
    bias_problems,
    head_problems,
    ignored_problems,
    projection_problems,
)
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.moe import describe_moe, moe_checks, moe_layers, moe_readings
from autoport.analysis.positions import describe_rope, rope_by_label
from autoport.analysis.readings import config_checks, config_readings
from autoport.analysis.scope import (
    ACTIVATIONS,
    DTYPES,
    HEADER_DTYPES,
    Dtype,
    facts_problems,
    foreign_key_problems,
)
from autoport.analysis.traits import Traits
from autoport.errors import Problem, Refusal
from autoport.families import find_family
from autoport.families.family import NORM_NAMES, Family
from autoport.schema.architecture import Architecture, Block, Embedding, Head, Layers, Mlp, Norm, Storage
from autoport.schema.facts import Checkpoint, Facts


def describe_architecture(facts: Facts, checkpoint: Checkpoint) -> Architecture:
    """Return the typed description of the decoder.

    Raises:
        Refusal: with every feature that is out of scope and every disagreement of config and checkpoint.
    """
    family = find_family(facts.architecture.value, facts.model_type.value)
    where = checkpoint.source
    problems = facts_problems(facts)
    if family is None:
        raise Refusal(*problems)  # its keys are those of another architecture
    keys = CheckpointKeys(checkpoint.tensors, family.keys)
    dtype = port_dtype(facts, checkpoint)
    if dtype is None:
        given = facts.fields.get("dtype")
        found = f"dtype {given.value!r} ({given.source})" if given else "no dtype, and no float checkpoint"
        step = f"write dtype: {' or '.join(DTYPES)} in config.json"
        problems.append(Problem("SCOPE-DTYPE", found, facts.config_file, step))
    if not keys.layers:
        begins = " or ".join(f"{base}{keys.names.layers}." for base in keys.names.bases)
        found = f"no key begins with {begins}; there are {', '.join(sorted(keys.others)[:3])}"
        step = f"pass a checkpoint with the key names of {facts.architecture.value}"
        problems.append(Problem("SCOPE-KEYS", found, where, step))
    else:
        absent = [*absent_size_problems(facts, family, keys, checkpoint)]
        if absent:
            raise Refusal(*problems, *absent)  # whatever else disagrees may follow from these
        refused = {problem.rule for problem in problems} & {"SCOPE-BIAS"}  # the keys of its biases follow
        problems += [item for item in foreign_key_problems(keys, family, where) if item.rule not in refused]
        problems += bias_problems(facts, family, keys, where)
        problems += head_problems(facts, keys, where)
        problems += projection_problems(facts, keys, checkpoint)
    blocking = ("SCOPE-ARCH", "SCOPE-ROPE", "CFG-ROPE", "MOE-")  # without these there is no description
    if dtype and not any(problem.rule.startswith(blocking) for problem in problems):
        traits = Traits(family, facts)
        architecture = assemble(traits, keys, dtype)
        problems += traits.problems
        problems = problems or [*ignored_problems(facts, architecture)]
        if not problems:
            return architecture
    raise Refusal(*problems)


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


def assemble(traits: Traits, keys: CheckpointKeys, dtype: Dtype) -> Architecture:
    """Put the description together; what is wrong is in ``traits.problems`` afterwards."""
    family, names = traits.family, keys.names
    value = {name: fact.value for name, fact in traits.facts.fields.items()}
    topology = traits.value(family.topology)
    if topology not in NORM_NAMES:
        topology = "pre_norm"  # a problem says so
    norm = block_norm(family, keys, topology, value["norm_eps"])
    windows = traits.per_layer(family.windows)
    labels = traits.per_layer(family.rope_labels)
    ropes = rope_by_label(traits, labels)
    return Architecture(
        hf_name=traits.facts.architecture.value,
        model_type=traits.facts.model_type.value,
        vocab_size=value["vocab_size"],
        hidden_size=value["hidden_size"],
        num_layers=value["num_layers"],
        max_position_embeddings=value["max_position_embeddings"],
        dtype=dtype,
        norm=norm,
        rope=describe_rope(traits),
        ropes=ropes,
        attention=describe_attention(traits, keys, norm, windows),
        mlp=Mlp(
            kind=family.mlp,
            activation=ACTIVATIONS.get(value["activation"], "silu"),
            intermediate_size=value["intermediate_size"],
            bias=keys.in_layers(names.gate_up or names.up, "bias"),
        ),
        block=Block(topology=topology, residual_scale=traits.number(family.residual_scale, neutral=1)),
        head=Head(
            tied=value["tie_word_embeddings"],
            bias=keys.outside(names.head, "bias"),
            scale=traits.number(family.logit_scale, neutral=1),
            softcap=traits.number(family.logit_softcap),
        ),
        embedding=Embedding(
            scale=traits.number(family.embedding_scale, neutral=1),
            scale_rounded=family.embedding_scale_rounded,
            norm=family.embedding_norm or bool(names.embedding_norm),
            positions=family.positions,
            position_offset=family.position_offset,
        ),
        moe=describe_moe(traits, norm, topology),
        layers=Layers(
            windows=windows if any(windows) else [],
            ropes=labels if ropes else _differing(labels),
            moe=moe_layers(traits),
        ),
        storage=Storage(
            qkv=traits.value(family.qkv_layout),
            gate_up=family.gate_up_layout,
            transposed=family.transposed,
        ),
        final_norm=bool(traits.value(family.final_norm)),
        readings=moe_readings(traits, config_readings(traits, windows, labels)),
        checks=config_checks(traits, windows) | moe_checks(traits),
    )


def block_norm(family: Family, keys: CheckpointKeys, topology: str, eps: Any) -> Norm:
    """The norm of the family's blocks."""
    names = keys.names.layer_norms(topology)
    return Norm(
        kind=family.norm,
        eps=float(eps),
        weight=family.norm_weight,
        bias=any(keys.in_layers(name, "bias") for name in names),
        rounding="after_weight" if family.norm == "layer" else family.norm_rounding,
    )


def _differing(labels: list[str | None]) -> list[str | None]:
    """The labels, or an empty list when all layers have the same one."""
    return labels if len(set(labels)) > 1 else []
