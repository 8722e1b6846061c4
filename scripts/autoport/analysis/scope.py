"""What can be ported, as tables, and the checks of a model's facts and keys against them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from autoport.analysis.keys import CheckpointKeys
from autoport.errors import Problem
from autoport.research.fields import describe, is_number
from autoport.research.keys import ranges
from autoport.schema import Fact, Facts

Finding = tuple[str, str, str]
"""Rule, what was found, next step."""


class Family(msgspec.Struct, frozen=True):
    """A supported Hugging Face class.

    Attributes:
        model_type: The only model type its config may have.
        qkv_bias: Whether q, k and v have biases: True, False, or the field of the config that says so.
    """

    model_type: str
    qkv_bias: bool | str


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", "attention_bias"),
    "MistralForCausalLM": Family("mistral", False),
    "Qwen2ForCausalLM": Family("qwen2", True),
}

ACTIVATIONS = ("silu", "swish")  # two names of one function
Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
HEADER_DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ROPE_TYPES = ("default", "llama3")
KNOWN_ROPE_TYPES = ("linear", "dynamic", "yarn", "longrope", "mrope", "proportional", "per_layer_type")
LLAMA3_PARAMETERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LARGEST_HEAD_DIM = 128  # flash, segmented and decode attention kernels

# Parts of a layer that a Llama-shaped port does not have: pattern of the key in the layer, rule, what it is.
FOREIGN_KEYS = [
    (
        r"self_attn\.(o_proj|dense|out_proj)\.bias",
        "SCOPE-BIAS",
        "a bias on the attention's output projection",
    ),
    (r"mlp\.\w+\.bias", "SCOPE-BIAS", "a bias in the MLP"),
    (r"\w*(norm|ln_\d)\.bias", "SCOPE-NORM", "a norm with a bias: LayerNorm, not RMSNorm"),
    (r"self_attn\.(q|k|query|key)_?(layer)?norm\..*", "SCOPE-QK-NORM", "a norm on queries or keys"),
    (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\..*", "SCOPE-MLA", "multi-head latent attention"),
    (r"self_attn\.sinks?", "SCOPE-SINK", "attention sinks"),
    (r"\w+\.(qkv_proj|query_key_value|c_attn|W_pack)\..*", "SCOPE-FUSED", "fused q, k and v"),
    (r"mlp\.gate_up_proj\..*", "SCOPE-FUSED", "fused gate and up projections"),
    (r"(mlp|\w*moe|feed_forward)\.(\w*experts?|router|gate)\..*", "SCOPE-MOE", "a mixture of experts"),
]

NEXT_STEP = "only Llama (as Yi is), Mistral without a window and Qwen2 can be ported"


def facts_problems(facts: Facts) -> list[Problem]:
    """Every feature of the config that is out of scope."""
    found = [*_class_findings(facts), *_feature_findings(facts.fields), *_rope_findings(facts.fields)]
    return [Problem(rule, text, facts.config_file, next_step) for rule, text, next_step in found]


def _class_findings(facts: Facts) -> Iterator[Finding]:
    name, model_type = facts.architecture.value, facts.model_type.value
    family = FAMILIES.get(name)
    if family is None:
        yield "SCOPE-ARCH", f"architecture {name!r} is not supported", NEXT_STEP
    elif family.model_type != model_type:
        found = (
            f"model_type {model_type!r} with architecture {name!r}, which belongs to {family.model_type!r}"
        )
        yield "SCOPE-ARCH", found, "correct one of the two in config.json"


def _feature_findings(fields: Mapping[str, Fact]) -> Iterator[Finding]:
    activation, head_dim = fields["activation"], fields["head_dim"]
    if activation.value not in ACTIVATIONS:
        yield "SCOPE-ACTIVATION", f"activation {activation.value!r} ({activation.source})", NEXT_STEP
    if head_dim.value % 2 or head_dim.value > LARGEST_HEAD_DIM:
        found = f"head_dim {head_dim.value}: the kernels take even sizes up to {LARGEST_HEAD_DIM}"
        yield "SCOPE-HEAD-DIM", found, NEXT_STEP
    mlp_bias = fields.get("mlp_bias")
    if mlp_bias and mlp_bias.value:
        yield "SCOPE-BIAS", f"mlp_bias is true ({mlp_bias.source})", NEXT_STEP
    window = fields.get("sliding_window")
    if window and window.value is not None:
        found = f"a sliding window of {window.value} tokens ({window.source})"
        yield "SCOPE-WINDOW", found, "if the model was trained without a window, write sliding_window: null"


def _rope_findings(fields: Mapping[str, Fact]) -> Iterator[Finding]:
    kind, source = fields["rope_type"].value, fields["rope_type"].source
    parameters: dict[str, Any] = fields["rope_parameters"].value
    if kind not in ROPE_TYPES:
        known = "is not supported" if kind in KNOWN_ROPE_TYPES else "is unknown"
        yield "SCOPE-ROPE", f"rope_type {kind!r} {known} ({source})", "only default and llama3 can be ported"
    for partial in (fields.get("partial_rotary_factor"), parameters.get("partial_rotary_factor")):
        value = partial.value if isinstance(partial, Fact) else partial
        if value is not None and value != 1:
            yield "SCOPE-ROPE", f"partial_rotary_factor {value!r}: only part of a head is rotated", NEXT_STEP
    if kind == "llama3":
        yield from _llama3_findings(parameters, source)


def _llama3_findings(parameters: Mapping[str, Any], source: str) -> Iterator[Finding]:
    wrong = [name for name in LLAMA3_PARAMETERS if is_number(parameters.get(name))]
    for name in wrong:
        found = f"llama3 RoPE needs {name}, found {describe(parameters.get(name))} ({source})"
        yield "CFG-ROPE", found, f"correct {name} in config.json"
    if not wrong and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        found = (
            f"high_freq_factor {parameters['high_freq_factor']} is not above "
            f"low_freq_factor {parameters['low_freq_factor']} ({source})"
        )
        yield "CFG-ROPE", found, "correct them in config.json"


def foreign_key_problems(keys: CheckpointKeys, where: str) -> list[Problem]:
    """Every part of a layer, and every bias on the head, that no supported family has."""
    problems = []
    for pattern, rule, what in FOREIGN_KEYS:
        for suffix, layers in sorted(keys.layers.items()):
            if re.fullmatch(pattern, suffix):
                found = f"{what}: {keys.prefix}layers.{{i}}.{suffix} (layers {ranges(layers)})"
                problems.append(Problem(rule, found, where, NEXT_STEP))
                break
    for key in sorted(keys.others):
        if key.endswith("lm_head.bias"):
            problems.append(Problem("SCOPE-BIAS", f"a bias on the head: {key}", where, NEXT_STEP))
        if key.endswith("norm.bias"):
            problems.append(Problem("SCOPE-NORM", f"a norm with a bias: {key}", where, NEXT_STEP))
    return problems
