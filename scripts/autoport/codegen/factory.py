"""The branches of a factory, from the declaration of its variants."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from autoport.codegen.render import Checked, identifier, py
from autoport.variants import Condition, Variant

# Kinds of branches, in their order in the factory, and the comment above the first one of a kind.
KINDS = {
    "user": "What the user asks for",
    "format": "The checkpoint's format",
    "rule": "The model's own rules",
    "platform": "The platform's default",
}


class Branch(msgspec.Struct, frozen=True):
    """One ``if`` of `_select_implementation`: its kind (a key of `KINDS`), its test, and what it imports."""

    kind: str
    test: Checked
    module: Checked


def selection_context(variants: Sequence[Variant]) -> dict[str, Any]:
    """What the factory's templates take."""
    ordered = [branch for kind in KINDS for v in variants for branch in branches(v) if branch.kind == kind]
    first = {branch.kind: branch for branch in reversed(ordered)}
    return {
        "branches": [
            (branch, Checked(KINDS[branch.kind]) if branch is first[branch.kind] else None)
            for branch in ordered
        ],
        "fallback": Checked(identifier(variants[0].module)),
        "platforms": platform_rows(variants),
        "formats": format_rows(variants),
        "requirements": [row for variant in variants for row in requirement_rows(variant)],
    }


def branches(variant: Variant) -> list[Branch]:
    """The branches that select a variant."""
    module = identifier(variant.module)
    needs = [test(condition) for condition in variant.require]
    here = [_is_in("get_platform_target()", variant.platforms)] if variant.platforms else []
    found = []
    if variant.quantization:
        found.append(Branch("user", _is_in("quantization", variant.quantization), module))
    if variant.formats:
        found.append(Branch("format", _is_in("checkpoint_format(hf_config)", variant.formats), module))
    if variant.when:
        tests = [*here, *(test(condition) for condition in variant.when), *needs]
        found.append(Branch("rule", _joined(tests), module))
    if variant.default_on:
        tests = [_is_in("get_platform_target()", variant.default_on), *needs]
        found.append(Branch("platform", _joined(tests), module))
    return found


def platform_rows(variants: Iterable[Variant]) -> list[tuple[str, tuple[str, ...] | None]]:
    """Value of ``neuron_config.quantization`` -> the platforms that its implementation needs."""
    return [(key, variant.platforms or None) for variant in variants for key in variant.quantization]


def format_rows(variants: Iterable[Variant]) -> list[tuple[str, tuple[str, ...]]]:
    """Checkpoint format -> values of ``neuron_config.quantization`` whose implementation loads it."""
    return [(name, variant.quantization) for variant in variants for name in variant.formats]


def requirement_rows(variant: Variant) -> list[tuple[Checked, str]]:
    """When a requirement is broken, as an expression, and the words that say so."""
    asked = [
        _is_in(name, values)
        for name, values in (("quantization", variant.quantization), ("checkpoint", variant.formats))
        if values
    ]
    if not asked:
        return []
    chosen = asked[0] if len(asked) == 1 else f"({' or '.join(asked)})"
    return [(Checked(f"{chosen} and not {test(c)}"), f"{variant.name} without {c}") for c in variant.require]


def test(condition: Condition) -> Checked:
    """The condition as Python code over `hf_config` and `neuron_config`."""
    first, *rest = condition.field.split(".")
    read: str
    if first == "neuron_config" and rest:
        read = f"getattr(neuron_config, {py(str(identifier(rest[0])))}, None)"
        rest = rest[1:]
    else:
        read = f"getattr(hf_config, {py(str(identifier(first)))}, None)"
    for key in rest:
        read = f"({read} or {{}}).get({py(key)})"
    operator = condition.op
    if condition.value is None and operator in ("==", "!="):
        operator = "is" if operator == "==" else "is not"  # type: ignore[assignment]
    if operator in ("<", "<=", ">", ">="):
        return Checked(f"{read} is not None and {read} {operator} {py(condition.value)}")
    return Checked(f"{read} {operator} {py(condition.value)}")


def _is_in(name: str, values: Sequence[str]) -> Checked:
    if len(values) == 1:
        return Checked(f"{name} == {py(values[0])}")
    return Checked(f"{name} in {py(tuple(values))}")


def _joined(tests: Sequence[str]) -> Checked:
    return Checked(" and ".join(tests))
