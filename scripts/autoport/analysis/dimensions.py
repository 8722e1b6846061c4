"""The sizes of a decoder that parallel plans are made from."""

import msgspec

from autoport.analysis.moe import has_dense_layers
from autoport.schema.architecture import Architecture
from autoport.schema.facts import Facts

EXPERT, SHARED = "an expert's intermediate size", "the shared experts' intermediate size"


class Dimensions(msgspec.Struct, frozen=True):
    """The sizes that the rules are about.

    Attributes:
        intermediate_size: Of the MLP; 0 when all layers have experts.
        expert_sizes: Intermediate sizes of an expert and of the shared experts, by what they are called.
        latent_kv: Values per token and layer in the cache of multi-head latent attention, which every rank holds
            whole; 0 for other attention.
        fused: Whether attention runs in the fused operators.
        fused_experts: Whether decode of the experts does.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    expert_sizes: dict[str, int] = {}
    latent_kv: int = 0
    fused: bool = True
    fused_experts: bool = True

    @property
    def composed(self) -> bool:
        """Whether attention is built of smaller operators."""
        return not (self.fused or self.latent_kv)

    @classmethod
    def from_facts(cls, facts: Facts, fused: bool = True, fused_experts: bool = True) -> "Dimensions":
        """The sizes that a config gives; what is fused is not told by it."""
        value = {name: fact.value for name, fact in facts.fields.items()}
        sizes = {}
        if "num_experts" in value:
            sizes[EXPERT] = value["moe_intermediate_size"]
        shared = value.get("shared_intermediate_size") or value.get("num_shared_experts", 0) * value.get(
            "moe_intermediate_size", 0
        )
        if shared:
            sizes[SHARED] = shared
        all_sparse = "num_experts" in value and all(value.get("layer_moe", []))
        latent = value["kv_lora_rank"] + value["qk_rope_head_dim"] if "kv_lora_rank" in value else 0
        latent += value.get("index_head_dim", 0) if latent else 0  # the indexer's keys
        return cls(
            num_layers=value["num_layers"],
            hidden_size=value["hidden_size"],
            num_heads=value["num_heads"],
            num_kv_heads=value["num_kv_heads"],
            head_dim=value["head_dim"],
            intermediate_size=0 if all_sparse else value["intermediate_size"],
            vocab_size=value["vocab_size"],
            expert_sizes=sizes,
            latent_kv=latent,
            fused=fused and not latent,
            fused_experts=fused_experts,
        )

    @classmethod
    def from_architecture(cls, architecture: Architecture) -> "Dimensions":
        return cls(
            num_layers=architecture.num_layers,
            hidden_size=architecture.hidden_size,
            num_heads=architecture.attention.num_heads,
            num_kv_heads=architecture.attention.num_kv_heads,
            head_dim=architecture.attention.head_dim,
            intermediate_size=architecture.mlp.intermediate_size if has_dense_layers(architecture) else 0,
            vocab_size=architecture.vocab_size,
            expert_sizes=expert_sizes(architecture),
            fused=not architecture.attention.composed,
            fused_experts=architecture.moe is None or not architecture.moe.composed,
        )


def expert_sizes(architecture: Architecture) -> dict[str, int]:
    """Intermediate sizes of an expert and of the shared experts, by what they are called."""
    moe = architecture.moe
    if moe is None:
        return {}
    sizes = {EXPERT: moe.intermediate_size}
    if moe.shared:
        sizes[SHARED] = moe.shared.intermediate_size
    return sizes
