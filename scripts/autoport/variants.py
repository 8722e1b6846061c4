"""Variants: the implementations that a model's factory chooses from, as data.

The first variant of a model is its bf16 implementation, ``model.py``, which the factory falls back to. The others
are declared in ``.autoport/<model>/variants.json``.
"""

import ast
import keyword
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from autoport.errors import Problem, Refusal, refuse
from autoport.files import read_json
from autoport.workspace import STATE_FOLDER, Workspace

STATE_FILE = "variants.json"
LONGEST_NAME = 64

Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]


def _compressed(form: str, kind: str, strategy: str) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": 8, "strategy": strategy, "symmetric": True, "dynamic": False}
    activations = {**weights, "strategy": "token", "dynamic": True} if kind == "int" else None
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
        "ignore": ["lm_head"],
    }


# Weight formats that can be generated: for each, what `checkpoint_format` of the model's config.py returns for
# it, with a quantization_config that has it.
FORMATS: dict[str, dict[str, dict[str, Any]]] = {
    "fp8": {
        "modelopt FP8": {"quant_method": "modelopt", "quant_algo": "FP8"},
        "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
        "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "compressed-tensors float-quantized float8": _compressed("float-quantized", "float", "tensor"),
        "compressed-tensors naive-quantized float8": _compressed("naive-quantized", "float", "tensor"),
    },
    # As DeepSeek-V3 and the FP8 checkpoints of Qwen3 have it: a scale for each block of 128 x 128.
    "fp8_block": {
        "fp8 in blocks": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }
    },
    "int8": {
        "compressed-tensors int-quantized int8": _compressed("int-quantized", "int", "channel"),
        "compressed-tensors naive-quantized int8": _compressed("naive-quantized", "int", "channel"),
    },
    # The second name is the one that vLLM gives the method of a GPT-OSS checkpoint before the factory sees it.
    "mxfp4": {"mxfp4": {"quant_method": "mxfp4"}, "gpt_oss_mxfp4": {"quant_method": "gpt_oss_mxfp4"}},
}


def checkpoint_format(declared: Mapping[str, Any]) -> str:
    """What `checkpoint_format` of a generated config.py says of this quantization_config."""
    words = [declared.get("quant_method", "unknown"), declared.get("quant_algo"), declared.get("format")]
    groups = declared.get("config_groups") or {}
    words += [f"{group['weights']['type']}{group['weights']['num_bits']}" for group in groups.values()]
    words += ["in blocks"] if declared.get("weight_block_size") else []
    return " ".join(dict.fromkeys(str(word) for word in words if word))


def loaded_by(declared: Any) -> str | None:
    """The variant that can be generated for checkpoints with this quantization_config, e.g. ``"fp8"``."""
    try:
        found = checkpoint_format(declared)
    except (AttributeError, KeyError, TypeError):
        return None
    if "in blocks" in found and not _is_block(declared["weight_block_size"]):
        return None
    return next((name for name, formats in FORMATS.items() if found in formats), None)


def _is_block(sides: Any) -> bool:
    """Whether these are the sides of a block [out, in] that `model_fp8_block.py` reads: powers of two."""
    return (
        isinstance(sides, (list, tuple))
        and len(sides) == 2
        and all(type(side) is int and side > 0 and side & (side - 1) == 0 for side in sides)
    )


class Condition(msgspec.Struct, frozen=True):
    """A comparison of a config value with a literal, e.g. ``rope_parameters.rope_type == llama3``.

    Attributes:
        field: Attribute of the Hugging Face config, and keys below it, joined by dots; a first name
            ``neuron_config`` reads the plugin's configuration instead. What is not there is None.
    """

    field: str
    op: Operator
    value: Any

    def __str__(self) -> str:
        return f"{self.field} {self.op} {self.value!r}"


class Variant(msgspec.Struct, frozen=True):
    """One implementation.

    Attributes:
        name: ``bf16``, ``mxfp4``, ``throughput``, ...
        module: Module of the model's package that has it; its class is named as the one in ``model.py``.
        quantization: Values of ``neuron_config.quantization`` that select it.
        formats: Checkpoint formats that it loads, and that select it.
        platforms: Where it runs; empty for anywhere.
        default_on: Platforms that select it when nothing else decides.
        when: Conditions that together select it.
        require: Conditions without which it cannot run.
    """

    name: str
    module: str
    quantization: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    default_on: tuple[str, ...] = ()
    when: tuple[Condition, ...] = ()
    require: tuple[Condition, ...] = ()


BASE = Variant("bf16", "model", quantization=("bf16",))


def read_variants(workspace: Workspace, model: str) -> list[Variant]:
    """The model's variants as declared, `BASE` first.

    Raises:
        Refusal: PORT-STATE when the file is damaged, VAR-DECLARATION when the variants contradict each other.
    """
    path = workspace.root / STATE_FOLDER / model / STATE_FILE
    if not path.is_file():
        return [BASE]
    try:
        variants = [BASE, *read_json(path, list[Variant])]
    except Refusal as refusal:
        [problem] = refusal.problems
        next_step = "correct it, or move it away and declare the variants again: what is there stays as it is"
        raise refuse(problem.rule, problem.found, path, next_step) from refusal
    check_variants(variants, str(path))
    return variants


def check_variants(variants: Sequence[Variant], where: str) -> None:
    """Check that a factory can tell the variants apart.

    Raises:
        Refusal: VAR-DECLARATION with everything that is wrong.
    """
    problems: list[Problem] = []

    def wrong(found: str, next_step: str) -> None:
        problems.append(Problem("VAR-DECLARATION", found, where, next_step))

    for number, variant in enumerate(variants):
        before = variants[:number]
        named = next((other for other in before if other.name == variant.name), None)
        if named is not None:
            wrong(
                f"there is a variant {variant.name!r} already, {_differences(named, variant)}",
                "choose another name; or change what is there by hand, in factory.py and in variants.json of the "
                "port's state folder",
            )
            continue
        for found, next_step in _wrong(variant):
            wrong(found, next_step)
        if any(other.module == variant.module for other in before):
            wrong(f"two variants have the module {variant.module!r}", "choose another name")
        for field in ("quantization", "formats", "default_on"):
            for other in before:
                for value in sorted({*getattr(other, field)} & {*getattr(variant, field)}):
                    wrong(
                        f"{field} {value!r} would select both {other.name!r} and {variant.name!r}",
                        "give it to one of them",
                    )
    if problems:
        raise Refusal(*problems)


def _wrong(variant: "Variant") -> Iterator[tuple[str, str]]:
    """What is wrong with a variant alone, and what to do about it."""
    names = [name for name in (variant.name, *variant.quantization) if not _is_name(name)]
    for name in dict.fromkeys(names):
        near = re.sub(r"[^a-z0-9]", "", name.lower())
        rule = (
            f"use at most {LONGEST_NAME} lower-case letters, digits and underscores, beginning with a letter, and no "
            "word of Python"
        )
        yield (
            f"{name[:LONGEST_NAME]!r} is no name of a variant",
            f"take {near!r}" if near in FORMATS else rule,
        )
    for platform in dict.fromkeys((*variant.platforms, *variant.default_on)):
        if not re.fullmatch(r"(trn|inf)[0-9][a-z0-9]*", platform):
            found = f"{platform[:LONGEST_NAME]!r} of variant {variant.name[:LONGEST_NAME]!r} is no platform"
            yield found, "write e.g. trn2 or trn3"
    elsewhere = sorted({*variant.default_on} - {*variant.platforms}) if variant.platforms else []
    if elsewhere:
        yield (
            f"{variant.name!r} is the default on {', '.join(elsewhere)}, where it does not run",
            f"add {' '.join(f'--platform {name}' for name in elsewhere)}, or leave --default-on out",
        )
    if not (names or variant.quantization or variant.formats or variant.default_on or variant.when):
        yield (
            f"nothing selects {variant.name!r}",
            "pass --default-on PLATFORM or --when 'FIELD OP VALUE', or take a weight format: "
            + ", ".join(FORMATS),
        )


def _is_name(text: str) -> bool:
    return (
        len(text) <= LONGEST_NAME
        and bool(re.fullmatch(r"[a-z][a-z0-9_]*", text))
        and not keyword.iskeyword(text)
    )


def _differences(one: "Variant", other: "Variant") -> str:
    """What two declarations of the same name say differently."""
    fields = [field for field in one.__struct_fields__ if getattr(one, field) != getattr(other, field)]
    said = [
        f"{field} {', '.join(map(str, getattr(one, field))) or 'none'}"
        for field in fields
        if field != "module"
    ]
    return f"with {'; '.join(said)}" if said else "declared in the same way"


def parse_conditions(**texts: Sequence[str]) -> dict[str, tuple[Condition, ...]]:
    """Read conditions by the name of their option; see `parse_condition`.

    Raises:
        Refusal: VAR-CONDITION with everything that is wrong.
    """
    problems: list[Problem] = []
    read: dict[str, tuple[Condition, ...]] = {}
    for option, written in texts.items():
        conditions = []
        for text in written:
            try:
                conditions.append(parse_condition(text, f"--{option}"))
            except Refusal as refusal:
                problems += refusal.problems
        read[option] = tuple(conditions)
    if problems:
        raise Refusal(*problems)
    return read


def parse_condition(text: str, option: str = "--when") -> Condition:
    """Read ``FIELD OP VALUE``; a value that is no Python literal is a string.

    Raises:
        Refusal: VAR-CONDITION.
    """
    operators = r"==|!=|<=|>=|<|>|(?<=\s)not in(?=\s)|(?<=\s)in(?=\s)"
    match = re.fullmatch(rf"\s*([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)\s*({operators})\s*(.+?)\s*", text, re.A)

    def wrong(found: str, example: str) -> Refusal:
        return refuse("VAR-CONDITION", f"{text!r} {found}", f"option {option}", f"write {example}")

    example = "FIELD OP VALUE, e.g. 'rope_parameters.rope_type == llama3'"
    if match is None:
        raise wrong("is no condition", example)
    field, op, written = match.groups()
    try:
        value = ast.literal_eval(written)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = written
    value = list(value) if isinstance(value, tuple) else value
    items = value if isinstance(value, list) else [value]
    if any(keyword.iskeyword(part) for part in field.split(".")):
        raise wrong("reads a field that is a word of Python", example)
    if field == "neuron_config":
        raise wrong(
            "names no field of the plugin's configuration", "e.g. 'neuron_config.max_logprobs != None'"
        )
    if op in ("in", "not in") and not (isinstance(value, list) and value):
        raise wrong(f"needs a list behind {op}", f"\"{field} {op} ['a', 'b']\"")
    if op in ("<", "<=", ">", ">=") and type(value) not in (int, float):
        raise wrong(f"needs a number behind {op}", f"'{field} {op} 4096'")
    if not all(type(item) in (str, int, float, bool, type(None)) for item in items):
        raise wrong(
            f"compares with {value!r}", f"a number, a word, True, False, None, or a list of them: {example}"
        )
    if any(isinstance(item, float) and not math.isfinite(item) for item in items):
        raise wrong("compares with a number that is not finite", example)
    return Condition(field, cast(Operator, op), value)
