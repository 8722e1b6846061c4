"""A generated port behind vLLM's real server on the simulator: the whole of Step 9."""

import shutil
from collections.abc import Iterator

import pytest
from autoport.port import Options, run_step
from autoport.validation import serving
from autoport.validation.backends import open_backend
from autoport.workspace import Port, Workspace
from checkpoints import real_config, write_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def port(tmp_path) -> Iterator[Port]:
    source = write_checkpoint(tmp_path / "source", real_config("llama-3.2-1b"))
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
