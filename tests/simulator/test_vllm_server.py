"""SmolLM2-135M-Instruct, real weights and tokenizer, through `vllm.LLM` and through the OpenAI server."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from autoport.port import run_step
from autoport.port_state import Port
from autoport.step import Options
from autoport.validation import reference
from autoport.workspace import Workspace
from smollm2 import TEXTS, SmolLM2, needs_package

pytestmark = [pytest.mark.slow, needs_package]

STEPS = 16
NEURON_CONFIG = {
    "num_batched_tokens_buckets": [128],
    "num_seqs_buckets": [4],
    "enable_structured_outputs": True,
}


@pytest.fixture(scope="module")
def workspace(smollm2: SmolLM2, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the port."""
    workspace = Workspace.create(tmp_path_factory.mktemp("port") / "workspace")
    port = Port(workspace, "smollm2", str(smollm2.checkpoint))
    for step in ("research", "analyze", "generate", "register"):
        run_step(port, step, Options(dry_run=True, relax=["even-heads"]))
    return workspace.root


@pytest.fixture(scope="module")
def expected(smollm2: SmolLM2) -> list[list[int]]:
    """Greedy tokens of the Hugging Face class."""
    return [tokens[:STEPS] for tokens in smollm2.expected]


def test_offline(smollm2, workspace, expected):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "skip_tokenizer_init": False}
    options["hf_overrides"] = {"dtype": "float32"}
    with engines.simulated(workspace), engines.engine(smollm2.checkpoint, NEURON_CONFIG, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
        outputs = llm.generate(TEXTS, params, use_tqdm=False)
        assert engines.tokens(outputs) == expected
        assert outputs[0].outputs[0].text.strip().startswith("Paris")

        choices = StructuredOutputsParams(choice=["Berlin", "Rome"])
        params = SamplingParams(temperature=0.0, max_tokens=STEPS, structured_outputs=choices)
        [output] = llm.generate(TEXTS[:1], params, use_tqdm=False)
        assert output.outputs[0].text in ("Berlin", "Rome")


def test_segments_and_prefix_cache(smollm2, workspace):
    options = {
        "hf_overrides": {"dtype": "float32"},
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        "max_num_seqs": 2,
    }
    long, tail = engines.prompts([520, 9], vocab_size=49152)
    texts = [long, long[:512] + tail]
    expected = [reference.greedy(smollm2.model, text, 4) for text in texts]
    with engines.simulated(workspace), engines.engine(smollm2.checkpoint, {}, **options) as llm:
        outputs = [engines.generate(llm, [text], 4)[0] for text in (*texts, long)]
    assert engines.tokens(outputs) == [*expected, expected[0]]
    assert [output.num_cached_tokens for output in outputs] == [0, 512, 512]


def test_online(smollm2, workspace, expected, tmp_path):
    with server(workspace, smollm2.checkpoint, tmp_path) as url:
        body = {
            "model": "smollm2",
            "prompt": TEXTS,
            "max_tokens": STEPS,
            "temperature": 0,
            "ignore_eos": True,
        }
        choices = post(f"{url}/v1/completions", body | {"return_token_ids": True})["choices"]
        assert [choice["token_ids"] for choice in choices] == expected
        body |= {
            "prompt": TEXTS[0],
            "ignore_eos": False,
            "structured_outputs": {"choice": ["Berlin", "Rome"]},
        }
        [choice] = post(f"{url}/v1/completions", body)["choices"]
        assert choice["text"] in ("Berlin", "Rome")


@contextlib.contextmanager
def server(workspace: Path, checkpoint: Path, folder: Path) -> Iterator[str]:
    """The OpenAI server in a process group of its own."""
    from vllm_neuron.simulator import environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "--model": checkpoint,
        "--served-model-name": "smollm2",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--hf-overrides": json.dumps({"dtype": "float32"}),
        "--max-model-len": 128,
        "--max-num-seqs": 4,
        "--num-gpu-blocks-override": 40,
        "--additional-config": json.dumps({"neuron_config": NEURON_CONFIG | engines.CPU_SAMPLING}),
    }
    arguments = [str(part) for option in options.items() for part in option]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    command += ["--enforce-eager", "--no-enable-prefix-caching"]
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | environment(workspace),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", process, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"no answer from {url}\n{log.read_text()[-3000:]}")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)
