"""A plan with gaps: what no declaration covers is left to a person, all the rest is planned as always.

A class without a declaration is taken for Llama with other parts: what it has beyond that shows in the keys of its
checkpoint and in its modeling file. The proof decides whether the rest of it is Llama.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import msgspec

from autoport.analysis.architecture import assemble, port_dtype
from autoport.analysis.coverage import check_coverage, coverage_problems
from autoport.analysis.crosscheck import (
    absent_size_problems,
    bias_problems,
    head_problems,
    ignored_problems,
    projection_problems,
)
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.scope import GAP_RULES, GapSection, facts_problems
from autoport.analysis.source_check import source_conflicts
from autoport.analysis.traits import Traits
from autoport.analysis.weight_map import LAYER, build_weight_map
from autoport.errors import Problem, Refusal
from autoport.families import find_family
from autoport.families.family import Family
from autoport.research.modeling.classes import Decoder
from autoport.research.modeling.locate import transformers_file
from autoport.research.not_ported import SIZES, WHOLE_BY_HAND, UnportedClass, unported_class
from autoport.schema.architecture import Architecture
from autoport.schema.facts import Checkpoint, Facts, Finding
from autoport.schema.plan import Gap, GapParameter
from autoport.schema.weights import WeightEntry, WeightMap

GAPS: tuple[GapSection, ...] = get_args(GapSection)
TOPICS: dict[str, GapSection] = {
    "block": "decoder",
    "scale": "decoder",
    "qk_norm": "attention",
    "sinks": "attention",
    "attention_scale": "attention",
    "softcap": "attention",
    "activation": "mlp",
}
CLASSES = {
    "attention": r"Attention$",
    "mlp": r"(MLP|MoE|Moe|FeedForward|FFN)$",
    "decoder": r"(DecoderLayer|Block|Layer)$",
}


class Described(msgspec.Struct, frozen=True):
    family: Family
    architecture: Architecture
    weights: WeightMap
    gaps: list[Gap]


def describe_with_gaps(facts: Facts, checkpoint: Checkpoint) -> Described:
    """Describe what is covered, and name the sections that are not.

    Raises:
        Refusal: what is wrong with the model itself, and what is in no section that can be left out; for a class
            without a declaration one SCOPE-ARCH, as Llama is what does not fit then, not the model.
    """
    name, model_type = facts.architecture.value, facts.model_type.value
    family = find_family(name, model_type)
    if family is not None:
        return _describe(facts, checkpoint, family, {})
    unported = unported_class(facts)
    if unported.is_nested or any(not set(feature.sections) <= set(GAPS) for feature in unported.features):
        raise Refusal(*unported.problems(facts.config_file))
    known: dict[GapSection, list[str]] = {}
    for feature in unported.features:
        for section in GAPS:
            if section in feature.sections:
                known.setdefault(section, []).append(f"{feature.what} ({unported.place(feature)})")
    try:
        llama = Family(model_type=model_type, hf_name=name)
        return _describe(facts, checkpoint, llama, known)
    except Refusal as refusal:
        raise _not_llama(unported, refusal.problems) from refusal


def with_way_in(refusal: Refusal, facts: Facts, checkpoint: Checkpoint) -> Refusal:
    """The refusal of a class without a declaration; where all but some sections can be written, with these."""
    if find_family(facts.architecture.value, facts.model_type.value) is not None:
        return refusal
    try:
        gaps = describe_with_gaps(facts, checkpoint).gaps
    except Refusal:
        return refusal
    written = f"all but {' and '.join(gap.section for gap in gaps)}" if gaps else "every section"
    step = f"'autoport port NAME SOURCE --incomplete' writes {written}, as of a Llama with other parts{SIZES}"
    return Refusal(msgspec.structs.replace(refusal.problems[0], next_step=step), *refusal.problems[1:])


def _not_llama(unported: UnportedClass, problems: Sequence[Problem]) -> Refusal:
    first = problems[0]
    if first.rule == "SCOPE-ARCH":
        return Refusal(*problems)
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    found = (
        f"architecture {unported.architecture!r} cannot be planned as Llama with other parts: "
        f"{first.rule}: {first.found}{more}"
    )
    step = WHOLE_BY_HAND.format(nearest=unported.nearest) + SIZES
    return Refusal(Problem("SCOPE-ARCH", found, first.where, step), *unported.feature_problems())


def _describe(
    facts: Facts, checkpoint: Checkpoint, family: Family, found: dict[GapSection, list[str]]
) -> Described:
    """Describe the model; `found` is what is known to be missing, by section."""
    fatal: list[Problem] = []
    for problem in facts_problems(facts, family):
        section = GAP_RULES.get(problem.rule)
        if section:
            found.setdefault(section, []).append(problem.found)
        else:
            fatal.append(problem)
    keys = CheckpointKeys(checkpoint.tensors, family.keys)
    dtype = port_dtype(facts, checkpoint)
    if dtype is None or not keys.layers or fatal:
        raise Refusal(*(fatal or facts_problems(facts)))
    absent = [*absent_size_problems(facts, family, keys, checkpoint)]
    if absent:
        raise Refusal(*absent)
    traits = Traits(family, facts)
    architecture = assemble(traits, keys, dtype)
    fatal += [*traits.problems, *head_problems(facts, keys, checkpoint.source)]
    fatal += projection_problems(facts, keys, checkpoint)
    fatal += bias_problems(facts, family, keys, checkpoint.source)
    if find_family(facts.architecture.value, facts.model_type.value) is not None:
        fatal += ignored_problems(facts, architecture)
    for finding, text in source_conflicts(facts, family, architecture):
        section = TOPICS.get(finding.topic)
        if section:
            found.setdefault(section, []).append(f"{text} ({finding.where})")
        else:
            fatal.append(_conflict(finding, text))
    weights = build_weight_map(architecture, keys, family.moe)
    coverage = check_coverage(weights, architecture.num_layers, checkpoint, architecture.layers.moe)
    extra: dict[GapSection, dict[str, str]] = {}
    for key in coverage.unexpected:
        section, suffix = _section_of(key, keys)
        if suffix:
            extra.setdefault(section, {})[suffix] = key
    taken = {key for suffixes in extra.values() for suffix in suffixes for key in _all(suffix, keys)}
    coverage.unexpected = [key for key in coverage.unexpected if key not in taken]
    fatal += coverage_problems(coverage, architecture.num_layers, checkpoint, facts)
    if fatal:
        raise Refusal(*fatal)
    for section, suffixes in extra.items():
        found.setdefault(section, []).append(f"Nothing takes {', '.join(suffixes)} yet")
    gaps = []
    for section, texts in found.items():
        parameters = [
            _parameter(section, suffix, checkpoint.tensors[key].shape, architecture)
            for suffix, key in extra.get(section, {}).items()
        ]
        weights.entries += [
            WeightEntry(parameter.name, [f"{keys.layer}{suffix}"], [parameter.shape], "replicated")
            for parameter, suffix in zip(parameters, extra.get(section, {}), strict=True)
        ]
        gaps.append(Gap(section, texts, _place(facts, section), parameters))
    return Described(family, _composed(architecture, found), weights, gaps)


def _conflict(finding: Finding, text: str) -> Problem:
    return Problem("SOURCE-CONFLICT", text, finding.where, "the port would compute something else here")


def _composed(architecture: Architecture, found: Mapping[GapSection, list[str]]) -> Architecture:
    """Attention with a gap is composed, so that the gap is one plain function."""
    if "attention" not in found:
        return architecture
    attention = architecture.attention
    reasons = (*attention.composed, "a part that is written by hand")
    return msgspec.structs.replace(
        architecture, attention=msgspec.structs.replace(attention, composed=reasons)
    )


def _section_of(key: str, keys: CheckpointKeys) -> tuple[GapSection, str]:
    """The section that a layer's key belongs to, and the key below the layer; nothing for other keys."""
    match = re.fullmatch(rf"{re.escape(keys.prefix + keys.names.layers)}\.\d+\.(.+)", key)
    if match is None:
        return "decoder", ""
    part = match[1].partition(".")[0]
    if part == keys.names.o.partition(".")[0]:
        return "attention", match[1]
    if part == keys.names.down.partition(".")[0]:
        return "mlp", match[1]
    return "decoder", match[1]


def _all(suffix: str, keys: CheckpointKeys) -> Iterator[str]:
    return (f"{keys.prefix}{keys.names.layers}.{index}.{suffix}" for index in keys.layers[suffix])


def _parameter(
    section: GapSection, suffix: str, shape: tuple[int, ...], architecture: Architecture
) -> GapParameter:
    """A parameter that holds a tensor of the checkpoint as it is, on every rank."""
    module = {"attention": "self_attn.", "mlp": "mlp.", "decoder": ""}[section]
    below = suffix if section == "decoder" else suffix.partition(".")[2]
    sizes = _sizes(architecture)
    return GapParameter(
        name=f"{LAYER}{module}{below.replace('.', '_')}",
        shape=shape,
        sizes=[sizes.get(size, str(size)) for size in shape],
    )


def _sizes(architecture: Architecture) -> dict[int, str]:
    """Sizes that the config names; of several names for one number the first is taken."""
    attention = architecture.attention
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    named = [
        (architecture.hidden_size, "hidden_size"),
        (architecture.mlp.intermediate_size, "intermediate_size"),
        (attention.head_dim, "head_dim"),
        (2 * attention.head_dim, "2 * head_dim"),
        (kv_heads * attention.head_dim, "num_key_value_heads * head_dim"),
        (heads * attention.head_dim, "num_attention_heads * head_dim"),
        (kv_heads, "num_key_value_heads"),
        (heads, "num_attention_heads"),
    ]
    found: dict[int, str] = {}
    for size, name in named:
        found.setdefault(size, re.sub(r"[a-z]\w+", r"config.\g<0>", name))
    return found


def _place(facts: Facts, section: GapSection) -> str:
    """Class and lines of the modeling file that compute the section."""
    file = transformers_file(facts.architecture.value, facts.model_type.value)
    if file is None:
        return facts.modeling.file or "the modeling file of the class"
    decoder = Decoder(file)
    for name, node in decoder.classes.items():
        forward = decoder.method(node, "forward") if re.search(CLASSES[section], name) else None
        if isinstance(forward, ast.FunctionDef):
            return f"{file.name}:{forward.lineno}-{forward.end_lineno} ({name}.forward)"
    return file.name
