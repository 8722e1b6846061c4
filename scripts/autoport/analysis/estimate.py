"""Parallel sizes of a model of which only the config is known."""

from collections.abc import Sequence

import msgspec

from autoport.analysis.architecture import block_norm
from autoport.analysis.attention import LARGEST_FUSED_HEAD_DIM, describe_attention
from autoport.analysis.dimensions import SHARED, Dimensions
from autoport.analysis.expert_parallel import plan_expert_parallel
from autoport.analysis.instances import Instance, find_instance
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.moe import describe_moe
from autoport.analysis.tensor_parallel import (
    check_rules,
    plan_tensor_parallel,
    planned_context,
    total_bytes,
)
from autoport.analysis.traits import Traits
from autoport.families import find_family
from autoport.research.config import load_config, read_facts
from autoport.research.quantization import CONFIG_KEYS
from autoport.research.source import open_source
from autoport.research.step import add_modeling
from autoport.schema.facts import Facts
from autoport.schema.parallel import EpPlan, TpPlan, Violation, WeightBytes


class Estimate(msgspec.Struct):
    """What follows from a config.

    Attributes:
        experts: Expert parallelism; None for a dense model.
        vision: TP size -> rules that the vision tower breaks; empty without one.
    """

    facts: Facts
    plan: TpPlan
    experts: EpPlan | None = None
    vision: dict[int, list[Violation]] = {}


def estimate_parallelism(
    source_name: str,
    context_length: int | None,
    batch_size: int,
    relax: Sequence[str] = (),
    instance: Instance | None = None,
) -> Estimate:
    """Plan TP sizes, and expert parallelism for a mixture of experts, weights estimated from the config.

    Raises:
        Refusal: what `read_facts`, `planned_context` and `plan_tensor_parallel` refuse.
    """
    instance = instance or find_instance()
    source = open_source(source_name)
    facts = read_facts(source, load_config(source))
    add_modeling(source, facts)
    facts.warnings += [
        f"the checkpoint is quantised ({key} in config.json), and the weights are sized as not quantised"
        for key in CONFIG_KEYS
        if facts.config.get(key)
    ]
    attention, experts = _fused(facts)
    size = Dimensions.from_facts(facts, attention, experts)
    parts = weight_parts(facts, size)
    context = planned_context(context_length, facts.fields["max_position_embeddings"])
    plan = plan_tensor_parallel(size, parts, context, batch_size, relax, instance)
    expert_plan = None
    if "experts" in parts:
        routed = parts["experts"].split
        dense = total_bytes({name: part for name, part in parts.items() if name != "experts"})
        count = facts.fields["num_experts"].value
        expert_plan = plan_expert_parallel(size, count, dense, routed, plan, instance)
    return Estimate(facts, plan, expert_plan, vision_rules(facts, plan))


def weight_parts(facts: Facts, size: Dimensions) -> dict[str, WeightBytes]:
    """Bytes of the weights by part, from the config (biases left out)."""
    value = {name: fact.value for name, fact in facts.fields.items()}
    element = 4 if value.get("dtype") == "float32" else 2
    matrices = 2 if _is_plain(facts) else 3
    sparse = sum(value.get("layer_moe", [])) if "num_experts" in value else 0
    hidden, dense_layers = size.hidden_size, size.num_layers - sparse
    parts = {
        "embeddings and head": WeightBytes(
            split=2 * element * size.vocab_size * hidden, embeddings=2 * element * size.vocab_size * hidden
        ),
        "attention": _latent(value, size, element) if size.latent_kv else _attention(size, element),
        "norms": WeightBytes(copied=element * hidden * (2 * size.num_layers + 1)),
    }
    if dense_layers:
        parts["MLP"] = WeightBytes(
            split=element * dense_layers * matrices * hidden * value["intermediate_size"]
        )
    if sparse:
        inner, count = value["moe_intermediate_size"], value["num_experts"]
        parts["experts"] = WeightBytes(split=element * sparse * 3 * hidden * inner * count)
        parts["routers"] = WeightBytes(copied=4 * sparse * hidden * count)
        shared = size.expert_sizes.get(SHARED, 0)
        if shared:
            parts["shared experts"] = WeightBytes(split=element * sparse * 3 * hidden * shared)
    return parts


def _fused(facts: Facts) -> tuple[bool, bool]:
    """Whether attention and decode of the experts will run in the fused operators, as far as a config tells."""
    family = find_family(facts.architecture.value, facts.model_type.value)
    if family is None:
        return bool(facts.fields["head_dim"].value <= LARGEST_FUSED_HEAD_DIM), True
    traits, keys = Traits(family, facts), CheckpointKeys((), family.keys)
    norm = block_norm(family, keys, "pre_norm", facts.fields["norm_eps"].value)
    attention = describe_attention(traits, keys, norm, traits.per_layer(family.windows))
    moe = describe_moe(traits, norm, traits.value(family.topology))
    return not attention.composed, moe is None or not moe.composed


def _is_plain(facts: Facts) -> bool:
    """Whether the MLP has no gate: as declared, else as the modeling file was read."""
    family = find_family(facts.architecture.value, facts.model_type.value)
    if family is not None:
        return family.mlp == "plain"
    gated = [item.value["gated"] for item in facts.modeling.findings if item.topic == "activation"]
    return bool(gated) and not any(gated)


def _attention(size: Dimensions, element: int) -> WeightBytes:
    q_rows, kv_rows = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    return WeightBytes(
        split=element * size.num_layers * 2 * size.hidden_size * q_rows,
        kv_heads=element * size.num_layers * 2 * size.hidden_size * kv_rows,
    )


def _latent(value: dict[str, int], size: Dimensions, element: int) -> WeightBytes:
    """Low-rank projections and the indexer are whole on every rank, projections to and from the heads are split."""
    hidden, heads, rank, rope = (
        size.hidden_size,
        size.num_heads,
        value["kv_lora_rank"],
        value["qk_rope_head_dim"],
    )
    query, width = value.get("q_lora_rank", 0), value["qk_head_dim"]
    index_heads, index_width = value.get("index_n_heads", 0), value.get("index_head_dim", 0)
    copied = hidden * (rank + rope + query + index_width + index_heads) + query * index_heads * index_width
    split = heads * width * (query or hidden)
    split += (
        rank * heads * (value["qk_nope_head_dim"] + value["v_head_dim"])
        + heads * value["v_head_dim"] * hidden
    )
    return WeightBytes(split=element * size.num_layers * split, copied=element * size.num_layers * copied)


def vision_rules(facts: Facts, plan: TpPlan) -> dict[int, list[Violation]]:
    """The rules on heads and MLP size for the vision tower, by TP size."""
    heads = facts.fields.get("vision_num_heads")
    inner = facts.fields.get("vision_intermediate_size")
    if heads is None:
        return {}
    size = Dimensions(
        num_layers=1,
        hidden_size=1,
        num_heads=heads.value,
        num_kv_heads=heads.value,
        head_dim=1,
        intermediate_size=inner.value if inner else 0,
        vocab_size=0,
    )
    return {item.tp_size: check_rules(size, item.tp_size) for item in plan.candidates}
