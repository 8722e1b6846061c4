"""Step 2's decisions, and how a person confirms or overrides them.

`decisions.yaml` shows them; overrides come from its ``overrides`` or from ``--set section.field=value`` and are kept
in overrides.json with who decided. A confirmation holds for the decisions that were shown, and for no others.
"""

import contextlib
import getpass
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import yaml

from autoport.errors import Problem, Refusal, refuse
from autoport.files import read_json, sha256, write_atomic
from autoport.port_state import Port
from autoport.schema.architecture import Architecture
from autoport.schema.plan import Override, Plan
from autoport.units import now

DECISIONS = "decisions.yaml"
OVERRIDES = "overrides.json"
CONFIRMED = "confirmed.json"

# section.field -> path in the Architecture, and the name of the generated config's field that would read it.
FIELDS: dict[str, tuple[str, str]] = {
    "norm.kind": ("norm.kind", ""),
    "norm.weight": ("norm.weight", ""),
    "norm.rounding": ("norm.rounding", ""),
    "norm.eps": ("norm.eps", "norm_eps"),
    "rope.pairing": ("rope.pairing", ""),
    "rope.sign": ("rope.sign", ""),
    "attention.scale": ("attention.scale", "attention_scale"),
    "attention.softcap": ("attention.softcap", "attention_softcap"),
    "decoder.residual_scale": ("block.residual_scale", "residual_scale"),
    "backbone.embedding_scale": ("embedding.scale", "embedding_scale"),
    "head.scale": ("head.scale", "logit_scale"),
    "head.softcap": ("head.softcap", "logit_softcap"),
}
TP_SIZE, REFERENCE = "parallel.tp_size", "reference.model"


class Confirmed(msgspec.Struct, frozen=True):
    """Hash of the decisions that were confirmed, and by whom."""

    decisions: str
    who: str
    when: str


def parse_overrides(texts: Sequence[str], who: str) -> list[Override]:
    """Read ``section.field=value`` texts.

    Raises:
        Refusal: DEC-SET with every text that is not of that form, names no field, or has no plain value.
    """
    known = [*FIELDS, TP_SIZE, REFERENCE]
    problems, overrides = [], []
    for text in texts:
        field, separator, value = text.partition("=")
        if not separator or field not in known:
            found = f"{text!r} is no section.field=value of a decision"
            problems.append(Problem("DEC-SET", found, "option --set", f"use one of {', '.join(known)}"))
            continue
        try:
            overrides.append(Override(field, _plain_value(value), who, now()))
        except ValueError as error:
            step = f"write {field}= and a number, a word, true, false or null"
            problems.append(Problem("DEC-SET", f"{text!r:.80}: {error}", "option --set", step))
    if problems:
        raise Refusal(*problems)
    return overrides


def _plain_value(text: str) -> str | float | None:
    """The scalar that a text is in YAML; None for an empty one.

    Raises:
        ValueError: It is no scalar, or a number that is infinite or has more than 64 bits.
    """
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise ValueError("the value cannot be read") from None
    if not isinstance(value, (str, int, float, type(None))):
        raise ValueError("the value is no plain one")
    if not (value is None or _is_usable(value)):
        raise ValueError("the value is no finite number of at most 64 bits")
    return value


def _is_usable(value: str | float) -> bool:
    """Whether it is a word, or a finite number of at most 64 bits; ``nan`` and ``inf`` are words to YAML."""
    try:
        return abs(float(value)) < 2**63
    except OverflowError:
        return False
    except ValueError:
        return True


def user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown user"


def record(port: Port, overrides: Sequence[Override]) -> None:
    """Add overrides to those of the port; a later one of the same field replaces an earlier one."""
    if overrides:
        kept = {item.field: item for item in [*load(port), *overrides]}
        _write(port, list(kept.values()))


@contextlib.contextmanager
def forgotten_if_refused(port: Port) -> Iterator[None]:
    """Leave the overrides as they were where the analysis refuses the value of one (DEC-VALUE)."""
    before = load(port)
    try:
        yield
    except Refusal as refusal:
        if any(problem.rule == "DEC-VALUE" for problem in refusal.problems):
            _write(port, before)
        raise


def _write(port: Port, overrides: Sequence[Override]) -> None:
    if overrides:
        port.write_state(OVERRIDES, list(overrides))
    else:
        (port.state_dir / OVERRIDES).unlink(missing_ok=True)


def record_file(port: Port) -> None:
    """Take the ``overrides`` of decisions.yaml, where a person adds, changes and removes them, as those of the port.

    Raises:
        Refusal: DEC-FILE when the file cannot be read, DEC-SET for a field that there is not.
    """
    path = port.state_dir / DECISIONS
    if not path.is_file():
        return
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        given = document.get("overrides") or {}
        texts = [f"{field}={yaml.safe_dump(value).splitlines()[0]}" for field, value in given.items()]
    except (OSError, yaml.YAMLError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(
            "DEC-FILE", f"cannot be read: {error}", path, "correct it, or remove it and use --set"
        ) from error
    shown = port.read_state("plan.json", Plan, "analyze").overrides if port.has_state("plan.json") else []
    before = {item.field: item for item in load(port)}
    in_file = {item.field: item for item in parse_overrides(texts, f"{user()} in {DECISIONS}")}
    new = {
        field: item
        for field, item in in_file.items()
        if field not in before or before[field].value != item.value
    }
    removed = {item.field for item in shown} - in_file.keys()
    _write(port, [item for field, item in (before | new).items() if field not in removed])


def load(port: Port) -> list[Override]:
    """The overrides of the port.

    Raises:
        Refusal: PORT-STATE when overrides.json is damaged; no step writes it again.
    """
    next_step = "correct it, or remove it and give its decisions again with autoport port --set"
    path = port.state_dir / OVERRIDES
    return read_json(path, list[Override], next_step) if path.is_file() else []


def apply(architecture: Architecture, overrides: Sequence[Override]) -> tuple[Architecture, list[Override]]:
    """The architecture with overrides, and with the values they replaced those that change it.

    Raises:
        Refusal: DEC-VALUE with every value that the field cannot have.
    """
    problems, applied = [], []
    for item in overrides:
        if item.field not in FIELDS:
            applied.append(item)
            continue
        path, reading = FIELDS[item.field]
        part, _, name = path.partition(".")
        old = getattr(architecture, part)
        if old is None:
            problems.append(_bad(item, f"the model has no {part}"))
            continue
        try:
            fields = msgspec.to_builtins(old) | {name: item.value}
            new = msgspec.convert(fields, type(old), strict=False)
        except msgspec.ValidationError as error:
            problems.append(_bad(item, str(error)))
            continue
        if getattr(new, name) == getattr(old, name):
            continue
        readings = dict(architecture.readings)
        if reading:
            readings.pop(reading, None)
            if getattr(new, name) is not None:
                readings[reading] = repr(getattr(new, name))
        architecture = msgspec.structs.replace(architecture, **{part: new}, readings=readings)
        applied.append(msgspec.structs.replace(item, previous=getattr(old, name)))
    if problems:
        raise Refusal(*problems)
    return architecture, applied


def _bad(item: Override, why: str) -> Problem:
    found = f"{item.field} cannot be {item.value!r}: {why}"
    return Problem("DEC-VALUE", found, item.who, "choose another value, or leave the decision as it is")


def chosen(overrides: Sequence[Override], field: str) -> Any:
    return next((item.value for item in overrides if item.field == field), None)


def write_decisions(port: Port, plan: Plan, gates: Mapping[str, Any], command: str) -> str:
    """Write decisions.yaml; returns the hash that a confirmation is for.

    Args:
        command: What goes on with the port, but for ``--confirm``.
    """
    shown = {
        "model": f"{plan.architecture.hf_name} from {plan.source}",
        "reference": plan.reference_model,
        "sections": [
            {"name": item.name, "model": item.target, "change": item.change, "source": item.source}
            for item in plan.sections
        ],
        "parallel": {
            "tp_size": plan.tp.recommended,
            "valid": [c.tp_size for c in plan.tp.candidates if c.valid],
            "rejected": {
                c.tp_size: [v.text for v in c.violations] for c in plan.tp.candidates if not c.valid
            },
            "rests_on": plan.tp.assumptions,
            "context_length": plan.tp.context_length,
            "batch_size": plan.tp.batch_size,
            "weight_and_kv_bytes_per_rank": {
                c.tp_size: c.weight_bytes_per_rank + c.kv_bytes_per_rank
                for c in plan.tp.candidates
                if c.valid
            },
        },
        "pitfalls": [f"{item.rule}: {item.text}" for item in plan.pitfalls],
        "to_confirm": dict(gates),
    }
    digest = sha256(msgspec.json.encode(shown))
    document = shown | {
        "may_be_overridden": [*FIELDS, TP_SIZE, REFERENCE],
        "overrides": {item.field: item.value for item in plan.overrides},
    }
    without_device = "" if "--dry-run" in command.split() else " (without a Neuron device: with --dry-run)"
    text = (
        f"# Decisions of Step 2. To override one, write `section.field: value` under the key `overrides`, or pass\n"
        f"# --set section.field=value; then run\n"
        f"#   {command} --confirm{without_device}\n"
    ) + yaml.safe_dump(msgspec.to_builtins(document), sort_keys=False, allow_unicode=True, width=110)
    write_atomic(port.state_dir / DECISIONS, text.encode())
    return digest


def confirm(port: Port, digest: str) -> None:
    port.write_state(CONFIRMED, Confirmed(digest, user(), now()))


def is_confirmed(port: Port, digest: str) -> bool:
    if not port.has_state(CONFIRMED):
        return False
    next_step = f"look at {DECISIONS} beside it and confirm it again: {port.command('port')} --confirm"
    return read_json(port.state_dir / CONFIRMED, Confirmed, next_step).decisions == digest
