"""The mixture of experts of a decoder: routing, experts, and which layers have them."""

from collections.abc import Iterator
from typing import Literal

from autoport.analysis.traits import Traits
from autoport.expressions import names
from autoport.families.moe_style import MoeStyle
from autoport.schema.architecture import Architecture, Moe, Norm, Routing, SharedExperts

EXPERT_ACTIVATIONS: dict[str, Literal["silu", "gelu"]] = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
SHARED_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    **EXPERT_ACTIVATIONS,
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
SWISH_ALPHA = 1.702  # factor inside the sigmoid of the device's Swish experts
LARGEST_TOP_K = 16  # limit of the decode kernel for experts

Finding = tuple[str, str, str]


def describe_moe(traits: Traits, norm: Norm, topology: str) -> Moe | None:
    """Describe the experts; None for a family without.

    Call `moe_findings` first: what it finds has no description.
    """
    style = traits.family.moe
    if style is None:
        return None
    routing = _routing(traits, style)
    alpha = traits.number(style.alpha)
    return Moe(
        routing=routing,
        intermediate_size=traits.value(style.intermediate_size),
        activation="swish_1702" if alpha else EXPERT_ACTIVATIONS.get(_activation(traits, style), "silu"),
        clamp=traits.number(style.clamp),
        up_offset=1.0 if alpha else None,
        bias=style.expert_bias,
        shared=_shared(traits, style),
        storage=style.layout,
        composed=tuple(_composed(routing, norm, topology)),
    )


def moe_layers(traits: Traits) -> list[bool]:
    """Whether each layer has experts; empty when all have, or none."""
    style = traits.family.moe
    if style is None or not style.layers:
        return []
    layers = [bool(value) for value in traits.per_layer(style.layers)]
    return [] if all(layers) else layers


def has_dense_layers(architecture: Architecture) -> bool:
    """Whether any layer has an MLP instead of experts."""
    return architecture.moe is None or bool(architecture.layers.moe)


def moe_readings(traits: Traits, dense: dict[str, str]) -> dict[str, str]:
    """Expressions over the Hugging Face config's attributes, by field of the generated config class.

    Args:
        dense: Those of the rest of the model; an intermediate size of layers that are not there is left out.
    """
    style = traits.family.moe
    if style is None:
        return dense
    layers = moe_layers(traits)
    readings = {field: text for field, text in dense.items() if layers or field != "intermediate_size"}
    readings |= {
        "num_experts": style.num_experts,
        "num_experts_per_tok": style.top_k,
        "moe_intermediate_size": style.intermediate_size,
    }
    routing = _routing(traits, style)
    if routing.groups > 1:
        readings |= {"num_expert_groups": style.groups, "num_top_groups": style.top_groups}
    numbers = {
        "routed_scaling": (routing.scaling, style.scaling),
        "router_softcap": (routing.logit_softcap, style.logit_softcap),
        "router_minimum": (routing.minimum, style.minimum),
        "router_threshold": (routing.threshold, style.threshold),
        "expert_clamp": (traits.number(style.clamp), style.clamp),
    }
    readings |= {field: text for field, (value, text) in numbers.items() if value is not None}
    if _shared(traits, style):
        readings["shared_intermediate_size"] = style.shared_size
    if layers:
        readings["layer_moe"] = style.layers
    return readings


def moe_checks(traits: Traits) -> dict[str, object]:
    """Expressions that decide what is generated, with the values that it is generated for."""
    style = traits.family.moe
    if style is None:
        return {}
    decisive = (style.score, style.score_over, style.normalise, style.combine, style.activation)
    return {text: traits.value(text) for text in decisive if text and names(text)}


def moe_findings(traits: Traits) -> Iterator[Finding]:
    """What of the mixture of experts is out of scope: rule, what was found, next step."""
    style = traits.family.moe
    if style is None:
        return
    for name, text in (("number of experts", style.num_experts), ("experts per token", style.top_k)):
        fact = traits.fact(text)
        if isinstance(fact.value, bool) or not isinstance(fact.value, int) or fact.value < 1:
            yield "MOE-SIZE", f"{name}: {fact.value!r} ({fact.source})", "a single positive number is needed"
            return
    routing = _routing(traits, style)
    if routing.num_experts < 2 or routing.top_k > min(routing.num_experts, LARGEST_TOP_K):
        found = f"{routing.top_k} of {routing.num_experts} experts per token"
        yield "MOE-SIZE", found, f"at most {LARGEST_TOP_K} of two experts or more can be ported"
    if routing.num_experts % routing.groups or routing.top_groups > routing.groups:
        found = (
            f"{routing.num_experts} experts in {routing.groups} groups, {routing.top_groups} of them chosen"
        )
        yield "MOE-GROUPS", found, "correct the groups in config.json"
    if routing.score == "sparsemixer" and routing.top_k != 2:
        yield "MOE-ROUTER", f"{routing.top_k} experts per token with sparsemixer", "it is defined for two"
    for expression, possible in (
        (style.score, ("softmax", "sigmoid", "sparsemixer")),
        (style.combine, ("sum", "average")),
    ):
        fact = traits.fact(expression)
        if fact.value not in possible:
            yield "MOE-ROUTER", f"{fact.value!r} ({fact.source})", f"only {', '.join(possible)} can be ported"
    alpha = traits.number(style.alpha)
    if alpha is not None and alpha != SWISH_ALPHA:
        yield "MOE-ACTIVATION", f"{style.alpha} {alpha:g}", f"the experts' kernel has {SWISH_ALPHA} only"
    activation = _activation(traits, style)
    if alpha is None and activation not in EXPERT_ACTIVATIONS:
        known = ", ".join(EXPERT_ACTIVATIONS)
        yield "MOE-ACTIVATION", f"experts with activation {activation!r}", f"only {known} can be ported"


def _activation(traits: Traits, style: MoeStyle) -> str:
    return str(
        traits.value(style.activation) if style.activation else traits.facts.fields["activation"].value
    )


def _routing(traits: Traits, style: MoeStyle) -> Routing:
    groups, top_groups = traits.value(style.groups) or 1, traits.value(style.top_groups) or 1
    binds = groups > 1 and top_groups < groups
    return Routing(
        num_experts=traits.value(style.num_experts),
        top_k=traits.value(style.top_k),
        score=traits.value(style.score),
        score_over=traits.value(style.score_over),
        bias=style.bias,
        correction_bias=style.correction_bias,
        correction_rows=style.correction_rows,
        groups=groups if binds else 1,
        top_groups=top_groups if binds else 1,
        normalise=bool(traits.value(style.normalise)),
        epsilon=style.epsilon,
        minimum=traits.number(style.minimum),
        scaling=traits.number(style.scaling, neutral=1),
        logit_softcap=traits.number(style.logit_softcap, neutral=0),
        threshold=traits.number(style.threshold),
    )


def _shared(traits: Traits, style: MoeStyle) -> SharedExperts | None:
    size = traits.value(style.shared_size)
    if not size:
        return None
    activation = str(traits.facts.fields["activation"].value)
    return SharedExperts(
        intermediate_size=size,
        activation=SHARED_ACTIVATIONS.get(activation, "silu"),
        gated=style.shared_gated,
        combine=traits.value(style.combine),
        storage="concat" if style.keys.shared_gate_up else "separate",
    )


def _composed(routing: Routing, norm: Norm, topology: str) -> Iterator[str]:
    """Why the fused decode operator (norm, router and experts) cannot express this."""
    if topology != "pre_norm":
        yield "the experts' input is not the normed residual stream"
    if norm.kind != "rms" or norm.weight == "none":
        yield "the norm before the experts is no RMSNorm with a weight"
    if routing.score == "sparsemixer":
        yield "sparsemixer routing"
    if routing.correction_bias:
        yield "a correction bias for the choice of experts"
    if routing.groups > 1:
        yield "groups of experts"
    if routing.scaling is not None:
        yield "a scaling of the experts' weights"
    if routing.logit_softcap is not None:
        yield "a softcap of the router's logits"
    if routing.minimum is not None:
        yield "a lower limit of the sum that weights are divided by"
