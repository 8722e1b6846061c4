"""What a mixture of experts is, as a declaration; see `Family.moe`."""

from typing import Literal

import msgspec

Layout = Literal["separate", "stacked", "stacked_transposed", "interleaved"]

SPARSE_BY_TYPE = "[kind == 'sparse' for kind in mlp_layer_types]"


class MoeKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Names in the checkpoint, below a layer's index. ``{e}`` stands for the expert.

    Attributes:
        router: Name of the router's projection, without ``.weight``.
        correction: Whole key of the correction bias.
        gate, up, down: Whole keys of an expert's projections.
        gate_up: Whole key of the tensor that holds both for all experts, in layouts other than ``separate``;
            `down` is then one tensor, too.
        shared_gate, shared_up, shared_down: Names of the shared experts' projections.
        shared_gate_up: Name of a fused gate and up projection; empty when they are separate.
        shared_sigmoid: Name of the projection whose sigmoid the shared experts' output is multiplied by.
    """

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.{e}.gate_proj.weight"
    up: str = "mlp.experts.{e}.up_proj.weight"
    down: str = "mlp.experts.{e}.down_proj.weight"
    gate_up: str = ""
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate_up: str = ""
    shared_sigmoid: str = "mlp.shared_expert_gate"


class MoeStyle(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts. Fields without a list of values are expressions over config attributes.

    Attributes:
        layers: Whether each layer has experts (a list of booleans); empty: all have.
        score, score_over: See `schema.Routing`.
        normalise, scaling, groups, top_groups, minimum, logit_softcap, threshold: See `schema.Routing`.
        epsilon: What the class adds to the sum.
        correction_rows: The correction bias is stored as one row of a matrix.
        activation: Of the experts and of the shared experts; empty: the model's activation.
        clamp, alpha: Limit of the clamped activation, and its factor inside the sigmoid; empty for none.
        shared_size: Intermediate size of the shared experts; empty, None or 0 for none.
        shared_gated: The shared experts' output is multiplied by a sigmoid.
        combine: An expression for ``sum`` or ``average``.
    """

    keys: MoeKeys = MoeKeys()
    layout: Layout = "separate"
    num_experts: str = "num_experts"
    top_k: str = "num_experts_per_tok"
    intermediate_size: str = "moe_intermediate_size"
    layers: str = ""
    score: str = "'softmax'"
    score_over: str = "'all'"
    bias: bool = False
    correction_bias: bool = False
    correction_rows: bool = False
    normalise: str = "True"
    epsilon: float = 0.0
    minimum: str = ""
    scaling: str = ""
    groups: str = "1"
    top_groups: str = "1"
    logit_softcap: str = ""
    threshold: str = ""
    activation: str = ""
    clamp: str = ""
    alpha: str = ""
    expert_bias: bool = False
    shared_size: str = ""
    shared_gated: bool = False
    combine: str = "'sum'"
