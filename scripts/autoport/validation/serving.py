"""Step 9: serves the port through vLLM's OpenAI server, plain and with prefix caching; writes serving.json."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec

from autoport.codegen.document import model_len, record_results, record_section
from autoport.codegen.features import FeatureResult, current_results
from autoport.codegen.results import ONLINE, Measured
from autoport.errors import Refusal, refuse
from autoport.port_state import Port
from autoport.units import now
from autoport.validation.backends import Backend, command_line, environment
from autoport.validation.battery import ServerGone, compare, run_battery
from autoport.validation.battery_checks import Session
from autoport.validation.checkpoints import FOLDER, Chosen, choose
from autoport.validation.client import ANSWER_SECONDS, Answer, BadReply, Client, time_out
from autoport.validation.ranks import versions
from autoport.validation.serving_load import LOAD_CONCURRENCY, LOAD_REQUESTS, REQUESTS, TOKENS, Load, measure
from autoport.validation.serving_server import (
    MODEL_LEN,
    SEGMENT,
    NotServing,
    Settings,
    free_port,
    server,
)
from autoport.validation.smoke import (
    Known,
    check_room,
    dead_worker,
    needs_expert_parallel,
    recognise,
    run_folder,
)
from autoport.validation.smoke_rules import Check
from autoport.validation.supervise import Supervised

STATE_FILE = "serving.json"
# Two steps of bfloat16 (8 significant bits) at logits between 16 and 32, as nats.
BF16_TIE = 0.25
FLOAT32_TIE = 1e-3
LOADS = ("ten requests of 64 tokens", "concurrent load")
DEATH_SECONDS = 3.0  # for a server whose worker died to end


class ServerRun(msgspec.Struct):
    """One server and what it answered.

    Attributes:
        title: ``"plain"`` or ``"prefix caching"``, or the URL.
        command: What a person would type to start it; empty for a server of others.
        failure: Why the battery was not finished, empty when it was.
        known: Failures recognised in the server's log.
    """

    title: str
    command: str = ""
    checks: list[Check] = []
    loads: list[Load] = []
    failure: str = ""
    known: list[Known] = []
    log: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failure and bool(self.checks) and all(c.status != "fail" for c in self.checks)


class Serving(msgspec.Struct):
    """Verdict of Step 9.

    Attributes:
        on: Name of the backend, or ``"url"``.
        place: Where it ran and was measured, in words.
        skipped: Why there is no run with prefix caching, empty when there is.
    """

    passed: bool
    on: str
    place: str
    checkpoint: Chosen | None
    runs: list[ServerRun]
    on_device: str
    skipped: str
    finished: str
    versions: dict[str, str]


def serve_test(
    port: Port,
    backend: Backend,
    tp_size: int | None = None,
    tcp_port: int | None = None,
    host_sampling: bool = False,
    answer_seconds: float = ANSWER_SECONDS,
) -> Serving:
    """Serve and judge; writes serving.json and the section "Online serving" of results.md.

    The plain server prefills a prompt in one step, the one with prefix caching in segments. Each is stopped
    before the next starts; every answer of the second has to be that of the first.

    Args:
        tcp_port: Port of the servers; None for a free one.
        answer_seconds: Longest wait for one answer; a test ends with the first that takes longer.

    Raises:
        Refusal: SERVE-PORT, what `choose` refuses, WS-WRITE.
    """
    chosen = choose(port, backend, tp_size, "float32")
    check_room(port)
    length = model_len(MODEL_LEN, chosen.max_model_len, chosen.tp_size)
    skipped = why_no_caching(length, chosen.tp_size)
    runs: list[ServerRun] = []
    answers: list[dict[str, Answer]] = []
    tie = FLOAT32_TIE if chosen.dtype == "float32" else BF16_TIE
    for caching in (False, True) if not skipped else (False,):
        settings = Settings(
            checkpoint=chosen,
            name=f"{port.name}-{uuid.uuid4().hex[:8]}",
            port=tcp_port or free_port(),
            max_model_len=length,
            prefix_caching=caching,
            host_sampling=host_sampling,
            eager=backend.is_simulated,
        )
        log = port.state_dir / FOLDER / f"server-{'cached' if caching else 'plain'}.log"
        run, found = _run(settings, backend, run_folder(port, backend), log, tie, answer_seconds)
        run.log = str(log.relative_to(port.workspace.root))
        runs.append(run)
        answers.append(found)
        if run.failure:
            break
    if len(runs) == 2 and not runs[1].failure:
        runs[1].checks.append(compare(answers[0], answers[1], tie).check)
    result = Serving(
        passed=all(run.passed for run in runs) and len(runs) == (1 if skipped else 2),
        on=backend.name,
        place=f"{backend.place}, TP {chosen.tp_size}",
        checkpoint=chosen,
        runs=runs,
        on_device=device_command(port),
        skipped=skipped,
        finished=now(),
        versions=versions(),
    )
    write(port, result)
    if result.passed and len(runs) == 2:
        _record_feature(port, result)
    return result


def why_no_caching(length: int, tp_size: int) -> str:
    """Why the port cannot be served with prefix caching, which prefills in segments; empty where it can.

    Args:
        length: Tokens of the longest sequence.
    """
    if SEGMENT % tp_size:
        return f"prefix caching needs segments of {SEGMENT} tokens, which {tp_size} ranks cannot split"
    return "" if length > SEGMENT else f"prefix caching needs a context over {SEGMENT} tokens, not {length}"


def check_url(base_url: str, model: str = "", answer_seconds: float = ANSWER_SECONDS) -> Serving:
    """Run the battery against a server that is there already; nothing is started or stopped.

    Args:
        model: Name of the model; empty for the first that the server lists.
        answer_seconds: As for `serve_test`.

    Raises:
        Refusal: SERVE-URL when nothing answers there, or it has no such model.
    """
    place = f"server {base_url}, client on this machine"
    try:
        with Client(base_url, model, answer_seconds) as client:
            listed = client.models()
            names = [item["id"] for item in listed]
            if not names or (model and model not in names):
                raise refuse(
                    "SERVE-URL", f"no model {model!r}", base_url, f"pass --model, one of {', '.join(names)}"
                )
            client.model = model or names[0]
            entry = next(item for item in listed if item["id"] == client.model)
            length = entry.get("max_model_len")
            session = Session(
                client,
                max_model_len=length if isinstance(length, int) else None,
                random_weights=False,
                seeds=True,
                prefix_caching=None,
                tie=BF16_TIE,
            )
            run = ServerRun(title=base_url)
            with _timed(run):
                _battery(run, session, client.healthy, place)
    except (httpx.HTTPError, httpx.InvalidURL, BadReply) as error:
        raise refuse(
            "SERVE-URL",
            f"no OpenAI-compatible server: {type(error).__name__}: {error}",
            base_url,
            "check the address; it is the one before /v1",
        ) from error
    return Serving(
        passed=run.passed,
        on="url",
        place=place,
        checkpoint=None,
        runs=[run],
        on_device="",
        skipped="a server of others is not restarted",
        finished=now(),
        versions={},
    )


def device_command(port: Port) -> str:
    """What Step 9 runs on a trn2 instance, from the workspace's folder."""
    variables = environment("trn2", port.workspace, needs_expert_parallel(port))
    return command_line(
        variables,
        ["autoport", "serve-test", port.name, "--on", "trn2", "--workspace", str(port.workspace.root)],
    )


# --- One server -------------------------------------------------------------------------------------------


def _run(
    settings: Settings, backend: Backend, folder: Path, log: Path, tie: float, answer_seconds: float
) -> tuple[ServerRun, dict[str, Answer]]:
    run = ServerRun(
        title="prefix caching" if settings.prefix_caching else "plain",
        command=command_line(backend.environment, settings.command()),
    )
    answers: dict[str, Answer] = {}
    try:
        with (
            _timed(run),
            server(settings, backend, folder, log) as process,
            Client(settings.base_url, settings.name, answer_seconds) as client,
        ):
            session = Session(
                client,
                max_model_len=settings.max_model_len,
                random_weights=settings.checkpoint.is_random,
                seeds=settings.host_sampling,
                prefix_caching=settings.prefix_caching,
                tie=tie,
                answers=answers,
            )
            _battery(run, session, lambda: _alive(process, client), backend.place)
            if run.failure:
                process.wait(DEATH_SECONDS)
                run.failure += f"; it {process.how_it_ended()}{dead_worker(log)}"
    except NotServing as error:
        run.failure = str(error)
        run.known = error.known
    if run.failure and not run.known:
        run.known = recognise(log, ignore=("DEGENERATE",))
    return run, answers


def _battery(run: ServerRun, session: Session, is_alive: Callable[[], bool], place: str) -> None:
    try:
        run.checks = run_battery(session, is_alive)
    except ServerGone as gone:
        run.checks, run.failure = gone.results, str(gone)
        return
    if session.max_model_len is not None and session.max_model_len < 2 * TOKENS:
        why = f"a context of {session.max_model_len} tokens is short for a prompt and {TOKENS} new ones"
        run.checks += [Check(name, "skip", why) for name in LOADS]
        return
    client, sizes = session.client, ((REQUESTS, 1), (LOAD_REQUESTS, LOAD_CONCURRENCY))
    for name, (requests, concurrency) in zip(LOADS, sizes, strict=True):
        try:
            load = measure(
                client.base_url,
                client.model,
                place,
                requests,
                concurrency,
                answer_seconds=client.answer_seconds,
            )
        except httpx.TimeoutException as error:
            found = time_out(error, client.answer_seconds)
            run.checks.append(Check(name, "fail", found))
            run.failure = f"{found} under load"
            return
        run.loads.append(load)
        found = load.problem or f"{load.output_tokens_per_second:.1f} tokens/s on {place}"
        run.checks.append(Check(name, "fail" if load.problem else "pass", found, load.total_seconds))
        if load.problem and not is_alive():
            run.failure = "the server died under load"
            return


def _alive(process: Supervised, client: Client) -> bool:
    return process.wait(0.1) is None and client.healthy()


@contextlib.contextmanager
def _timed(run: ServerRun) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        run.seconds = round(time.monotonic() - started, 1)


# --- Reports ----------------------------------------------------------------------------------------------


def write(port: Port, result: Serving) -> None:
    """Write serving.json and the section of results.md.

    Raises:
        Refusal: WS-WRITE.
    """
    port.write_state(STATE_FILE, result)
    record_section(port, ONLINE, measured(result))


def measured(result: Serving) -> Measured:
    """The section of results.md."""
    facts = [("Measured", f"{result.finished} on {result.place}")]
    if result.checkpoint is not None:
        facts.append(("Checkpoint", str(result.checkpoint)))
    if result.skipped:
        facts.append(("Not run", result.skipped))
    for run in result.runs:
        if run.failure:
            facts.append((f"{run.title}: stopped", run.failure))
        facts += [(f"{run.title}: {known.id}", f"{known.cause} {known.fix}") for known in run.known]
    return Measured(
        verdict="passed" if result.passed else "failed",
        facts=facts,
        checks=[
            (f"{run.title}: {check.name}", check.status, check.found[:200])
            for run in result.runs
            for check in run.checks
        ],
        numbers=[
            (f"{run.title}: {what}", f"{value} ({load.place})")
            for run in result.runs
            for load in run.loads
            for what, value in load.rows()
        ],
    )


def _record_feature(port: Port, result: Serving) -> None:
    """Segmented prefill ran behind prefix caching; what the proof found on the simulator stays."""
    feature = "Segmented prefill"
    if result.on == "simulator" and feature in current_results(port):
        return
    note = f"{result.place}: answers with prefix caching equal those without"
    with contextlib.suppress(Refusal):
        record_results(port, {feature: FeatureResult(True, note)})
