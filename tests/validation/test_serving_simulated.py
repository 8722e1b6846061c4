"""Generated ports behind vLLM's real server on the simulator: the whole of Step 9, and the tokens."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from autoport.port import run_step
from autoport.port_state import Port
from autoport.step import Options
from autoport.validation import reference, serving, supervise
from autoport.validation.backends import open_backend
from autoport.validation.battery import ServerGone, run_battery
from autoport.validation.battery_checks import Session
from autoport.validation.checkpoints import choose
from autoport.validation.client import BadReply, Client
from autoport.validation.serving_server import Settings, free_port, server
from autoport.validation.supervise import Supervised, group_exists
from autoport.workspace import Workspace
from checkpoints import real_config, write_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def port(tmp_path) -> Iterator[Port]:
    yield make_port(tmp_path, "llama-3.2-1b")
    shutil.rmtree(tmp_path)


def make_port(folder: Path, config: str) -> Port:
    source = write_checkpoint(folder / "source", real_config(config))
    port = Port(Workspace.create(folder / "workspace"), "subject", str(source))
    for step in ("research", "analyze", "generate", "register", "document"):
        run_step(port, step, Options(dry_run=True))
    return port


def test_the_battery_is_green_with_and_without_prefix_caching(port, monkeypatch):
    monkeypatch.setattr(serving, "REQUESTS", 1)
    monkeypatch.setattr(serving, "LOAD_REQUESTS", 2)
    backend = open_backend("simulator", port.workspace, expert_parallel=False)
    result = serving.serve_test(port, backend, tp_size=1, host_sampling=True)
    assert result.passed, [(run.failure, run.checks) for run in result.runs]
    assert result.checkpoint is not None
    assert result.checkpoint.kind == "twin"
    cached = {check.name: check.found for check in result.runs[1].checks}
    assert "576 tokens from the cache" in cached["repeated prompt"]
    assert cached["same answers as without prefix caching"] == "11 answers equal"
    assert {check.status for run in result.runs for check in run.checks} == {"pass"}


# --- Two ranks --------------------------------------------------------------------------------------------


class TwoRanks(NamedTuple):
    """A server with prefix caching and sampling on the device."""

    client: Client
    process: Supervised
    model: Any  # the Hugging Face model


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Iterator[TwoRanks]:
    folder = tmp_path_factory.mktemp("ranks")
    port = make_port(folder, "yi-6b")
    backend = open_backend("simulator", port.workspace, expert_parallel=False)
    chosen = choose(port, backend, 2, "float32")
    # What the device does not heed, as a default of every request.
    Path(chosen.path, "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    settings = Settings(
        checkpoint=chosen,
        name="yi",
        port=free_port(),
        max_model_len=1024,
        prefix_caching=True,
        host_sampling=False,
        eager=True,
    )
    with (
        server(settings, backend, port.state_dir, folder / "log") as process,
        Client(settings.base_url, "yi") as client,
    ):
        yield TwoRanks(client, process, reference.load(Path(chosen.path), torch.float32))
    assert not group_exists(process.group)
    shutil.rmtree(folder)


def test_tokens_are_those_of_the_hugging_face_class(two_ranks):
    texts = [[7 * index % 400 + 20 for index in range(length)] for length in (1, 40, 700)]
    expected = [reference.greedy(two_ranks.model, text, 16) for text in texts]
    body = {"model": "yi", "prompt": texts, "temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    for _ in range(2):
        reply = two_ranks.client.http.post("/v1/completions", json=body | {"return_token_ids": True})
        choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
        assert [choice["token_ids"] for choice in choices] == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 1},
        {"presence_penalty": 0.5},
        {"temperature": 1.0, "min_p": 0.1},
        {"logit_bias": {"7": 5}},
        {"prompt_logprobs": 1},
        {"structured_outputs": {"choice": ["a", "b"]}},
    ],
)
def test_a_request_that_the_device_would_not_honour_is_a_clean_400(two_ranks, params):
    with pytest.raises(BadReply, match=list(params)[-1].replace("_", ".")) as refused:
        two_ranks.client.complete("a", max_tokens=4, **params)
    assert refused.value.status == 400
    assert two_ranks.client.healthy()


def test_a_worker_that_is_killed_takes_the_server_down(two_ranks):
    """The last one: the server is gone after it."""
    workers = [
        pid
        for pid, _ in supervise._members(two_ranks.process.group)
        if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while serving._alive(two_ranks.process, two_ranks.client) and time.monotonic() < deadline:
        time.sleep(0.2)
    session = Session(two_ranks.client, 1024, True, False, True, 0.0)
    with pytest.raises(ServerGone, match="died during the check 'completion'"):
        run_battery(session, lambda: serving._alive(two_ranks.process, two_ranks.client))
