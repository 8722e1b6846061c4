"""The types of the facts, by name: what facts.json may hold, whoever wrote it last."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

LARGEST_SIZE = 2**40
LARGEST_PART_COUNT = 10_000  # layers, heads or experts: each is planned, and held in memory, by itself
Size = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_SIZE)]
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_SIZE)]
PartCount = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_PART_COUNT)]
Positive = Annotated[float, msgspec.Meta(gt=0)]

REQUIRED: dict[str, Any] = {
    "activation": str,
    "head_dim": Size,
    "hidden_size": Size,
    "intermediate_size": Size,
    "max_position_embeddings": Size,
    "norm_eps": Positive,
    "num_heads": PartCount,
    "num_kv_heads": PartCount,
    "num_layers": PartCount,
    "rope_parameters": dict[str, Any],
    "rope_type": str,
    "tie_word_embeddings": bool,
    "vocab_size": Size,
}
OPTIONAL: dict[str, Any] = {
    "attention_bias": bool,
    "dtype": str,
    "head_bias": bool,
    "head_equals_embedding": bool,
    "mlp_bias": bool,
    "partial_rotary_factor": Positive,
    "rope_theta": Positive,
    # Layers
    "attention_chunk_size": Size,
    "layer_moe": list[bool],
    "layer_rope": list[bool],
    "layer_types": list[str],
    "layer_windows": list[Count | None],
    "sliding_window": Count | None,
    # Experts
    "moe_intermediate_size": Size,
    "n_group": Size,
    "norm_topk_prob": bool,
    "num_experts": PartCount,
    "num_experts_per_tok": PartCount,
    "num_shared_experts": PartCount,
    "routed_scaling_factor": Positive,
    "router_method": str,
    "router_score": str,
    "shared_intermediate_size": Count,
    "topk_group": Size,
    # Multi-head latent attention and the sparse indexer
    "index_head_dim": Size,
    "index_n_heads": Size,
    "index_topk": Size,
    "kv_lora_rank": Size,
    "q_lora_rank": Size,
    "qk_head_dim": Size,
    "qk_nope_head_dim": Size,
    "qk_rope_head_dim": Size,
    "v_head_dim": Size,
    # The vision tower
    "vision": bool,
    "vision_hidden_size": Size,
    "vision_intermediate_size": Size,
    "vision_num_heads": Size,
}

# Topic of a finding -> what it says at least.
FINDINGS: dict[str, dict[str, Any]] = {
    "activation": {"config": str, "gated": bool},
    "block": {"topology": str, "norms": list[str]},
    "norm": {"kind": str, "weight": str, "rounding": str},
    "qk_norm": {"place": str},
    "rope": {"pairing": str, "sign": int},
    "scale": {"config": str, "way": str},
}


def check_finding(topic: str, value: Mapping[str, Any]) -> None:
    """Check what a finding says.

    Raises:
        ValueError: The first part of `value` that is missing or of another type.
    """
    for name, kind in FINDINGS.get(topic, {}).items():
        if name not in value:
            raise ValueError(f"a finding on {topic} has no {name}")
        try:
            msgspec.convert(value[name], kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}") from error


def check_names(**values: Any) -> None:
    """Check the facts outside the fields, which are strings.

    Raises:
        ValueError: The first that is none.
    """
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"Expected `str` - at `$.{name}.value`")


def check_fields(values: Mapping[str, Any]) -> None:
    """Check the values of facts against their types, and per-layer lists against the number of layers.

    Raises:
        ValueError: What is wrong, with its path in facts.json.
    """
    problems = [f"has no {name}" for name in REQUIRED if name not in values]
    for name, value in values.items():
        kind = (REQUIRED | OPTIONAL).get(name)
        if kind is None:
            problems.append(f"there is no such fact - at `$.fields.{name}`")
            continue
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            reason, separator, inner = str(error).partition(" - at `$")
            problems.append(f"{reason} - at `$.fields.{name}.value{inner if separator else '`'}")
    if not problems:
        problems = [
            f"{len(value)} entries for {values['num_layers']} layers - at `$.fields.{name}.value`"
            for name, value in values.items()
            if name.startswith("layer_") and len(value) != values["num_layers"]
        ]
    if problems:
        raise ValueError("; ".join(problems))
