"""What the templates ask of a mixture of experts beyond its fields, and its parameters."""

from typing import Any

from autoport.analysis.moe import has_dense_layers
from autoport.codegen.render import Checked
from autoport.schema.architecture import Architecture, Routing

MLP = "model.layers.{i}.mlp"

FLOAT_FIELDS = ("routed_scaling", "router_softcap", "router_minimum", "router_threshold", "expert_clamp")
KERNEL_ACTIVATIONS = {"silu": "SiLU", "gelu": "GELU", "swish_1702": "Swish"}


def moe_context(architecture: Architecture) -> dict[str, Any]:
    """Names for the templates.

    ``has_dense`` and ``has_experts`` say which kinds of layers there are.
    """
    moe = architecture.moe
    context: dict[str, Any] = {
        "has_experts": moe is not None,
        "has_dense": has_dense_layers(architecture),
        "fused_experts": moe is not None and not moe.composed,
    }
    if moe:
        context |= {
            "router_order": router_order(moe.routing),
            "kernel_activation": Checked(KERNEL_ACTIVATIONS[moe.activation]),
            "score_function": Checked("sigmoid()" if moe.routing.score == "sigmoid" else "softmax(dim=-1)"),
            "scored_experts": Checked("all" if moe.routing.score_over == "all" else "the chosen"),
            "shared_split": "shared_gate_up_loader" in moe_loaders(architecture),
        }
    return context


def router_order(routing: Routing) -> Checked | None:
    """The order of `NF.router` that computes this routing, or None when it has none.

    The operator has no bias for the choice only, no groups and no softcap. Its order with the score before the
    choice always renormalises. A softmax that is renormalised is the softmax of the chosen logits.
    """
    special = (
        routing.correction_bias,
        routing.groups > 1,
        routing.logit_softcap is not None,
        routing.minimum is not None,
    )
    if routing.score == "sparsemixer" or any(special):
        return None
    if routing.score == "softmax":
        chosen_only = routing.score_over == "chosen" or routing.normalise
        return Checked("PRENORM_LINEAR_TOPK_ACT_SCATTER") if chosen_only else None
    if routing.normalise:
        return Checked("PRENORM_LINEAR_ACT_TOPK_RENORM_SCATTER")
    return Checked("PRENORM_LINEAR_TOPK_ACT_SCATTER")


def moe_parameters(architecture: Architecture) -> dict[str, str]:
    """Parameters of a layer with experts and the transform of each one's loader."""
    moe = architecture.moe
    if moe is None:
        return {}
    names = {
        "router_weight": "replicated",
        "expert_gate_up_weight": "expert_gate_up",
        "expert_down_weight": "expert_down",
    }
    optional = {
        "router_bias": (moe.routing.bias, "replicated"),
        "correction_bias": (moe.routing.correction_bias, "replicated"),
        "expert_gate_up_bias": (moe.bias, "expert_gate_up_bias"),
        "expert_down_bias": (moe.bias, "row_bias"),
        "shared_gate_proj_weight": (moe.shared, "column"),
        "shared_up_proj_weight": (moe.shared, "column"),
        "shared_down_proj_weight": (moe.shared, "row"),
        "shared_sigmoid_weight": (moe.shared and moe.shared.gated, "replicated"),
    }
    names |= {name: transform for name, (present, transform) in optional.items() if present}
    return {f"{MLP}.{name}": transform for name, transform in names.items()}


def moe_loaders(architecture: Architecture) -> list[str]:
    """Loaders of the port's own that a mixture of experts needs."""
    moe = architecture.moe
    if moe is None:
        return []
    names = ["expert_gate_up_loader", "expert_down_loader"]
    if moe.bias:
        names.append("expert_gate_up_bias_loader")
    if moe.routing.correction_rows:
        names.append("flat_loader")
    if moe.shared and moe.shared.storage == "concat":
        names.append("shared_gate_up_loader")
    return names
