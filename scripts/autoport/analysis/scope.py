"""What can be ported, as tables, and the checks of a model's facts and keys against them."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from autoport.analysis.keys import CheckpointKeys, ranges
from autoport.errors import Problem
from autoport.schema import Fact, Facts


class Family(msgspec.Struct, frozen=True):
    """How a supported Hugging Face class decides about biases on q, k and v.

    Attributes:
        model_type: The only model type its config may have.
        qkv_bias: True or False where the class always or never has them, the name of a field where that decides.
    """

    model_type: str
    qkv_bias: bool | str


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", "attention_bias"),
    "MistralForCausalLM": Family("mistral", False),
    "Qwen2ForCausalLM": Family("qwen2", True),
}

ACTIVATIONS = {"silu": "silu", "swish": "silu"}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
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
    (r"\w*(layer_?norm|ln_\d|norm)\.bias", "SCOPE-NORM", "a norm with a bias: LayerNorm, not RMSNorm"),
    (r"self_attn\.(q|k|query|key)_?(layer)?norm\..*", "SCOPE-QK-NORM", "a norm on queries or keys"),
    (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\..*", "SCOPE-MLA", "multi-head latent attention"),
    (r"self_attn\.sinks?", "SCOPE-SINK", "attention sinks"),
    (
        r"(self_attn|attention)\.(qkv_proj|query_key_value|c_attn|W_pack)\..*",
        "SCOPE-FUSED",
        "fused q, k and v",
    ),
    (r"mlp\.gate_up_proj\..*", "SCOPE-FUSED", "fused gate and up projections"),
    (
        r"(mlp|block_sparse_moe|feed_forward|moe)\.(.*experts?|router|gate)\..*",
        "SCOPE-MOE",
        "a mixture of experts",
    ),
]

BASE_NEXT_STEP = "only Llama, Yi, Mistral without a window and Qwen2 can be ported; choose such a checkpoint"


def facts_problems(facts: Facts) -> list[Problem]:
    """Every feature of the config that is out of scope."""
    problems: list[Problem] = []

    def problem(rule: str, found: str, next_step: str = BASE_NEXT_STEP) -> None:
        problems.append(Problem(rule, found, facts.config_file, next_step))

    family = FAMILIES.get(facts.architecture.value)
    if family is None:
        problem("SCOPE-ARCH", f"architecture {facts.architecture.value!r} is not supported")
    elif family.model_type != facts.model_type.value:
        problem(
            "SCOPE-ARCH",
            f"model_type {facts.model_type.value!r} with architecture {facts.architecture.value!r}, "
            f"which belongs to {family.model_type!r}",
            "correct one of the two in config.json",
        )
    activation = _value(facts.fields, "activation")
    if activation not in ACTIVATIONS:
        problem("SCOPE-ACTIVATION", f"activation {activation!r} ({_source(facts, 'activation')})")
    if _value(facts.fields, "mlp_bias"):
        problem("SCOPE-BIAS", f"mlp_bias is true ({_source(facts, 'mlp_bias')})")
    if _value(facts.fields, "sliding_window") is not None:
        problem(
            "SCOPE-WINDOW",
            f"a sliding window of {_value(facts.fields, 'sliding_window')} tokens ({_source(facts, 'sliding_window')})",
            "sliding windows are not generated; if the model was trained without one, write sliding_window: null",
        )
    dtype = _value(facts.fields, "dtype")
    if dtype is not None and dtype not in DTYPES:
        problem("SCOPE-DTYPE", f"dtype {dtype!r}", "write bfloat16, float16 or float32")
    head_dim = _value(facts.fields, "head_dim")
    if head_dim % 2 or head_dim > LARGEST_HEAD_DIM:
        problem(
            "SCOPE-HEAD-DIM", f"head_dim {head_dim}: the kernels take even sizes up to {LARGEST_HEAD_DIM}"
        )
    for rule, found, next_step in _rope_problems(facts.fields):
        problem(rule, found, next_step)
    return problems


def _rope_problems(fields: Mapping[str, Fact]) -> list[tuple[str, str, str]]:
    kind, source = fields["rope_type"].value, fields["rope_type"].source
    parameters: dict[str, Any] = fields["rope_parameters"].value
    problems = []
    if kind not in ROPE_TYPES:
        known = "is not supported" if kind in KNOWN_ROPE_TYPES else "is unknown"
        problems.append(
            (
                "SCOPE-ROPE",
                f"rope_type {kind!r} {known} ({source})",
                "only default and llama3 RoPE can be ported",
            )
        )
    partial = _value(fields, "partial_rotary_factor") or parameters.get("partial_rotary_factor")
    if partial is not None and partial != 1:
        problems.append(
            (
                "SCOPE-ROPE",
                f"partial_rotary_factor {partial!r}: only part of a head is rotated",
                BASE_NEXT_STEP,
            )
        )
    if kind == "llama3":
        numbers = {}
        for name in LLAMA3_PARAMETERS:
            value = parameters.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
                problems.append(
                    (
                        "CFG-ROPE",
                        f"llama3 RoPE needs {name}, found {value!r} ({source})",
                        f"correct {name} in config.json",
                    )
                )
            else:
                numbers[name] = value
        low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
        if low is not None and high is not None and high <= low:
            problems.append(
                (
                    "CFG-ROPE",
                    f"high_freq_factor {high} is not above low_freq_factor {low} ({source})",
                    "correct them",
                )
            )
    return problems


def foreign_key_problems(keys: CheckpointKeys, where: str) -> list[Problem]:
    """Every part of a layer, and every bias on the head, that no supported family has."""
    problems = []
    for pattern, rule, what in FOREIGN_KEYS:
        for suffix, layers in sorted(keys.layers.items()):
            if re.fullmatch(pattern, suffix):
                found = f"{what}: {keys.prefix}layers.{{i}}.{suffix} (layers {ranges(layers)})"
                problems.append(Problem(rule, found, where, BASE_NEXT_STEP))
                break
    for key in sorted(keys.others):
        if key.endswith("lm_head.bias"):
            problems.append(Problem("SCOPE-BIAS", f"a bias on the head: {key}", where, BASE_NEXT_STEP))
        if key.endswith("norm.bias"):
            problems.append(Problem("SCOPE-NORM", f"a norm with a bias: {key}", where, BASE_NEXT_STEP))
    return problems


def _value(fields: Mapping[str, Fact], name: str) -> Any:
    return fields[name].value if name in fields else None


def _source(facts: Facts, name: str) -> str:
    return facts.fields[name].source
