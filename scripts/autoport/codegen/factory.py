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

PLATFORM = "platform_target"  # the function of a generated factory that names it; see factory/platform.j2


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
        "platform_dependent": any(variant.platforms or variant.default_on for variant in variants),
        "quantizations": [key for variant in variants for key in variant.quantization],
        "formats": format_rows(variants),
        "requirements": [row for v in variants for row in (*platform_rows(v), *requirement_rows(v))],
    }


def branches(variant: Variant) -> list[Branch]:
    """The branches that select a variant."""
    module = identifier(variant.module)
    needs = [as_code(condition) for condition in variant.require]
    here = [_is_in(f"{PLATFORM}()", variant.platforms)] if variant.platforms else []
    found = []
    if variant.quantization:
        found.append(Branch("user", _is_in("quantization", variant.quantization), module))
    if variant.formats:
        found.append(Branch("format", _is_in("checkpoint_format(hf_config)", variant.formats), module))
    if variant.when:
        tests = [*(as_code(condition) for condition in variant.when), *needs, *here]
        found.append(Branch("rule", _joined(tests), module))
    if variant.default_on:
        tests = [*needs, _is_in(f"{PLATFORM}()", variant.default_on)]
        found.append(Branch("platform", _joined(tests), module))
    return found


def format_rows(variants: Iterable[Variant]) -> list[tuple[str, tuple[str, ...]]]:
    """Checkpoint format -> values of ``neuron_config.quantization`` whose implementation loads it."""
    return [(name, variant.quantization) for variant in variants for name in variant.formats]


def platform_rows(variant: Variant) -> list[tuple[Checked, Checked]]:
    """When a variant is asked for where it does not run, and the words that say so, as expressions."""
    chosen = _asked_for(variant)
    if not (chosen and variant.platforms):
        return []
    where = " or ".join(identifier(platform) for platform in variant.platforms)
    words = f'f"{identifier(variant.name)} on {{{PLATFORM}()}} (possible: on {where})"'
    return [(Checked(f"{chosen} and {PLATFORM}() not in {py(variant.platforms)}"), Checked(words))]


def requirement_rows(variant: Variant) -> list[tuple[Checked, Checked]]:
    """When a requirement is broken, and the words that say so, as expressions."""
    chosen = _asked_for(variant)
    return [
        (
            Checked(f"{chosen} and not ({as_code(condition)})"),
            py(f"{variant.name} without {condition}"),
        )
        for condition in (variant.require if chosen else ())
    ]


def _asked_for(variant: Variant) -> str:
    """When the user's word or the checkpoint's format selects a variant, as an expression; empty for never."""
    keys = variant.quantization
    asked = [_is_in("quantization", keys)] if keys else []
    if variant.formats:
        by_key = Checked(f'{py(keys[0])} in formats.get(checkpoint or "", ())') if keys else None
        asked.append(by_key or _is_in("checkpoint", variant.formats))
    return f"({' or '.join(asked)})" if len(asked) > 1 else "".join(asked)


def as_code(condition: Condition) -> Checked:
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
