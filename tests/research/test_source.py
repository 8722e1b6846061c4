"""Local folders and hub ids; the hub is a small server on this machine that serves ranges."""

import contextlib
import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from autoport.analysis.step import read_current_facts
from autoport.errors import Refusal
from autoport.port import forget_stale_source, is_current, run_step
from autoport.port_state import Port
from autoport.research.checkpoint import read_checkpoint
from autoport.research.config import read_facts
from autoport.research.source import open_source
from autoport.step import Options
from autoport.workspace import Workspace
from checkpoints import real_config, write_checkpoint


def content_id(path):
    """As the hub has one: another content is another id."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(10_000)).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """The three calls of the hub that reading needs: repository, tree, and ranges of a file."""

    protocol_version = "HTTP/1.1"
    folder = None
    sent = 0
    failures = ()  # what goes wrong with the next ranges: "drop", "truncate" or a status
    requests = 0

    def log_message(self, *_):
        pass

    def _json(self, value, status=200):
        self._bytes(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _bytes(self, data, status, headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if not re.match(r"/(api/models/)?owner/model(/|$)", path):
            self._bytes(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": content_id(file)}
                for file in sorted(self.folder.iterdir())
            ]
            self._json(files)
        elif "/resolve/" in path:
            type(self).requests += 1
            failure = self.failures.pop(0) if self.failures else None
            if failure == "drop":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if isinstance(failure, int):
                self._bytes(b"{}", failure, {})
                return
            first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
            with open(self.folder / path.rpartition("/")[2], "rb") as file:
                file.seek(first)
                data = file.read(last - first + 1)
            if failure == "truncate":
                self.send_response(206)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return
            type(self).sent += len(data)
            self._bytes(data, 206, {"Content-Range": f"bytes {first}-{last}/*"})
        else:
            self._json({"id": "owner/model", "sha": "0" * 40, "siblings": []})

    do_HEAD = do_GET


class HubServer(http.server.ThreadingHTTPServer):
    """Keeps its connections, which the client leaves open, so that their threads can be ended and waited for."""

    daemon_threads = False

    def __init__(self, *arguments):
        self.connections = []
        super().__init__(*arguments)

    def get_request(self):
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A running hub that serves `tmp_path/hub` as owner/model."""
    folder = tmp_path / "hub"
    folder.mkdir()
    handler = type("Handler", (Hub,), {"folder": folder, "sent": 0, "failures": [], "requests": 0})
    server = HubServer(("127.0.0.1", 0), handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.05,))
    serving.start()
    handler.endpoint = f"http://127.0.0.1:{server.server_port}"
    use_endpoint(monkeypatch, handler.endpoint)
    monkeypatch.setattr("autoport.research.source.FIRST_WAIT_SECONDS", 0.001)
    patient = types.SimpleNamespace(sleep=lambda _: None, time=time.time)  # the client waits between attempts
    monkeypatch.setattr("huggingface_hub.utils._http.time", patient)
    monkeypatch.chdir(tmp_path)
    yield handler
    server.shutdown()
    serving.join()
    for connection in server.connections:
        with contextlib.suppress(OSError):  # closed already
            connection.shutdown(socket.SHUT_RDWR)
    server.server_close()
    assert [thread.name for thread in threading.enumerate() if "process_request" in thread.name] == []


def use_endpoint(monkeypatch, endpoint):
    """What HF_ENDPOINT does when huggingface_hub is first imported."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_a_hub_model_is_researched_by_ranges(hub):
    config = real_config("yi-6b")
    write_checkpoint(hub.folder, config, shards=2)
    source = open_source("owner/model")
    facts = read_facts(source)
    checkpoint = read_checkpoint(source)
    assert facts.fields["rope_theta"].value == 5_000_000.0
    assert checkpoint.total_bytes == 12_122_071_040
    assert source.bytes_read == hub.sent < 1_000_000


@pytest.mark.parametrize(
    "failures", [["drop"], ["truncate"], ["drop", "truncate", "drop"], [503], [429, "drop"]]
)
def test_a_connection_that_fails_is_tried_again(hub, failures):
    write_checkpoint(hub.folder, real_config("yi-6b"), shards=2)
    expected = read_checkpoint(open_source(str(hub.folder))).tensors
    source = open_source("owner/model")
    hub.failures += failures
    assert read_checkpoint(source).tensors == expected
    assert hub.failures == []
    assert source.bytes_read == hub.sent


def test_a_config_that_changed_on_the_hub_is_told_without_reading_it_again(hub, tmp_path, monkeypatch):
    config = real_config("yi-6b")
    write_checkpoint(hub.folder, config)
    (tmp_path / "ws" / "vllm_neuron" / "model").mkdir(parents=True)
    (tmp_path / "ws" / "vllm_neuron" / "__init__.py").touch()
    port = Port(Workspace.find(tmp_path / "ws"), "yi", "owner/model")
    run_step(port, "research", Options())
    sent = hub.sent
    forget_stale_source(port)
    assert "research" in port.manifest.steps
    assert read_current_facts(port).config == config
    write_checkpoint(hub.folder, config | {"rope_theta": 1.0})
    with pytest.raises(Refusal, match=r"PORT-STALE: config\.json changed on the hub"):
        read_current_facts(port)
    with monkeypatch.context() as offline:
        use_endpoint(offline, "http://127.0.0.1:9")
        assert read_current_facts(port).config == config
        forget_stale_source(port)
    assert is_current(port, "research", Options())
    forget_stale_source(port)
    assert not is_current(port, "research", Options())
    assert hub.sent == sent


def test_a_large_header_goes_on_where_it_stopped(hub, monkeypatch):
    monkeypatch.setattr("autoport.research.source.PIECE_BYTES", 10_000)
    write_checkpoint(hub.folder, real_config("yi-6b"))
    source = open_source("owner/model")
    hub.failures += [None, None, "truncate"]
    checkpoint = read_checkpoint(source)
    assert len(checkpoint.tensors) == 291
    assert checkpoint.bytes_read == hub.sent < 110_000  # no piece was sent twice


def test_a_hub_that_keeps_failing_is_given_up(hub, monkeypatch):
    monkeypatch.setattr("autoport.research.source.ATTEMPTS", 2)
    write_checkpoint(hub.folder, real_config("yi-6b"))
    source = open_source("owner/model")
    hub.failures += ["drop"] * 1000
    with pytest.raises(Refusal, match="SRC-HUB"):
        read_checkpoint(source)


def test_a_file_that_is_not_allowed_is_not_asked_for_again(hub):
    write_checkpoint(hub.folder, real_config("yi-6b"))
    source = open_source("owner/model")
    hub.failures += [403] * 50
    with pytest.raises(Refusal, match="SRC-HUB"):
        read_checkpoint(source)
    assert hub.requests == 1


def test_hf_endpoint_is_honoured(hub):
    write_checkpoint(hub.folder, real_config("yi-6b"), shards=2)
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "autoport", "inspect", "owner/model", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["total_bytes"] == 12_122_071_040
    assert report["bytes_read"] + (hub.folder / "config.json").stat().st_size == hub.sent


def test_a_model_that_the_hub_does_not_have(hub):
    with pytest.raises(Refusal, match="SRC-MISSING") as caught:
        open_source("owner/other")
    assert "owner/other" in str(caught.value)


def test_a_hub_that_does_not_answer(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(Refusal, match="SRC-HUB") as caught:
        open_source("owner/model")
    assert "127.0.0.1:9" in caught.value.problems[0].where


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/folder",
        "nothing",
        "nothing.json",
        "../a/b",
        "a/b/c",
        "",
        "x" * 300,
        "~nobody-of-this-name/a",
    ],
)
def test_what_is_neither_a_folder_nor_a_hub_id(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="SRC-MISSING"):
        open_source(name)


def test_a_folder_with_a_hub_ids_name_is_local(monkeypatch, tmp_path):
    write_checkpoint(tmp_path / "owner" / "model", real_config("yi-6b"))
    monkeypatch.chdir(tmp_path)
    assert "config.json" in open_source("owner/model").sizes
