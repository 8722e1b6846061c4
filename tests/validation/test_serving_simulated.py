"""Generated ports behind vLLM's real server on the simulator: the whole of Step 9, and the tokens."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from autoport.port import Options, run_step
from autoport.validation import reference, serving
from autoport.validation.backends import open_backend
from autoport.validation.checkpoints import choose
from autoport.validation.client import BadReply, Client
from autoport.validation.serving_server import Settings, free_port, server
from autoport.workspace import Port, Workspace
from checkpoints import real_config, write_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def port(tmp_path, request) -> Iterator[Port]:
    source = write_checkpoint(tmp_path / "source", real_config(getattr(request, "param", "llama-3.2-1b")))
    port = Port(Workspace.create(tmp_path / "workspace"), "llama", str(source))
    for step in ("research", "analyze", "generate", "register", "document"):
        run_step(port, step, Options(dry_run=True))
    yield port
    shutil.rmtree(tmp_path)


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


@pytest.mark.parametrize("port", ["yi-6b"], indirect=True)
def test_tokens_of_two_ranks_and_requests_that_the_device_would_not_honour(port, tmp_path):
    backend = open_backend("simulator", port.workspace, expert_parallel=False)
    chosen = choose(port, backend, 2, "float32")
    model = reference.load(Path(chosen.path), torch.float32)
    texts = [[7 * index % 400 + 20 for index in range(length)] for length in (1, 40, 700)]
    expected = [reference.greedy(model, text, 16) for text in texts]
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
        server(settings, backend, port.state_dir, tmp_path / "log"),
        Client(settings.base_url, "yi") as client,
    ):
        body = {"model": "yi", "prompt": texts, "temperature": 0.0, "max_tokens": 16}
        for _ in range(2):
            reply = client.http.post(
                "/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True}
            )
            choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
            assert [choice["token_ids"] for choice in choices] == expected
        for params in (
            {"temperature": 1.0, "seed": 1},
            {"presence_penalty": 0.5},
            {"temperature": 1.0, "min_p": 0.1},
            {"logit_bias": {"7": 5}},
            {"prompt_logprobs": 1},
            {"structured_outputs": {"choice": ["a", "b"]}},
        ):
            with pytest.raises(BadReply, match=list(params)[-1].replace("_", ".")) as refused:
                client.complete("a", max_tokens=4, **params)
            assert refused.value.status == 400
        assert client.healthy()
