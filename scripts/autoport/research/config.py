"""Step 1: every semantic field of config.json, each with its source."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from autoport.errors import Problem, Refusal, refuse
from autoport.research.config_defaults import causal_lm_classes
from autoport.research.config_types import type_conflicts
from autoport.research.experts import resolve_experts
from autoport.research.fields import (
    Resolver,
    describe,
    is_flag,
    is_integer,
    is_number,
    is_part_count,
    is_text,
)
from autoport.research.heterogeneous import heterogeneous_problems
from autoport.research.json_text import UnusableJson, parse_json
from autoport.research.latent import resolve_latent
from autoport.research.layers import resolve_layers
from autoport.research.nested import TEXT_PATHS, find_text_config, find_vision_config
from autoport.research.rope import resolve_rope
from autoport.research.source import Source
from autoport.schema.facts import Fact, Facts

LARGEST_CONFIG_BYTES = 16 * 1024 * 1024

REQUIRED = {
    "vocab_size": is_integer,
    "hidden_size": is_integer,
    "intermediate_size": is_integer,
    "num_layers": is_part_count,
    "num_heads": is_part_count,
    "max_position_embeddings": is_integer,
    "norm_eps": is_number,
    "activation": is_text,
    "tie_word_embeddings": is_flag,
}
NOT_PORTED = (
    "references/coverage.md lists the classes that can be ported; to write this one by hand, start at Step 4 of "
    "SKILL.md from the nearest reference model"
)
OPTIONAL = {
    "attention_bias": is_flag,
    "mlp_bias": is_flag,
    "head_bias": is_flag,
    "partial_rotary_factor": is_number,
}

VISION_SIZES = {
    "num_heads": ("num_attention_heads", "num_heads"),
    "hidden_size": ("hidden_size", "embed_dim"),
    "intermediate_size": ("intermediate_size",),
}
TRAINING_KEYS = {
    "aux_loss_alpha", "ep_size", "input_jitter_noise", "layer_norm_init", "moe_aux_loss_coeff",
    "moe_jitter_eps", "moe_loss_weight", "norm_init", "num_nextn_predict_layers", "output_router_logits",
    "rescale_prenorm_residual", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "seq_aux",
}  # fmt: skip
DROPOUT_KEY = re.compile(r"(dropout|pdrop)(_rate|_prob|_p)?$")
# Keys that change the model's output when a class reads them; the rest (token ids, ...) does not.
SEMANTIC_KEY = re.compile(
    r"_(multiplier|scale|scaling|factor|scalar|base|cap|capping|theta|rank|window|window_size|bias|pattern|interval)$"
    r"|^(scale|residual|logit|qk_|qkv_|clip_|no_rope|alibi|parallel_|sandwich|attn_|ffn_|block_configs|per_layer)"
    r"|expert|moe|router|norm|nope|softcap|lora|mup|rope|rotary|bias|sink|swiglu|parallel|_layers$|layer_types$"
    r"|sliding_window|chunk"
)


def load_config(source: Source) -> dict[str, Any]:
    """Read config.json.

    Raises:
        Refusal: CFG-MISSING-FILE, CFG-SIZE (over 16 MiB) or CFG-JSON (no JSON object, NaN, too deep, a key twice).
    """
    name, where = source.config_name, source.config_file
    if name not in source.sizes:
        raise refuse("CFG-MISSING-FILE", "no config.json", where, "pass the folder that holds config.json")
    if source.sizes[name] > LARGEST_CONFIG_BYTES:
        raise refuse(
            "CFG-SIZE", f"{source.sizes[name]} bytes is no config", where, "pass the model's config.json"
        )
    try:
        text = source.read(name, 0, LARGEST_CONFIG_BYTES).decode()
        config = parse_json(text)
        msgspec.json.encode(config)  # refuses half of a surrogate pair
    except UnusableJson as error:
        raise refuse("CFG-JSON", str(error), where, "correct it in config.json") from error
    except ValueError as error:
        raise refuse("CFG-JSON", f"not valid JSON: {error}", where, "download the file again") from error
    if not isinstance(config, dict):
        raise refuse(
            "CFG-JSON", f"is {describe(config)}, not an object", where, "pass the model's config.json"
        )
    return config


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config's content, whatever its spaces and the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def read_facts(source: Source, config: Mapping[str, Any] | None = None) -> Facts:
    """Resolve every field the analysis needs, of the decoder inside a larger model where there is one.

    Raises:
        Refusal: with every problem of the config at once.
    """
    config = load_config(source) if config is None else config
    path, text = find_text_config(config)
    resolver = Resolver(text, source.config_file, path, outer=config if path else {})
    if path and "hidden_size" in config and "num_hidden_layers" in config:
        resolver.problem(
            "CFG-NESTED",
            f"both the top level and {path.rstrip('.')} describe a decoder",
            "keep the one that the checkpoint belongs to",
        )
    _check_objects(resolver, config)
    architecture = _architecture(resolver, config)
    model_type = _model_type(resolver, architecture)
    if model_type:
        resolver.use_class(model_type.value)
    fields = _fields(resolver)
    fields |= _vision(config)
    _check_scope(resolver, architecture, model_type)
    _check_class(resolver)
    if resolver.problems or architecture is None or model_type is None:
        raise Refusal(*resolver.problems)
    auto_map = config.get("auto_map")
    return Facts(
        source=source.name,
        config_file=source.config_file,
        config=dict(config),
        config_content=source.contents.get(source.config_name, ""),
        architecture=architecture,
        model_type=model_type,
        fields=fields,
        text_path=path,
        unconsumed={f"{path}{key}": value for key, value in _unconsumed(resolver)},
        remote_code=auto_map if isinstance(auto_map, dict) else {},
        warnings=resolver.warnings,
    )


def _check_objects(resolver: Resolver, config: Mapping[str, Any]) -> None:
    """Record (CFG-TYPE) remote code that is no object, and stop at a decoder's config that is none.

    Raises:
        Refusal: The rest of such a config says nothing of the decoder.
    """
    for key in ("auto_map", *(path[0] for path in TEXT_PATHS)):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            found = f"{key} is {describe(value)}, not an object"
            resolver.problem("CFG-TYPE", found, f"correct {key} in config.json, or remove it")
            if key != "auto_map":
                raise Refusal(*resolver.problems)


def _check_scope(resolver: Resolver, architecture: Fact | None, model_type: Fact | None) -> None:
    """Stop (SCOPE-ARCH) at a class that has no place for what a decoder has.

    Raises:
        Refusal: That and what makes its layers differ; the other problems of such a config would only repeat it.
    """
    if architecture is None or model_type is None or not resolver.without_value:
        return
    missing = ", ".join(resolver.without_value)
    if resolver.defaults:
        why = (
            f"the config class of {model_type.value!r} has no {missing}, as a decoder of attention layers has"
        )
    else:
        why = f"transformers has no model_type {model_type.value!r}, and config.json gives no {missing}"
    found = f"architecture {architecture.value!r} is not supported: {why}"
    differing = [problem for problem in resolver.problems if problem.rule == "CFG-PER-LAYER"]
    raise Refusal(Problem("SCOPE-ARCH", found, str(resolver.config_file), NOT_PORTED), *differing)


def _check_class(resolver: Resolver) -> None:
    """Record (CFG-CLASS) why transformers' config class would not load this config."""
    named = " ".join(problem.found for problem in resolver.problems)
    for key, why in type_conflicts(resolver.model_type, resolver.config):
        if not re.search(rf"\b{re.escape(key)}\b", named):
            found = f"{resolver.path}{key} is {describe(resolver.config[key])}; {why}"
            resolver.problem("CFG-CLASS", found, f"correct {key} in config.json, or remove it")
    if resolver.rejected and not resolver.problems:
        found = f"transformers rejects the config when {resolver.rejected}"
        resolver.problem("CFG-CLASS", found, "correct these values in config.json")


def _unconsumed(resolver: Resolver) -> Iterator[tuple[str, Any]]:
    """Keys that look semantic and that no field took."""
    for key, value in resolver.config.items():
        if key in resolver.consumed or key in TRAINING_KEYS or value in (None, [], {}):
            continue
        if SEMANTIC_KEY.search(key) and not DROPOUT_KEY.search(key):
            yield key, value


def _fields(resolver: Resolver) -> dict[str, Fact]:
    hybrid = heterogeneous_problems(resolver)
    found = {name: resolver.required(name, check) for name, check in REQUIRED.items() if name not in hybrid}
    found |= {name: resolver.optional(name, check) for name, check in OPTIONAL.items()}
    facts = {name: fact for name, fact in found.items() if fact is not None}
    facts |= resolve_latent(resolver)
    if "num_kv_heads" not in hybrid:
        facts |= _heads(resolver, facts)
    facts |= resolve_rope(resolver)
    dtype = _dtype(resolver)
    if dtype:
        facts["dtype"] = dtype
    facts |= resolve_layers(resolver, facts)
    facts |= resolve_experts(resolver, facts)
    return facts


def _vision(config: Mapping[str, Any]) -> dict[str, Fact]:
    """Sizes of the vision tower; nothing else is taken from it."""
    found = find_vision_config(config)
    if found is None:
        return {}
    path, vision = found
    facts = {"vision": Fact(True, f"config.json: {path.rstrip('.')}")}
    for name, keys in VISION_SIZES.items():
        for key in keys:
            if type(vision.get(key)) is int and vision[key] > 0:
                facts.setdefault(f"vision_{name}", Fact(vision[key], f"config.json: {path}{key}"))
    return facts


def _architecture(resolver: Resolver, config: Mapping[str, Any]) -> Fact | None:
    """The one class in `architectures`, which must be a causal language model."""
    resolver.consumed.add("architectures")
    value = config.get("architectures")
    suggestion = causal_lm_classes().get(str(config.get("model_type")))
    advice = "set it to one class name for causal language modelling" + (
        f'; for this model_type that is ["{suggestion}"] (please confirm)' if suggestion else ""
    )
    if not isinstance(value, list) or not value:
        found = "missing" if "architectures" not in config else describe(value)
        resolver.problem("CFG-ARCH", f"architectures is {found}", advice)
        return None
    names = [name for name in value if isinstance(name, str) and name.isidentifier() and name.isascii()]
    if len(value) != 1 or names != value:
        resolver.problem("CFG-ARCH", f"architectures is {describe(value)}, not one class name", advice)
        return None
    name = names[0]
    generative = name.endswith("ForCausalLM") or (resolver.path and name.endswith("ForConditionalGeneration"))
    if not generative and name not in causal_lm_classes().values():
        raise refuse(
            "CFG-ARCH",
            f"architectures is {describe(value)}, not a causal language model",
            resolver.config_file,
            advice if suggestion else NOT_PORTED,
        )
    if config.get("is_encoder_decoder") is True:
        raise refuse(
            "SCOPE-ARCH",
            f"architecture {name!r} is not supported: is_encoder_decoder is true, and only decoders are ported",
            resolver.config_file,
            NOT_PORTED,
        )
    return Fact(name, "config.json: architectures")


def _model_type(resolver: Resolver, architecture: Fact | None) -> Fact | None:
    resolver.consumed.add("model_type")
    value = resolver.config.get("model_type")
    if isinstance(value, str) and value:
        return Fact(value, f"config.json: {resolver.path}model_type")
    if value is not None or architecture:
        found = "missing" if "model_type" not in resolver.config else describe(value)
        owners = [
            key for key, name in causal_lm_classes().items() if architecture and name == architecture.value
        ]
        hint = f'; for {architecture.value} it is "{owners[0]}"' if architecture and owners else ""
        next_step = f"add {resolver.path}model_type to config.json, transformers needs it{hint}"
        resolver.problem("CFG-MODEL-TYPE", f"{resolver.path}model_type is {found}", next_step)
    return None


def _heads(resolver: Resolver, facts: Mapping[str, Fact]) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    count = len(resolver.problems)
    kv_heads = resolver.optional("num_kv_heads", is_part_count)
    head_dim = resolver.optional("head_dim", is_integer)
    heads, hidden = facts.get("num_heads"), facts.get("hidden_size")
    if len(resolver.problems) > count or heads is None or hidden is None:
        return found
    found["num_kv_heads"] = kv_heads or Fact(heads.value, "derived: num_heads (no num_key_value_heads)")
    if heads.value % found["num_kv_heads"].value:
        resolver.problem(
            "CFG-GQA",
            f"{heads.value} query heads are not a multiple of {found['num_kv_heads'].value} key/value heads",
            "correct num_attention_heads or num_key_value_heads",
        )
    derived = head_dim is None or (
        head_dim.source.startswith("derived") and head_dim.value == hidden.value // heads.value
    )
    if derived and hidden.value % heads.value:
        resolver.problem(
            "CFG-HEAD-DIM",
            f"head_dim is not given and hidden_size {hidden.value} is not a multiple of {heads.value} heads",
            "add head_dim to config.json",
        )
        return found
    found["head_dim"] = head_dim or Fact(hidden.value // heads.value, "derived: hidden_size / num_heads")
    return found


def _dtype(resolver: Resolver) -> Fact | None:
    fact = resolver.optional("dtype", is_text)
    return Fact(fact.value.removeprefix("torch."), fact.source) if fact else None
