"""What can be ported, as tables, and the checks of a model's facts and keys against them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from autoport import expressions
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.moe import moe_findings
from autoport.analysis.positions import rope_blocks, rope_by_label, rotary_dim
from autoport.analysis.traits import Traits
from autoport.errors import Problem
from autoport.families import find_family
from autoport.families.family import NORM_NAMES, Family
from autoport.research.fields import describe, is_number
from autoport.research.keys import ranges
from autoport.research.not_ported import unported_class
from autoport.research.rope import SCALINGS, supported_types
from autoport.schema.facts import Fact, Facts

INCOMPLETE = "'autoport port NAME SOURCE --incomplete' writes all the rest"
BY_HAND = (
    "port it without this part if config.json is wrong, or write this part by hand in Step 4 of SKILL.md, "
    "from the nearest reference model"
)
Finding = tuple[str, str, str]
"""Rule, what was found, next step."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
# Names in transformers -> the function. The four spellings of gelu_tanh differ in rounding only.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
HEADER_DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
KNOWN_ROPE_TYPES = ("mrope", "proportional", "per_layer_type")

GapSection = Literal["attention", "mlp", "decoder"]
# What a refusal is about -> the section that `--incomplete` leaves out for it; every other refusal stands.
GAP_RULES: dict[str, GapSection] = {
    "SCOPE-ACTIVATION": "mlp",
    "SCOPE-ALIBI": "attention",
    "SCOPE-SINK": "attention",
    "SCOPE-QK-NORM": "attention",
    "SCOPE-BLOCK": "decoder",
}

# Parts of a layer that a family must have declared: pattern of the key in the layer, rule, what it is.
FOREIGN_KEYS = [
    (r".*norm\w*\.bias", "SCOPE-NORM", "a norm with a bias: LayerNorm, not RMSNorm"),
    (r"[\w.]*(o_proj|dense|out_proj)\.bias", "SCOPE-BIAS", "a bias on the attention's output projection"),
    (r"mlp\.\w+\.bias", "SCOPE-BIAS", "a bias in the MLP"),
    (r"self_attn\.(q|k|query|key)_?(layer)?norm\..*", "SCOPE-QK-NORM", "a norm on queries or keys"),
    (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\..*", "SCOPE-MLA", "multi-head latent attention"),
    (r"self_attn\.sinks?", "SCOPE-SINK", "attention sinks"),
    (r"\w+\.(qkv_proj|query_key_value|c_attn|W_pack)\..*", "SCOPE-FUSED", "fused q, k and v"),
    (r"mlp\.gate_up_proj\..*", "SCOPE-FUSED", "fused gate and up projections"),
    (r"(mlp|\w*moe|feed_forward)\.(\w*experts?|router|gate)\..*", "SCOPE-MOE", "a mixture of experts"),
]


def _next_step(rule: str) -> str:
    """What to do about a part that is out of scope; `--incomplete` only where it can leave that part out."""
    return f"{BY_HAND}; {INCOMPLETE}" if rule in GAP_RULES else BY_HAND


def facts_problems(facts: Facts, assumed: Family | None = None) -> list[Problem]:
    """Every feature of the config that is out of scope.

    Args:
        assumed: Declaration to go by, whether or not the class has one.
    """
    name, model_type = facts.architecture.value, facts.model_type.value
    family = assumed or find_family(name, model_type)
    if family is None:
        return unported_class(facts).problems(facts.config_file)
    traits = Traits(family, facts)
    found: list[Finding] = []
    if not assumed and family.model_type != model_type:
        text = f"model_type {model_type!r} with architecture {name!r}, which belongs to {family.model_type!r}"
        found.append(("SCOPE-ARCH", text, "correct one of the two in config.json"))
    found += [*_feature_findings(facts.fields, traits), *_rope_findings(facts.fields, traits)]
    found += moe_findings(traits)
    return [Problem(rule, text, facts.config_file, next_step) for rule, text, next_step in found]


def _feature_findings(fields: Mapping[str, Fact], traits: Traits) -> Iterator[Finding]:
    activation, head_dim = fields["activation"], fields["head_dim"]
    if activation.value not in ACTIVATIONS:
        found = f"activation {activation.value!r} ({activation.source})"
        yield "SCOPE-ACTIVATION", found, _next_step("SCOPE-ACTIVATION")
    if head_dim.value % 2:
        yield "SCOPE-HEAD-DIM", f"head_dim {head_dim.value} is odd ({head_dim.source})", BY_HAND
    topology = traits.fact(traits.family.topology)
    if topology.value not in NORM_NAMES:
        found = f"the norms of a layer: {topology.value} ({topology.source})"
        yield "SCOPE-BLOCK", found, _next_step("SCOPE-BLOCK")
    for condition, rule, what in traits.family.requires:
        fact = traits.fact(condition)
        if not fact.value:
            what = re.sub(r"\{(.+?)\}", lambda match: describe(traits.value(match[1])), what)
            place = _read_at(traits.facts, *expressions.names(condition))
            yield rule, f"{what} ({fact.source}{place})", _next_step(rule)


def _read_at(facts: Facts, *attributes: str) -> str:
    """Where the modeling file reads one of these config attributes first."""
    places = [facts.modeling.reads[name] for name in attributes if name in facts.modeling.reads]
    return f"; {places[0]}" if places else ""


def _rope_findings(fields: Mapping[str, Fact], traits: Traits) -> Iterator[Finding]:
    if not traits.value(traits.family.rotary):
        return
    kind, source = fields["rope_type"].value, fields["rope_type"].source
    parameters: dict[str, Any] = fields["rope_parameters"].value
    if traits.family.partial_rotary_factor is None and not traits.family.rotary_dim:
        top = fields.get("partial_rotary_factor")
        value = parameters.get("partial_rotary_factor", top.value if top else None)
        if value is not None and value != 1:
            found = f"partial_rotary_factor {value!r}, which the class does not read"
            yield "SCOPE-ROPE", found, "remove it from config.json"
    if kind != "per_layer_type":
        yield from _scaling_findings(kind, parameters, source)
        if kind == "longrope":
            yield from _longrope_findings(traits, parameters, source)
        return
    if not traits.family.rope_labels:
        yield "SCOPE-ROPE", f"a rotary embedding for each kind of layer ({source})", BY_HAND
        return
    for label, block in rope_blocks(parameters).items():
        kind = block.get("rope_type", "default")
        yield from _scaling_findings(kind, block, f"{source}.{label}")
        if kind in ("dynamic", "longrope"):
            yield "SCOPE-ROPE", f"rope_type {kind!r} for one kind of layer ({source}.{label})", BY_HAND
    ropes = rope_by_label(traits, traits.per_layer(traits.family.rope_labels))
    if len({rope.rotary_dim for rope in ropes.values()}) > 1:
        place = _read_at(traits.facts, "rope_parameters")
        yield (
            "SCOPE-ROPE",
            f"kinds of layers that rotate different parts of a head ({source}{place})",
            f"{BY_HAND}: permute q and k of each kind at load time, with identity rows (cos 1, sin 0) for the rest",
        )


def _scaling_findings(kind: Any, parameters: Mapping[str, Any], source: str) -> Iterator[Finding]:
    if kind not in SCALINGS:
        known = "is not supported" if kind in KNOWN_ROPE_TYPES else "is unknown"
        step = f"only default and these can be ported: {supported_types()}"
        yield "SCOPE-ROPE", f"rope_type {kind!r} {known} ({source})", step
        return
    wrong = [name for name in SCALINGS[kind].numbers if is_number(parameters.get(name))]
    for name in wrong:
        found = f"{kind} RoPE needs {name}, found {describe(parameters.get(name))} ({source})"
        yield "CFG-ROPE", found, f"correct {name} in config.json"
    if kind == "llama3" and not wrong and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        found = (
            f"high_freq_factor {parameters['high_freq_factor']} is not above "
            f"low_freq_factor {parameters['low_freq_factor']} ({source})"
        )
        yield "CFG-ROPE", found, "correct them in config.json"


def _longrope_findings(traits: Traits, parameters: Mapping[str, Any], source: str) -> Iterator[Finding]:
    size = (rotary_dim(traits, dict(parameters)) or traits.facts.fields["head_dim"].value) // 2
    for name in SCALINGS["longrope"].lists:
        factors = parameters.get(name)
        if not isinstance(factors, list) or len(factors) != size or any(map(is_number, factors)):
            found = (
                f"longrope RoPE needs {name}, a list of {size} numbers, found {describe(factors)} ({source})"
            )
            yield "CFG-ROPE", found, f"correct {name} in config.json"
    for name in ("short_mscale", "long_mscale") if traits.family.rope_mscale else ():
        if is_number(parameters.get(name)):
            found = f"longrope RoPE needs {name}, found {describe(parameters.get(name))} ({source})"
            yield "CFG-ROPE", found, f"correct {name} in config.json"


def foreign_key_problems(keys: CheckpointKeys, family: Family, where: str) -> list[Problem]:
    """Every part of a layer, and every bias outside the layers, that the family does not declare."""
    names = keys.names
    declared = {
        value for field in names.__struct_fields__ if isinstance(value := getattr(names, field), str)
    } - {""}
    declared |= {name for topology in NORM_NAMES for name in names.layer_norms(topology)}
    declared |= {family.moe.keys.router} if family.moe else set()
    problems = []
    for pattern, rule, what in FOREIGN_KEYS:
        for suffix, layers in sorted(keys.layers.items()):
            name, _, kind = suffix.rpartition(".")
            known = re.sub(r"\.\d+$", ".{h}", name) in declared or suffix in declared
            if suffix == names.sinks and family.sinks == "False":
                known = False
            if family.qk_norm is None and name in (names.q_norm, names.k_norm, names.sinks):
                known = False
            if kind == "bias" and rule == "SCOPE-NORM" and family.norm == "layer":
                continue
            if kind == "bias" and rule == "SCOPE-NORM" and family.norm == "rms":
                known = False
            if rule == "SCOPE-MOE" and family.moe:
                continue
            if not known and re.fullmatch(pattern, suffix):
                found = f"{what}: {keys.layer}{suffix} (layers {ranges(layers)})"
                problems.append(Problem(rule, found, where, _next_step(rule)))
                break
    for key in sorted(keys.others):
        if key == f"{names.head}.bias" and not family.head_bias:
            problems.append(Problem("SCOPE-BIAS", f"a bias on the head: {key}", where, BY_HAND))
        if key == f"{keys.prefix}{names.final_norm}.bias" and family.norm == "rms":
            problems.append(Problem("SCOPE-NORM", f"a norm with a bias: {key}", where, BY_HAND))
    return problems
