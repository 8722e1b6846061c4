"""The sweep: ports a tiny checkpoint of every class of the landscape, proves each port, and reports.

Each result is merged into the report as soon as it is there, so an interrupted sweep is not lost.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from autoport.errors import Problem, Refusal
from autoport.files import write_atomic
from autoport.modules import search_path
from autoport.port import STEPS, run_step
from autoport.port_state import Port
from autoport.resources import references_dir, simulator_dir, templates_dir
from autoport.schema.plan import Plan
from autoport.schema.proof import Proof
from autoport.step import Options
from autoport.validation import landscape
from autoport.validation.scenario import SAMPLING
from autoport.workspace import Workspace

TIME_LIMIT = 600.0  # seconds for one port with its proof
PORT_NAME = "swept"
LONGEST_NOTE = 300  # characters
WIDE = 4  # TP size for which the checkpoint has twice the heads
Verdict = Literal["ported", "red", "refused", "failed"]
MARKS = {"ported": "✅ proven", "red": "❌ red", "refused": "refused", "failed": "❌ failed"}


class Result(msgspec.Struct):
    """One architecture, or one variant of it.

    Attributes:
        verdict: ``ported``: the whole port with a green proof. ``red``: a step or the proof is red.
            ``refused``: stopped with reasons. ``failed``: an error of the program, or out of time.
        composed: Why its attention or experts are composed of smaller operators.
        reasons: Why it was refused, is red or failed.
        tp_sizes: Sizes that were proven.
        error: Largest relative error in float32.
        r_ratio: Largest R in bfloat16.
        lines: Lines of its model.py.
        code: Digest of the code that it was swept with.
        wide: The same with twice the heads at TP 4, which four heads do not allow.
    """

    name: str
    hf_name: str
    category: str
    verdict: Verdict
    seconds: float = 0.0
    composed: list[str] = []
    reasons: list[str] = []
    tp_sizes: list[int] = []
    error: float | None = None
    r_ratio: float | None = None
    lines: int = 0
    code: str = ""
    wide: "Result | None" = None


def merge(previous: Result | None, result: Result, tp_sizes: Sequence[int]) -> Result:
    """The row for the report: what was swept at TP 4 alone stands beside what was swept without."""
    if previous is None:
        return result
    if list(tp_sizes) == [WIDE]:
        return msgspec.structs.replace(previous, wide=result)
    return msgspec.structs.replace(result, wide=previous.wide)


def sweep(
    names: Sequence[str], jobs: int, folder: Path, tp_sizes: Sequence[int], done: Callable[[Result], None]
) -> list[Result]:
    """Port and prove `names`, `jobs` at a time, each in a process of its own below `folder`.

    An interrupt ends the processes, too.

    Args:
        done: Called with each result as it comes, one at a time.
    """
    running: set[subprocess.Popen[bytes]] = set()
    lock = threading.Lock()
    code = code_digest()

    def run(name: str) -> Result:
        result = _in_process(name, folder / _file_name(name), tp_sizes, running)
        result.code = code
        with lock:
            done(result)
        return result

    pool = ThreadPoolExecutor(jobs)
    try:
        return list(pool.map(run, names))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            os.killpg(process.pid, signal.SIGKILL)


def _in_process(
    name: str, folder: Path, tp_sizes: Sequence[int], running: "set[subprocess.Popen[bytes]]"
) -> Result:
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "autoport.validation.sweep", name, str(folder), *map(str, tp_sizes)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder,  # not the current one, whose files it could import
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()},
        )
        running.add(process)
        try:
            process.wait(TIME_LIMIT)
            reason = f"ended with code {process.returncode}: {_last_line(folder / 'log')}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reason = f"not done after {TIME_LIMIT:.0f} s"
        running.discard(process)
    path = folder / "result.json"
    if path.is_file():
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    else:
        result = _result(name, "failed", [reason])
    shutil.rmtree(folder, ignore_errors=True)
    result.seconds = round(time.monotonic() - started, 1)
    return result


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def code_digest() -> str:
    """Digest of everything that decides a result: the package, the templates, the simulator, the landscape."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for root, pattern in ((package, "*.py"), (templates_dir(), "*.j2"), (simulator_dir(), "*.py")):
        for path in sorted(root.rglob(pattern)):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    digest.update((references_dir() / "landscape.json").read_bytes())
    return digest.hexdigest()[:12]


def port_one(name: str, folder: Path, tp_sizes: Sequence[int]) -> Result:
    """Build the checkpoint of one entry, run every step on it, and judge.

    Args:
        tp_sizes: Sizes to prove; none for 1 and, where it is valid, 2.
    """
    checkpoint = landscape.build_checkpoint(name, folder / "checkpoint", double_heads=WIDE in tp_sizes)
    port = Port(Workspace.create(str(folder / "workspace")), PORT_NAME, str(checkpoint.resolve()))
    options = Options(dry_run=True, confirm=True, tp_sizes=list(tp_sizes))
    problems = []
    try:
        for step in STEPS:
            outcome = run_step(port, step, options)
            if outcome.status != "done":
                problems.append(f"{step}: {outcome.summary}")
    except Refusal as refusal:
        return _result(name, "refused", reasons_of(refusal.problems))
    plan = port.read_state("plan.json", Plan, "analyze")
    proof = port.read_state("proof.json", Proof, "prove")
    result = _result(name, "red" if problems else "ported", problems)
    moe = plan.architecture.moe
    result.composed = [*plan.architecture.attention.composed, *(moe.composed if moe else ())]
    result.tp_sizes = sorted({run.tp_size for run in proof.runs if not run.failure})
    phases = [phase for run in proof.runs for phase in run.phases]
    errors = [phase.max_relative_error for phase in phases if phase.r_ratio is None]
    result.error = max((error for error in errors if error is not None), default=None)
    ratios = [phase.r_ratio.value for phase in phases if phase.r_ratio and phase.phase != SAMPLING]
    result.r_ratio = max((ratio for ratio in ratios if ratio is not None), default=None)
    result.lines = (port.workspace.model_dir(PORT_NAME) / "model.py").read_text().count("\n")
    return result


def reasons_of(problems: Sequence[Problem]) -> list[str]:
    """What was found, by rule."""
    found: dict[str, list[str]] = {}
    for problem in problems:
        found.setdefault(problem.rule, []).append(problem.found)
    return [f"{rule}: {'; '.join(texts)}" for rule, texts in found.items()]


def _result(name: str, verdict: Verdict, reasons: list[str]) -> Result:
    entry = landscape.load()[name.partition(": ")[0]]
    return Result(name, entry.hf_name, entry.category, verdict, reasons=reasons)


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "_" for char in name)


# --- Report -----------------------------------------------------------------------------------------------


def read_report(folder: Path) -> dict[str, Result]:
    """Results of an earlier sweep by name; empty when there is none."""
    path = folder / "coverage.json"
    if not path.is_file():
        return {}
    return {result.name: result for result in msgspec.json.decode(path.read_bytes(), type=list[Result])}


def write_report(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write ``coverage.md`` and ``coverage.json``, in the order of the landscape; names that it lacks go."""
    by_name = {result.name: result for result in results}
    rows = [by_name[name] for name in landscape.names() if name in by_name]
    files = {
        "coverage.md": "\n".join(_markdown(rows)) + "\n",
        "coverage.json": msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n",
    }
    for name, text in files.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in files]


def summary(results: Sequence[Result]) -> str:
    """Coverage in one line: a model type counts when it and all of its variants are proven."""
    by_type: dict[str, list[Result]] = {}
    for result in results:
        by_type.setdefault(result.name.partition(": ")[0], []).append(result)
    counted = [group for group in by_type.values() if group[0].category in ("dense", "moe")]
    default = sum(group[0].verdict == "ported" for group in counted)
    complete = sum(all(result.verdict == "ported" for result in group) for group in counted)
    wide = [result.wide for result in results if result.wide]
    proven = sum(result.verdict == "ported" for result in wide)
    wrong = sum(result.verdict in ("red", "failed") for result in (*results, *wide))
    return (
        f"{default} of {len(counted)} dense and MoE architectures of this sweep ported and proven "
        f"({complete} with all variants), {proven} rows at TP {WIDE}, too; {wrong} red or failed"
    )


def _markdown(results: Sequence[Result]) -> Iterator[str]:
    yield "# Coverage of the architectures in transformers\n"
    yield (
        "A tiny checkpoint of each class, random weights, ported by `autoport port` and proven on the simulator "
        "against the Hugging Face class. `autoport sweep` writes this file. The column TP 4 is of a checkpoint with "
        "twice the heads (`autoport sweep --tp 4`).\n"
    )
    yield f"{summary(results)}.\n"
    columns = "architecture", "class", "verdict", "TP", "float32 error", "bfloat16 R", "TP 4", "model.py"
    yield f"| {' | '.join(columns)} | composed or reason | s |"
    yield "|---" * (len(columns) + 2) + "|"
    for result in results:
        wide = result.wide
        notes = "; ".join(result.reasons or (wide and wide.reasons) or result.composed).replace("|", "/")
        notes = textwrap.shorten(notes, LONGEST_NOTE, placeholder=" ...")
        error = "" if result.error is None else f"{result.error:.1e}"
        ratio = "" if result.r_ratio is None else f"{result.r_ratio:.2f}"
        sizes = ", ".join(map(str, result.tp_sizes))
        yield (
            f"| {result.name} | `{result.hf_name}` | {MARKS[result.verdict]} | {sizes} | {error} | {ratio} | "
            f"{MARKS[wide.verdict] if wide else ''} | {result.lines or ''} | {notes} | {result.seconds:.0f} |"
        )


if __name__ == "__main__":
    target = Path(sys.argv[2])
    found = port_one(sys.argv[1], target, [int(size) for size in sys.argv[3:]])
    write_atomic(target / "result.json", msgspec.json.encode(found))
