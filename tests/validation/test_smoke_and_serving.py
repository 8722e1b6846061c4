"""Steps 8 and 9 from end to end, with small programs in the place of vLLM: verdicts, reports, faults."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from autoport.cli.serve_test import report as report_serving
from autoport.cli.smoke import report as report_smoke
from autoport.cli.status import serving_rows
from autoport.codegen.document import documents
from autoport.errors import Refusal
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.plan import Plan
from autoport.step import Options
from autoport.validation import checkpoints, serving, serving_server, smoke, supervise
from autoport.validation.backends import Backend
from autoport.validation.battery import BATTERY
from autoport.validation.checkpoints import Chosen
from autoport.workspace import Workspace
from checkpoints import llama_keys, small_config, write_checkpoint
from fake_openai import fake
from fake_vllm import write_fake_vllm

STEPS = ("research", "analyze", "generate", "document")
RESULTS = "examples/vllm_neuron/models/yi/results/results.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a checkpoint, and the workspace of its port; and a copy of the folder beside it."""
    folder = tmp_path_factory.mktemp("made") / "folder"
    config = small_config(max_position_embeddings=2048)
    source = write_checkpoint(folder / "source", config, llama_keys(config), shards=2)
    port = Port(Workspace.create(folder / "workspace"), "yi", str(source))
    for step in STEPS:
        run_step(port, step, Options(dry_run=True))
    shutil.copytree(folder, folder.with_name("copy"))
    return folder


@pytest.fixture
def port(made, monkeypatch):
    """A generated port; the checkpoint that it is served from is only named."""
    monkeypatch.setattr(supervise, "TERM_SECONDS", 1.0)
    monkeypatch.setattr(serving, "REQUESTS", 2)
    monkeypatch.setattr(serving, "LOAD_REQUESTS", 4)
    monkeypatch.setattr(serving_server, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(serving, "choose", choose)
    monkeypatch.setattr(smoke, "choose", choose)
    shutil.rmtree(made)
    shutil.copytree(made.with_name("copy"), made)
    return Port(Workspace.find(made / "workspace"), "yi")


def choose(port, backend, tp_size, twin_dtype):
    return Chosen("source", "somewhere", "", tp_size or 1, 2048, 1000, "float32")


@pytest.fixture
def backend(tmp_path):
    def make(**variables):
        variables |= write_fake_vllm(tmp_path / "fake")
        return Backend("simulator", variables, "simulator on a laptop", 30.0)

    return make


def groups():
    """Process groups with a process that was started from this test run's fake package."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            if b"api_server" in (entry / "cmdline").read_bytes() and pid != os.getpid():
                environment = (entry / "environ").read_bytes()
                if b"FAKE_RUN=" + str(os.getpid()).encode() in environment:
                    found.add(os.getpgid(pid))
    return found


@pytest.fixture(autouse=True)
def no_orphans(monkeypatch):
    monkeypatch.setenv("FAKE_RUN", str(os.getpid()))
    yield
    assert groups() == set()


def results_md(port):
    return (port.workspace.root / RESULTS).read_text()


def failed(run):
    return {check.name for check in run.checks if check.status == "fail"}


# --- Step 8 -----------------------------------------------------------------------------------------------


def without_a_place(text, place):
    """Lines with a time or a rate that do not say where it was measured, nor does the title of their table."""
    title = ""
    for line in text.splitlines():
        if line and line[0] not in "┏┃┡│└|":
            title = line
        if re.search(r"\d (ms|s)\b|tokens/s", line) and place not in line + title:
            yield line


def test_a_number_without_its_place_is_seen():
    assert [*without_a_place("plain\n│ batch │ 0.3 s │\nplain, on X\n│ batch │ 0.3 s │", "X")] == [
        "│ batch │ 0.3 s │"
    ]
    assert [*without_a_place("| rate | 3 tokens/s (X) |\n| Time | 3 s |", "X")] == ["| Time | 3 s |"]


def test_a_green_smoke_test(port, backend, capsys):
    result = smoke.smoke(port, backend())
    report_smoke(result, port.workspace.root)
    assert [*without_a_place(results_md(port) + capsys.readouterr().out, result.place)] == []
    assert result.passed, result.checks
    assert {check.status for check in result.checks} == {"pass"}
    assert result.on_device.endswith(
        "NEURON_SKIP_EFA_AFFINITY=1 python examples/vllm_neuron/models/yi/run.py"
        f" --model-checkpoint {port.source}"
    )
    written = json.loads((port.state_dir / "smoke.json").read_text())
    assert written["place"] == "simulator on a laptop"
    text = results_md(port)
    assert "Verdict: **passed**" in text
    assert "on simulator on a laptop" in text
    assert "`The capital of France is` | `text 50`" in text
    assert text.count("Not run yet.") == 2  # online serving, logits


def test_status_shows_the_tests_of_the_model_as_it_is(port, backend):
    def shown():
        return {command: (status, result) for _, command, status, result in serving_rows(port)}

    assert shown() == {"smoke": ("not run", ""), "serve-test": ("not run", "")}
    smoke.smoke(port, backend(FAKE_LLM="same"))
    assert shown()["smoke"][0] == "red"
    smoke.smoke(port, backend())
    status, result = shown()["smoke"]
    assert (status, result.endswith("on simulator on a laptop")) == ("green", True)
    serving.serve_test(port, backend(FAKE_FAULTS="no_start"))
    assert shown()["serve-test"][0] == "red"
    model = port.workspace.model_dir("yi") / "model.py"
    model.write_text(model.read_text() + "\n# edited\n")
    assert {status for status, _ in shown().values()} == {"outdated"}


def test_a_green_smoke_test_marks_what_it_shows(port, backend):
    readme = port.workspace.root / "vllm_neuron/model/yi/README.md"
    smoke.smoke(port, backend(FAKE_LLM="same"))
    assert "✅ |" not in readme.read_text()
    smoke.smoke(port, backend())
    assert "| On-device sampling | ✅ | simulator, TP 1: offline inference |" in readme.read_text()
    assert "| TP (head sharding) | not verified |" in readme.read_text()


@pytest.mark.parametrize(
    ("kind", "rule", "found"),
    [
        ("crash", "model loaded and ran", "exited with code 1: RuntimeError: Checkpoint key"),
        ("crash", "no known failure in the log", "CHECKPOINT-KEYS: load_weights maps"),
        ("same", "different prompts, different texts", "same text"),
    ],
)
def test_a_red_smoke_test(port, backend, kind, rule, found):
    result = smoke.smoke(port, backend(FAKE_LLM=kind))
    check = next(check for check in result.checks if check.name == rule)
    assert not result.passed
    assert (check.status, found in check.found) == ("fail", True), check
    assert "Verdict: **failed**" in results_md(port)


def test_a_run_that_hangs_is_ended(port, backend):
    script = port.workspace.root / port.workspace.run_script("yi")
    script.write_text("import time\ntime.sleep(300)\n")
    result = smoke.smoke(port, msgspec.structs.replace(backend(), start_seconds=1.0))
    assert "not done within 1 s (--timeout)" in result.checks[0].found


def test_a_run_that_generates_nothing(port, backend):
    (port.workspace.root / port.workspace.run_script("yi")).write_text("print('done')\n")
    result = smoke.smoke(port, backend())
    assert result.checks[0].found == "run.py ended without calling LLM.generate"
    assert not result.passed


def test_without_run_py(port, backend):
    (port.workspace.root / port.workspace.run_script("yi")).unlink()
    with pytest.raises(Refusal, match=r"PORT-ORDER.*autoport document yi"):
        smoke.smoke(port, backend())


def test_results_md_is_kept_when_edited_and_renewed_when_documented(port, backend):
    smoke.smoke(port, backend())
    text = results_md(port)
    assert "Verdict" in text
    run_step(port, "document", Options(dry_run=True))
    assert results_md(port) == text
    path = port.workspace.root / RESULTS
    path.write_text(text + "my notes")
    smoke.smoke(port, backend(FAKE_LLM="same"))
    assert path.read_text().endswith("my notes")
    model = port.workspace.model_dir("yi") / "model.py"
    model.write_text(model.read_text() + "\n# edited\n")
    plan = port.read_state("plan.json", Plan, "analyze")
    assert documents(port, plan)[RESULTS].count("Not run yet.") == 3  # measured with other files


# --- Step 9 -----------------------------------------------------------------------------------------------


def test_a_green_serving_test(port, backend):
    result = serving.serve_test(port, backend(), host_sampling=True)
    assert result.passed, [(run.failure, failed(run)) for run in result.runs]
    assert [run.title for run in result.runs] == ["plain", "prefix caching"]
    plain, cached = (run.command for run in result.runs)
    assert "--no-enable-prefix-caching" in plain
    assert "--max-num-batched-tokens 1024" in plain
    assert "--enable-prefix-caching" in cached.replace("--no-enable", "")
    assert "--max-num-batched-tokens 512" in cached
    text = results_md(port)
    assert "| prefix caching: same answers as without prefix caching | pass | 11 answers equal |" in text
    assert "output tokens/s" in text
    assert "(simulator on a laptop)" in text


@pytest.mark.parametrize(
    ("length", "tp_size", "found"),
    [(1024, 2, ""), (1024, 64, ""), (512, 2, "a context over 512 tokens, not 512"), (1023, 3, "3 ranks")],
)
def test_prefix_caching_needs_segments(length, tp_size, found):
    why = serving.why_no_caching(length, tp_size)
    assert found in why
    assert bool(why) is bool(found)


def test_answers_that_change_with_prefix_caching_are_red(port, backend):
    result = serving.serve_test(port, backend(FAKE_FAULTS_CACHED="same"), host_sampling=True)
    assert not result.passed
    assert "same answers as without prefix caching" in failed(result.runs[1])


def test_a_cache_that_is_never_hit_is_red(port, backend):
    result = serving.serve_test(port, backend(FAKE_FAULTS_CACHED="no_hits"))
    assert [failed(run) for run in result.runs] == [set(), {"repeated prompt"}]


def test_a_server_that_does_not_start(port, backend):
    result = serving.serve_test(port, backend(FAKE_FAULTS="no_start"))
    [run] = result.runs
    assert not result.passed
    assert "exited with code 1 before it answered" in run.failure
    assert [known.id for known in run.known] == ["CHECKPOINT-KEYS"]
    assert "CHECKPOINT-KEYS" in results_md(port)


@pytest.mark.parametrize("faults", ["die", "die child"])
def test_a_server_that_dies_in_the_battery(port, backend, faults):
    result = serving.serve_test(port, backend(FAKE_FAULTS=faults))
    [run] = result.runs
    assert not result.passed
    assert "the server died during the check 'counting'; it exited with code 3" in run.failure
    assert len(run.checks) == 4


def test_a_context_that_is_too_short_for_the_load(port, backend, monkeypatch):
    monkeypatch.setattr(serving, "choose", lambda *_: msgspec.structs.replace(choose(*_), max_model_len=64))
    result = serving.serve_test(port, backend(), host_sampling=True)
    [run] = result.runs
    assert result.passed, (run.failure, failed(run))
    assert [check.name for check in run.checks if check.status == "skip"] == [*serving.LOADS]


def test_a_server_that_dies_before_it_names_its_model(port, backend):
    [run] = serving.serve_test(port, backend(FAKE_FAULTS="die_unnamed")).runs
    assert "the server exited with code 3 before it answered" in run.failure


def test_a_server_that_dies_under_load(port, backend):
    [run] = serving.serve_test(port, backend(FAKE_FAULTS="die_loaded"), host_sampling=True).runs
    assert run.failure == "the server died under load; it exited with code 3"
    assert failed(run) == {"ten requests of 64 tokens"}


@pytest.mark.parametrize(
    ("faults", "where", "checks"),
    [("hang", "in the check 'counting'", 4), ("hang_loaded", "under load", len(BATTERY) + 1)],
)
def test_a_server_that_hangs_costs_one_time_out(port, backend, monkeypatch, faults, where, checks):
    monkeypatch.setattr(serving, "DEATH_SECONDS", 0.1)
    [run] = serving.serve_test(port, backend(FAKE_FAULTS=faults), host_sampling=True, answer_seconds=2.0).runs
    waited = f"no answer from the server within 2 s (--timeout) {where}"
    assert run.failure == f"{waited}; it is still running"
    assert [check.status for check in run.checks] == ["pass"] * (checks - 1) + ["fail"]


def test_a_worker_that_a_signal_ended_is_named(port, backend):
    """The server's own exit code says nothing then."""
    line = "Worker proc VllmWorker-1 died unexpectedly (exit code: -11), shutting down executor."
    [run] = serving.serve_test(port, backend(FAKE_FAULTS="die", FAKE_LOG=line)).runs
    assert run.failure.endswith("; it exited with code 3; before that VllmWorker-1 was killed by SIGSEGV")
    assert [known.id for known in run.known] == ["WORKER-KILLED"]


def test_a_server_that_is_killed_and_a_rerun(port, backend):
    def kill():
        deadline = time.monotonic() + 20
        while not groups() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)
        for group in groups():
            os.killpg(group, signal.SIGKILL)

    healthy = backend()
    killer = threading.Thread(target=kill)
    killer.start()
    result = serving.serve_test(port, healthy)
    killer.join()
    assert not result.passed
    assert "killed by SIGKILL" in result.runs[-1].failure
    assert serving.serve_test(port, healthy).passed


def test_a_port_in_use(port, backend):
    in_use = r"SERVE-PORT: port \d+ cannot be used: Address already in use"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(Refusal, match=in_use):
        serving.serve_test(port, backend(), tcp_port=other.getsockname()[1])
    assert not port.has_state("serving.json")


@pytest.mark.parametrize("test", [smoke.smoke, serving.serve_test])
def test_a_disk_without_room_is_seen_before_anything_is_started(port, backend, monkeypatch, test):
    monkeypatch.setattr(smoke, "ROOM_BYTES", 10**18)
    with pytest.raises(Refusal, match=r"WS-WRITE: .* MB are free, a run needs"):
        test(port, backend())
    assert not (port.state_dir / checkpoints.FOLDER).exists()


def test_results_that_cannot_be_written(port, backend, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    before = results_md(port)
    monkeypatch.setattr("autoport.files.os.fsync", full)
    with pytest.raises(Refusal, match="WS-WRITE: cannot write: No space left on device"):
        serving.serve_test(port, backend())
    assert results_md(port) == before
    assert not port.has_state("serving.json")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_test_leaves_no_server(port, backend, number):
    variables = backend().environment
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from autoport.validation import serving
from autoport.validation.backends import Backend
from autoport.port_state import Port
from autoport.workspace import Workspace
from test_smoke_and_serving import choose
serving.choose = choose
backend = Backend("simulator", {variables | {"FAKE_FAULTS": "in_a_crowd"}!r}, "here", 30.0)
serving.serve_test(Port(Workspace.find({str(port.workspace.root)!r}), "yi"), backend)
"""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    caller = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while not groups() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert groups()
    caller.send_signal(number)
    assert caller.wait(30) != 0
    deadline = time.monotonic() + 20
    while groups() and time.monotonic() < deadline:
        time.sleep(0.05)


# --- A server of others -----------------------------------------------------------------------------------


def test_a_url(port, capsys):
    with fake() as server:
        result = serving.check_url(server.url + "/v1")
        assert result.passed, failed(result.runs[0])
        assert result.place.startswith(f"server {server.url}")
        with pytest.raises(Refusal, match=r"SERVE-URL.*'other'"):
            serving.check_url(server.url, "other")
    serving.write(port, result)
    report_serving(result, port.workspace.root)
    printed, text = capsys.readouterr().out, results_md(port)
    assert "tokens/s" in printed
    assert "tokens/s" in text
    assert [*without_a_place(printed + text, f"server {server.url}")] == []
    with pytest.raises(Refusal, match="SERVE-URL: no OpenAI-compatible server"):
        serving.check_url(server.url)


# --- Checkpoints ------------------------------------------------------------------------------------------


def test_a_shard_that_is_gone(port, backend, monkeypatch):
    monkeypatch.setattr(checkpoints, "why_not_source", lambda source, checkpoint: "")
    shard = Path(port.source) / "model-00001-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(Refusal, match=shard.name):
        checkpoints.choose(port, backend(), 1, "float32")


def test_a_source_that_changed(port, backend, monkeypatch):
    monkeypatch.setattr(checkpoints, "why_not_source", lambda source, checkpoint: "")
    chosen = checkpoints.choose(port, backend(), 1, "float32")
    assert (chosen.kind, chosen.path) == ("source", port.source)
    config = small_config(intermediate_size=256)
    write_checkpoint(Path(port.source), config, llama_keys(config), shards=2)
    with pytest.raises(Refusal, match=r"CKPT-CHANGED: .* tensors are not as Step 1 found them"):
        checkpoints.choose(port, backend(), 1, "float32")


def test_a_source_without_a_tokenizer_is_replaced_by_a_twin_with_one(port, backend):
    from transformers import AutoTokenizer

    chosen = checkpoints.choose(port, backend(), None, "float32")
    assert (chosen.kind, chosen.why) == ("twin", "the source has no tokenizer")
    assert "random weights" in str(chosen)
    tokenizer = AutoTokenizer.from_pretrained(chosen.path)
    text = "naïve 数学 😀"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert len(tokenizer) == chosen.vocab_size


def test_a_source_that_is_too_large(port):
    from autoport.schema.facts import Checkpoint

    checkpoint = port.read_state("checkpoint.json", Checkpoint, "research")
    checkpoint.total_bytes = 14_000_000_000
    assert checkpoints.why_not_source(port.source, checkpoint) == "the source has 14.0 GB of weights"


def test_a_tp_size_that_the_plan_rules_out(port, backend):
    with pytest.raises(Refusal, match="SMOKE-TP: TP 3: "):
        checkpoints.choose(port, backend(), 3, "float32")
