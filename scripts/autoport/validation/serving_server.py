"""Starts vLLM's OpenAI server, waits until it answers, and ends it whatever happens."""

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from autoport.errors import refuse
from autoport.validation.backends import Backend
from autoport.validation.checkpoints import Chosen
from autoport.validation.client import BadReply, Client
from autoport.validation.smoke import Known, last_error, recognise
from autoport.validation.supervise import Supervised, supervised

HOST = "127.0.0.1"
MODULE = "vllm.entrypoints.openai.api_server"
MODEL_LEN = 1024  # tokens; the smallest usual length that a prefill in segments fits in
SEGMENT = 512  # tokens; the smallest segment that the kernel has
MAX_NUM_SEQS = 16  # as many as the battery sends at once
POLL_SECONDS = 0.5


class Settings(msgspec.Struct, frozen=True):
    """How a server is started.

    Attributes:
        name: ``--served-model-name``; no other server has it, so an answer is known to be this one's.
        prefix_caching: With it prompts are prefilled in segments of `SEGMENT` tokens.
        host_sampling: Sample on the host, with all of OpenAI's parameters, and not on the device.
        eager: Without compiling, which the device cannot do; run.py compiles, so Step 8 has shown that it works.
    """

    checkpoint: Chosen
    name: str
    port: int
    max_model_len: int
    prefix_caching: bool
    host_sampling: bool
    eager: bool

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def arguments(self) -> list[str]:
        """Arguments of the server's module."""
        batched = SEGMENT if self.prefix_caching else self.max_model_len
        arguments = ["--model", self.checkpoint.path, "--served-model-name", self.name]
        arguments += ["--host", HOST, "--port", str(self.port)]
        # A request asks for what it says, not for the penalties of the checkpoint's generation_config.json.
        arguments += ["--generation-config", "vllm"]
        arguments += ["--tensor-parallel-size", str(self.checkpoint.tp_size)]
        arguments += ["--max-model-len", str(self.max_model_len), "--max-num-seqs", str(MAX_NUM_SEQS)]
        arguments += ["--max-num-batched-tokens", str(batched)]
        arguments += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        if self.eager:
            arguments.append("--enforce-eager")
        if self.checkpoint.is_random:
            # vLLM would take bfloat16 for a float32 checkpoint.
            arguments += ["--dtype", self.checkpoint.dtype]
        if self.host_sampling:
            config = {"neuron_config": {"on_device_sampling_config": None}}
            arguments += ["--additional-config", json.dumps(config)]
        return arguments

    def command(self) -> list[str]:
        return ["python", "-m", MODULE, *self.arguments()]


class NotServing(Exception):
    """The server did not come up.

    Attributes:
        known: Failures recognised in its log.
    """

    def __init__(self, message: str, known: list[Known]):
        self.known = known
        super().__init__(message)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(port: int) -> None:
    """Refuse a port that something listens on.

    Raises:
        Refusal: SERVE-PORT.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise refuse(
                "SERVE-PORT",
                f"port {port} cannot be used: {error.strerror}",
                f"{HOST}:{port}",
                "pass another --port, or none for a free one",
            ) from error


@contextlib.contextmanager
def server(settings: Settings, backend: Backend, folder: Path, log: Path) -> Iterator[Supervised]:
    """A server that answers; its process group is ended at the end of the block.

    Args:
        folder: Working folder.

    Raises:
        NotServing: It died or did not answer in time.
        Refusal: SERVE-PORT, WS-WRITE.
    """
    check_port(settings.port)
    command = [sys.executable, "-m", MODULE, *settings.arguments()]
    with supervised(command, backend.environment, folder, log) as process:
        wait_until_healthy(process, settings, backend.start_seconds)
        yield process


def wait_until_healthy(process: Supervised, settings: Settings, timeout: float) -> None:
    """Wait for the server's own answer.

    Raises:
        NotServing: It died, or the time is up.
    """
    deadline = time.monotonic() + timeout
    with Client(settings.base_url, settings.name) as client:
        while (names := served(client)) is None:
            if process.wait(POLL_SECONDS) is not None:
                raise _not_serving(f"the server {process.how_it_ended()} before it answered", process)
            if time.monotonic() > deadline:
                raise _not_serving(f"the server was not up within {timeout:g} s (--start-timeout)", process)
    if settings.name not in names:
        raise _not_serving(f"port {settings.port} answers, but not with this server: {names}", process)


def served(client: Client) -> list[str] | None:
    """Names of the models of a healthy server, None when there is none."""
    try:
        return [model["id"] for model in client.models()] if client.healthy() else None
    except (httpx.HTTPError, BadReply):
        return None


def _not_serving(message: str, process: Supervised) -> NotServing:
    known = recognise(process.log)
    if not known:
        message += f": {last_error(process.tail())}"
    return NotServing(message, known)
