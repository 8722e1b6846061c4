"""The weight map: parameters of the port, the checkpoint keys they are loaded from, and how."""

from typing import Annotated, Literal

import msgspec


class WeightEntry(msgspec.Struct, frozen=True):
    """One parameter of the port and the checkpoint keys it is loaded from.

    `{i}` in names stands for the layer index; entries with it are expanded over all layers.

    Attributes:
        parameter: Name of the `nn.Parameter` in the generated model.
        keys: Checkpoint keys, in the order in which the loader takes them.
        shapes: Full (unsharded) shape of each key in the checkpoint.
        transform: How the keys become this rank's parameter: ``replicated``, ``vocab`` (rows split, padded),
            ``column`` ([out, in] rows split, stored transposed), ``row`` (columns split, stored transposed),
            ``fused_qkv`` (q, k, v rows split by head and concatenated, stored transposed), ``fused_qkv_bias``,
            ``column_bias`` (split), ``row_bias`` (divided by the ranks, which are summed), ``heads`` (split by
            query head), ``q_heads`` and ``kv_heads`` (vectors over the heads of q or k), ``expert_gate_up`` and
            ``expert_down`` (stacked over the experts, each split as ``column`` and ``row``), their biases.
        steps: What is done before that, in order: ``split q, k, v: <layout>``, ``split gate, up``,
            ``head dimensions to halves``, ``add one``, ``transposed``, ``experts: <storage>``,
            ``add one to up``, ``flattened``.
        layers: Which layers have it: those with experts, those without, or all.
        experts: Number of experts that ``{e}`` in the keys stands for, one key after the other; 0 without it.
    """

    parameter: str
    keys: Annotated[list[str], msgspec.Meta(min_length=1)]
    shapes: list[tuple[int, ...]]
    transform: Literal[
        "replicated",
        "vocab",
        "column",
        "row",
        "fused_qkv",
        "fused_qkv_bias",
        "column_bias",
        "row_bias",
        "heads",
        "q_heads",
        "kv_heads",
        "expert_gate_up",
        "expert_gate_up_bias",
        "expert_down",
    ]
    steps: list[str] = []
    layers: Literal["all", "dense", "moe"] = "all"
    experts: int = 0


class IgnoredKeys(msgspec.Struct, frozen=True):
    """Checkpoint keys that are left out on purpose. `pattern` is a regular expression over the whole key."""

    pattern: str
    reason: str


class WeightMap(msgspec.Struct):
    entries: list[WeightEntry]
    ignored: list[IgnoredKeys] = []
