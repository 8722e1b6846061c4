"""The step driver: runs the steps of a port in order, skips what is up to date, stops at a red gate."""

import hashlib
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from autoport import __version__, preflight
from autoport.errors import refuse
from autoport.port_state import Chosen, Port, StepRecord
from autoport.resources import checklists_dir
from autoport.step import Options, Outcome, command_line
from autoport.units import now


class Step(msgspec.Struct, frozen=True):
    """A step of the workflow.

    Attributes:
        number: Number in the guide's eleven steps; ``-`` for what is none of them.
        module: Module whose ``run(port, options)`` does it.
        reads: State files it reads; ``source`` stands for a local checkpoint, ``model/`` for the Python files of
            the port's folder, ``written`` for the names of the files that steps wrote, ``registry`` for
            registry.py, ``checklists`` for the rules.
        options: Names of the `Options` that change its result.
    """

    number: str
    title: str
    module: str
    reads: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


STEPS: dict[str, Step] = {
    "research": Step(
        "1",
        "Research the architecture",
        "autoport.research.step",
        ("source",),
        ("probe",),
    ),
    "analyze": Step(
        "2",
        "Analyse, plan TP and weights",
        "autoport.analysis.step",
        ("facts.json", "checkpoint.json", "overrides.json"),
        ("incomplete", "relax", "context_length", "batch_size", "instance", "lnc"),
    ),
    "generate": Step("3-4", "Generate the model", "autoport.codegen.generate", ("plan.json",)),
    "register": Step(
        "5",
        "Register the architecture",
        "autoport.codegen.register",
        ("plan.json", "registry"),
        ("replace_row", "no_register"),
    ),
    "document": Step("6", "Write example and docs", "autoport.codegen.document", ("plan.json",)),
    "review": Step(
        "7",
        "Self-review",
        "autoport.review.step",
        ("facts.json", "checkpoint.json", "plan.json", "model/", "written", "registry", "checklists"),
    ),
    "prove": Step(
        "-",
        "Prove on the CPU",
        "autoport.validation.step",
        ("plan.json", "facts.json", "model/"),
        ("tp_sizes",),
    ),
}


class StepResult(msgspec.Struct):
    """What became of a step in a run, for a person and for `--json`.

    Attributes:
        status: As `Outcome.status`, or ``kept`` for a step that was up to date.
    """

    step: str
    number: str
    title: str
    status: str
    summary: str
    seconds: float
    data: Any = None
    files: list[str] = []


def run_step(port: Port, name: str, options: Options) -> StepResult:
    """Run one step and record it in the manifest, with the options that it was run with.

    Raises:
        Refusal: whatever the step refuses; the manifest keeps what it said before.
    """
    step = STEPS[name]
    run: Callable[[Port, Options], Outcome] = importlib.import_module(step.module).run
    started = time.monotonic()
    outcome = run(port, options)
    seconds = round(time.monotonic() - started, 2)
    kept = {option: getattr(options, option) for option in step.options if option in Chosen.__struct_fields__}
    port.manifest.chosen = msgspec.structs.replace(port.manifest.chosen, **kept)
    port.manifest.steps[name] = StepRecord(
        status=outcome.status,
        fingerprint=fingerprint(port, name, options),
        seconds=seconds,
        finished=now(),
        summary=outcome.summary,
    )
    port.save()
    return StepResult(
        name, step.number, step.title, outcome.status, outcome.summary, seconds, outcome.data, outcome.files
    )


def run_port(port: Port, options: Options, on_start: Callable[[str, Step], None]) -> Iterator[StepResult]:
    """Run every step that is not up to date, in order; stops after a step that is not done.

    Raises:
        Refusal: What a step refuses, and, before a step does any work, what a later one would (see `preflight`).
    """
    for name, step in STEPS.items():
        preflight.check(port, options, name)
        if is_current(port, name, options):
            summary = port.manifest.steps[name].summary
            yield StepResult(name, step.number, step.title, "kept", summary, 0.0)
            continue
        port.manifest.command = command_line(port, options)
        on_start(name, step)
        result = run_step(port, name, options)
        yield result
        if result.status != "done":
            return


def forget_stale_source(port: Port) -> None:
    """Let Step 1 run again where config.json on the hub is another one now; files are part of its fingerprint."""
    if "research" not in port.manifest.steps or not port.has_state("facts.json"):
        return
    from autoport.research.stale import what_changed
    from autoport.schema.facts import Facts

    facts = port.read_state("facts.json", Facts, "research")
    if facts.config_content and what_changed(port.source, facts):
        del port.manifest.steps["research"]


def next_step(port: Port, options: Options) -> str:
    """The first step that a run would do, e.g. ``generate``; empty when everything is up to date."""
    return next((name for name in STEPS if not is_current(port, name, options)), "")


def is_current(port: Port, name: str, options: Options) -> bool:
    """Whether step `name` is done, what it read is unchanged, and the files it wrote still exist."""
    record = port.manifest.steps.get(name)
    if record is None or record.status != "done" or record.fingerprint != fingerprint(port, name, options):
        return False
    written = (path for path, file in port.manifest.files.items() if file.step == name)
    return all((port.workspace.root / path).exists() for path in written)


def fingerprint(port: Port, name: str, options: Options) -> str:
    """Hash of everything step `name` reads; equal hashes mean that running it again changes nothing."""
    step = STEPS[name]
    digest = hashlib.sha256(__version__.encode())
    for option in step.options:
        digest.update(f"{option}={getattr(options, option)!r};".encode())
    for item in step.reads:
        for path in _inputs(port, item):
            digest.update(f"{path};".encode())
            if path.suffix == ".safetensors":
                stat = path.stat()
                digest.update(f"{stat.st_size},{stat.st_mtime_ns};".encode())
            elif path.is_file() and not _only_its_name_counts(item, path):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _only_its_name_counts(item: str, path: Path) -> bool:
    """Whether a step only asks if the file is there: a written one, or one of a checkpoint that it does not read."""
    return item == "written" or (item == "source" and path.suffix not in (".json", ".py"))


def _inputs(port: Port, item: str) -> list[Path]:
    if item == "source":
        folder = Path(port.source)
        return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if item == "model/":
        return sorted(port.workspace.model_dir(port.name).rglob("*.py"))
    if item == "written":
        written = (port.workspace.root / path for path in port.manifest.files)
        return sorted(path for path in written if path.exists())
    if item == "registry":
        return list(dict.fromkeys((port.workspace.registry_path, port.workspace.registration_path)))
    if item == "checklists":
        return sorted(checklists_dir().glob("*.yaml"))
    return [port.state_dir / item]


def require_device(options: Options) -> None:
    """Stop unless this is a dry run or a Neuron device is present.

    Raises:
        Refusal: HW-NEURON.
    """
    from autoport.doctor import devices

    if not options.dry_run and not devices():
        raise refuse(
            "HW-NEURON",
            "no Neuron device on this machine",
            "/dev/neuron*",
            "pass --dry-run to port and prove on the CPU, or run on a trn2 instance",
        )
