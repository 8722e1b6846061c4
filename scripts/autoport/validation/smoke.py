"""Step 8: runs the port's own run.py and judges what it generated; writes smoke.json."""

import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from autoport.codegen.document import default_tp_size, is_folder, model_len, record_results, record_section
from autoport.codegen.features import FeatureResult, current_results
from autoport.codegen.results import OFFLINE, Measured
from autoport.diagnose import Diagnosis, diagnose, load_catalogue
from autoport.errors import refuse
from autoport.files import read_json
from autoport.port_state import Port
from autoport.schema.plan import Plan
from autoport.units import now
from autoport.validation.backends import Backend, command_line, environment
from autoport.validation.checkpoints import FOLDER, Chosen, choose
from autoport.validation.ranks import versions
from autoport.validation.smoke_rules import Check, Expected, Recorded, judge
from autoport.validation.supervise import Supervised, end, supervised

STATE_FILE = "smoke.json"
SIMULATED_MODEL_LEN = 256  # tokens; enough for the prompts, and less to compute than run.py's own
# Row of the README's feature table, and the smallest TP size that shows it; run.py samples on the device.
FEATURES_SHOWN = (("TP (head sharding)", 2), ("SP (sequence parallel)", 2), ("On-device sampling", 1))
DEAD_WORKER = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (-?\d+)\)")  # vLLM's line
ROOM_BYTES = (
    16_000_000  # a server's log has some 100 kB on the simulator, several MB where a model is compiled
)
TEXT_LENGTH = 160  # characters of a text in results.md


class Known(msgspec.Struct, frozen=True):
    """A known failure that was recognised in a log."""

    id: str
    line: str
    cause: str
    fix: str


class Smoke(msgspec.Struct):
    """Verdict of Step 8.

    Attributes:
        on: Name of the backend.
        place: Where it ran, in words.
        command: What a person would type for the same run.
        on_device: What would be run on a trn2 instance.
        known: Failures recognised in the log.
        log: Path below the workspace.
    """

    passed: bool
    on: str
    place: str
    checkpoint: Chosen
    command: str
    on_device: str
    checks: list[Check]
    known: list[Known]
    generations: Recorded | None
    seconds: float
    finished: str
    log: str
    versions: dict[str, str]


def smoke(port: Port, backend: Backend, tp_size: int | None = None) -> Smoke:
    """Run and judge; writes smoke.json and the section "Offline inference" of results.md.

    Raises:
        Refusal: PORT-ORDER when run.py is missing, what `choose` refuses, WS-WRITE.
    """
    script = port.workspace.root / port.workspace.run_script(port.name)
    if not script.is_file():
        raise refuse("PORT-ORDER", "run.py is missing", script, f"run '{port.command('document')}' first")
    chosen = choose(port, backend, tp_size, "bfloat16")
    check_room(port)
    arguments = run_arguments(port, backend, chosen)
    log = port.state_dir / FOLDER / "smoke.log"
    record = port.state_dir / FOLDER / "smoke-record.json"
    record.unlink(missing_ok=True)
    command = ["python", port.workspace.run_script(port.name), *arguments]
    recorder = ["-m", "autoport.validation.smoke_recorder", str(record), str(script), *arguments]
    started = time.monotonic()
    folder = run_folder(port, backend)
    with supervised([sys.executable, *recorder], backend.environment, folder, log) as process:
        in_time = process.wait(backend.start_seconds) is not None
    recorded = read_json(record, Recorded) if record.is_file() else None
    known = recognise(log, ignore=("DEGENERATE",) if chosen.is_random else ())
    checks = [*_ran(process, recorded, known, 0.0 if in_time else backend.start_seconds)]
    if recorded is not None:
        checks += judge(recorded, Expected(chosen.vocab_size, chosen.tp_size, chosen.is_random))
    result = Smoke(
        passed=all(check.status != "fail" for check in checks),
        on=backend.name,
        place=backend.place,
        checkpoint=chosen,
        command=command_line(backend.environment, command),
        on_device=device_command(port),
        checks=checks,
        known=known,
        generations=recorded,
        seconds=round(time.monotonic() - started, 1),
        finished=now(),
        log=str(log.relative_to(port.workspace.root)),
        versions=versions(),
    )
    port.write_state(STATE_FILE, result)
    record_section(port, OFFLINE, measured(result))
    record_results(port, feature_results(result, current_results(port)))
    return result


def feature_results(result: Smoke, known: Mapping[str, FeatureResult]) -> dict[str, FeatureResult]:
    """Rows of the README's feature table that a green run shows.

    A run on the simulator changes no row that is known: the proof there compares every logit, this run none.
    """
    if not result.passed:
        return {}
    note = f"{result.on}, TP {result.checkpoint.tp_size}: offline inference"
    rows = [feature for feature, smallest_tp in FEATURES_SHOWN if result.checkpoint.tp_size >= smallest_tp]
    return {row: FeatureResult(True, note) for row in rows if result.on != "simulator" or row not in known}


def check_room(port: Port) -> None:
    """Refuse a run whose results could not be written when it is done.

    Raises:
        Refusal: WS-WRITE.
    """
    free = shutil.disk_usage(port.state_dir).free
    if free < ROOM_BYTES:
        found = f"{free / 1e6:.1f} MB are free, a run needs {ROOM_BYTES / 1e6:.0f} MB for its log and results"
        raise refuse("WS-WRITE", found, port.state_dir, "free space, or pass another --workspace")


def run_arguments(port: Port, backend: Backend, chosen: Chosen) -> list[str]:
    """Arguments of run.py; none where its own defaults are right."""
    arguments = _checkpoint_argument(port)
    if backend.is_simulated:
        # Its own default is as long as the port allows; prompts are padded to it.
        length = model_len(SIMULATED_MODEL_LEN, chosen.max_model_len, chosen.tp_size)
        arguments = ["--model-checkpoint", chosen.path, "--max-model-len", str(length)]
    if backend.is_simulated or chosen.tp_size != default_tp_size(
        port.read_state("plan.json", Plan, "analyze")
    ):
        arguments += ["--tensor-parallel-size", str(chosen.tp_size)]
    return arguments


def _checkpoint_argument(port: Port) -> list[str]:
    """run.py has a hub id as its default, a folder of this machine it has not."""
    return ["--model-checkpoint", port.source] if is_folder(port.source) else []


def device_command(port: Port) -> str:
    """What Step 8 runs on a trn2 instance, from the workspace's folder."""
    variables = environment("trn2", port.workspace, needs_expert_parallel(port))
    return command_line(
        variables, ["python", port.workspace.run_script(port.name), *_checkpoint_argument(port)]
    )


def needs_expert_parallel(port: Port) -> bool:
    """Whether the port is served with its experts spread over the ranks."""
    plan = port.read_state("plan.json", Plan, "analyze")
    # Only where no TP size fits: until then a rank has a part of each expert.
    return plan.tp.recommended is None and plan.ep is not None and plan.ep.recommended is not None


def run_folder(port: Port, backend: Backend) -> Path:
    """Where to run: the workspace, but not on the simulator, whose package the workspace's would hide."""
    return port.state_dir if backend.is_simulated else port.workspace.root


def _ran(
    process: Supervised, recorded: Recorded | None, known: list[Known], ended_after: float
) -> Iterator[Check]:
    """Whether it ran to its end, and whether the log has a known failure.

    Args:
        ended_after: Seconds after which the run was ended; 0 when it ended by itself.
    """
    name = "model loaded and ran"
    if ended_after:
        late = f"run.py was not done within {ended_after:g} s (--timeout)"
        yield Check(name, "fail", f"{late}: {last_error(process.tail())}")
    elif process.returncode != 0:
        how = process.how_it_ended() + dead_worker(process.log)
        yield Check(name, "fail", f"run.py {how}: {last_error(process.tail())}")
    elif recorded is None:
        yield Check(name, "fail", "run.py ended without calling LLM.generate")
    else:
        yield Check(name, "pass", "run.py ended with exit code 0")
    if known:
        listing = "; ".join(f"{failure.id}: {failure.cause} {failure.fix}" for failure in known)
        yield Check("no known failure in the log", "fail", listing)
    else:
        yield Check("no known failure in the log", "pass", "none recognised (missing keys included)")


def last_error(text: str) -> str:
    """The last line of a log that names an error, with the one after it, which often says more."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    at = next((index for index in reversed(range(len(lines))) if "Error" in lines[index]), len(lines) - 1)
    return " ".join(lines[max(at, 0) : at + 2])[:400] or "no output"


def dead_worker(log: Path) -> str:
    """How a rank of the engine died, to go on with after a semicolon; empty when vLLM's log names none."""
    if not log.is_file():
        return ""
    with open(log, errors="replace") as lines:
        for line in lines:
            if found := DEAD_WORKER.search(line):
                return f"; before that {found[1]} {end(int(found[2]))}"
    return ""


def recognise(log: Path, ignore: tuple[str, ...] = ()) -> list[Known]:
    """Known failures in a log: cause and fix of each, wrappers only when nothing else is known."""
    if not log.is_file():
        return []
    with open(log, "rb") as file:
        diagnosis: Diagnosis = diagnose(file, load_catalogue())
    matches = [match for match in diagnosis.matches if match.failure.id not in ignore]
    causes = [match for match in matches if not match.failure.wrapper] or matches
    return [Known(m.failure.id, m.text[:300], m.failure.cause, m.failure.fix) for m in causes]


def measured(result: Smoke) -> Measured:
    """The section of results.md."""
    facts = [
        ("Measured", f"{result.finished} on {result.place}"),
        ("Checkpoint", str(result.checkpoint)),
        ("Tensor parallel size", str(result.checkpoint.tp_size)),
        ("Time", f"{result.seconds} s with loading, on {result.place}"),
    ]
    generations = result.generations.generations if result.generations else []
    return Measured(
        verdict="passed" if result.passed else "failed",
        facts=facts,
        checks=[(check.name, check.status, check.found) for check in result.checks],
        texts=[(g.prompt, g.text[:TEXT_LENGTH]) for g in generations],
    )
