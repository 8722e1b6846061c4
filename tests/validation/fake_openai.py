"""A small OpenAI-compatible server whose answers depend on the prompt alone, and which can be told to err.

Run as a program it takes the arguments of vLLM's server that the tests need, and its faults from FAKE_FAULTS.
"""

import contextlib
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_MODEL_LEN = 1024
BLOCK = 32


class Fake(ThreadingHTTPServer):
    """Attributes: `faults`, names of what it does wrong; `die_after`, completions until the process ends."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        faults: set[str] = frozenset(),
        port: int = 0,
        model: str = "fake",
        caching: bool = True,
        max_model_len: int = MAX_MODEL_LEN,
    ):
        super().__init__(("127.0.0.1", port), Handler)
        self.faults = set(faults)
        self.model = model
        self.caching = caching
        self.max_model_len = max_model_len
        self.seen: set[str] = set()
        self.hits = 0
        self.running = 0
        self.aborted = False
        self.requests = itertools.count(1)
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def tokens(self, prompt: Any, body: dict[str, Any], count: int) -> list[str]:
        key = json.dumps(prompt)
        if body.get("temperature", 0) > 0:
            seed = time.perf_counter() if "ignore_seed" in self.faults else body.get("seed")
            key += "" if "one_text" in self.faults else f"seed {seed}"
        if "seed_greedy" in self.faults and "seed" in body:
            key += "seed"
        if "same" in self.faults:
            key = ""
        if "in_a_crowd" in self.faults and self.running > 4:
            key += "crowd"
        if "cache_differs" in self.faults and key in self.seen:
            key += "again"
        if "short_differs" in self.faults and count == 1:
            key += "short"
        if "after_abort" in self.faults and self.aborted:
            key += "after"
        draw = random.Random(key)
        words = [f" w{draw.randrange(10000)}" for _ in range(count)]
        if "degenerate" in self.faults:
            words = [" the"] * count
        if isinstance(prompt, str) and prompt.startswith("Count") and "no_count" not in self.faults:
            words[0] = " 10"
        return words


@contextlib.contextmanager
def fake(*faults: str, **options: Any) -> Iterator[Fake]:
    server = Fake(set(faults), **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(503 if "unhealthy" in self.server.faults else 200, {})
        elif self.path == "/v1/models":
            if "die_unnamed" in self.server.faults:
                os._exit(3)
            entry = {"id": self.server.model, "max_model_len": self.server.max_model_len}
            self.reply(200, {"data": [entry]})
        elif self.path == "/metrics":
            running = 1 if "runs_on" in self.server.faults else self.server.running
            text = (
                "# HELP some text\n"
                f'vllm:prefix_cache_hits_total{{engine="0"}} {self.server.hits}\n'
                f'vllm:num_requests_running{{engine="0"}} {running}\n'
            )
            self.send(200, "text/plain", text.encode())
        else:
            self.reply(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "die" in self.server.faults and next(self.server.requests) > 3:
            os._exit(3)
        if "hang" in self.server.faults and next(self.server.requests) > 3:
            time.sleep(600)
        if "hang_loaded" in self.server.faults and body.get("ignore_eos") and "stream_options" in body:
            time.sleep(600)
        if "die_loaded" in self.server.faults and body.get("ignore_eos") and "stream_options" in body:
            os._exit(3)
        with self.server.lock:
            self.server.running += 1
        try:
            if "in_a_crowd" in self.server.faults:
                time.sleep(0.05)
            self.chat(body) if self.path.endswith("chat/completions") else self.complete(body)
        except (BrokenPipeError, ConnectionResetError):
            self.server.aborted = True
            self.close_connection = True
        finally:
            with self.server.lock:
                self.server.running -= 1

    def chat(self, body: dict[str, Any]) -> None:
        refusal = {
            "no_template": (400, "you must provide a chat template"),
            "template_raises": (400, "roles must alternate"),
            "chat_500": (500, "chat template"),
        }
        for fault in refusal.keys() & self.server.faults:
            status, message = refusal[fault]
            self.reply(status, {"error": {"message": message}})
            return
        content = "" if "chat_empty" in self.server.faults else "Paris."
        message = {"role": "assistant", "content": content}
        reason = "error" if "bad_reason" in self.server.faults else "stop"
        self.reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}]})

    def complete(self, body: dict[str, Any]) -> None:
        faults, prompt = self.server.faults, body["prompt"]
        prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
        length = max(len(item) if isinstance(item, list) else len(item.split()) for item in prompts)
        count = body["max_tokens"]
        if length + count > self.server.max_model_len and "long_taken" not in faults:
            message = "" if "no_message" in faults else "the prompt is too long"
            self.reply(500 if "long_500" in faults else 400, {"error": {"message": message}})
            return
        if length > 1000 and "longest_fails" in faults:
            self.reply(500, {"error": {"message": "out of memory"}})
            return
        refusal = {
            "seed_400": (400, "the device would ignore seed"),
            "seed_unnamed": (400, "no"),
            "seed_500": (500, ""),
        }
        for fault in refusal.keys() & faults:
            if "seed" in body and body.get("temperature", 0) > 0:
                status, message = refusal[fault]
                self.reply(status, {"error": {"message": message}})
                return
        choices = [self.choice(index, item, body, count) for index, item in enumerate(prompts)]
        if "numbering" in faults:
            choices = [choice | {"index": 0} for choice in choices]
        if body.get("stream"):
            self.stream(choices[0], body)
            return
        used = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        usage = {"completion_tokens": 99 if "overrun" in faults else used}
        if "drops_one" in faults and len(choices) > 1:
            choices = choices[:-1]
        if not body.get("logprobs") or "no_logprobs" in faults:
            choices = [choice | {"logprobs": None} for choice in choices]
        self.reply(200, {"choices": choices, "usage": usage})

    def choice(self, index: int, prompt: Any, body: dict[str, Any], count: int) -> dict[str, Any]:
        faults = self.server.faults
        count += "two_tokens" in faults and count == 1
        tokens = self.server.tokens(prompt, body, count)
        key = json.dumps(prompt)
        if self.server.caching and "no_hits" not in faults and isinstance(prompt, list):
            with self.server.lock:
                self.server.hits += len(prompt) // BLOCK * BLOCK if key in self.server.seen else 0
        self.server.seen.add(key)
        text, reason = "".join(tokens), "error" if "bad_reason" in faults else "length"
        for stop in body.get("stop") or []:
            if stop in text and "ignore_stop" not in faults:
                text = text[: text.index(stop)]
                reason = "length" if "stop_reason" in faults else "stop"
        if body.get("echo"):
            shown = prompt.encode("ascii", "replace").decode() if "ascii" in faults else prompt
            text = shown + text
        value = 0.5 if "positive" in faults else -1.0 if "not_greedy" in faults else -0.5
        other = -0.1 if "sum" in faults else -0.9 if "not_greedy" in faults else -2.0
        top = [{token: value, " other": other} for token in tokens]
        given = {"tokens": tokens, "token_logprobs": [value] * len(tokens), "top_logprobs": top}
        if "lengths" in faults:
            given["top_logprobs"] = top[:-1]
        if "empty" in faults or ("empty_sampled" in faults and body.get("temperature", 0) > 0):
            text = ""
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": given}

    def stream(self, choice: dict[str, Any], body: dict[str, Any]) -> None:
        faults = self.server.faults
        kind = "application/json" if "stream_type" in faults else "text/event-stream; charset=utf-8"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        tokens = choice["logprobs"]["tokens"]
        if "stream_short" in faults:
            tokens = tokens[:-1]
        if "stream_ends" in faults and body.get("ignore_eos"):
            tokens = tokens[:1]
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1 and "no_reason" not in faults
            given = {"tokens": [token], "token_logprobs": [-0.5]} if body.get("logprobs") else None
            reason = ("stop" if "stream_reason" in faults else "length") if last else None
            text = token.upper() if "stream_text" in faults else token
            event = {"text": text, "finish_reason": reason, "logprobs": given}
            self.event(json.dumps({"choices": [{"index": 0, **event}]}))
            if body.get("ignore_eos"):
                time.sleep(0.0005)
        if "stream_json" in faults:
            self.event("{broken")
        if (body.get("stream_options") or {}).get("include_usage"):
            used = len(tokens) + ("stream_used" in faults)
            self.event(json.dumps({"choices": [], "usage": {"completion_tokens": used}}))
        if "no_done" not in faults:
            self.event("[DONE]")

    def event(self, data: str) -> None:
        end = "\n" if "no_blank" in self.server.faults else "\n\n"
        self.wfile.write(f"data: {data}{end}".encode())
        self.wfile.flush()

    def reply(self, status: int, body: dict[str, Any]) -> None:
        self.send(status, "application/json", json.dumps(body).encode())

    def send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """The program in the place of vLLM's server."""
    arguments = dict(itertools.pairwise(sys.argv[1:]))
    faults = set(os.environ.get("FAKE_FAULTS", "").split())
    caching = "--enable-prefix-caching" in sys.argv
    if caching:
        faults |= set(os.environ.get("FAKE_FAULTS_CACHED", "").split())
    print(os.environ.get("FAKE_LOG", ""), flush=True)
    if "no_start" in faults:
        print("RuntimeError: Checkpoint key(s) not found for parameter 'x': ['y']", file=sys.stderr)
        sys.exit(1)
    if "child" in faults and not os.fork():
        time.sleep(600)  # a worker, which its parent forgets
    length = int(arguments["--max-model-len"])
    Fake(faults, int(arguments["--port"]), arguments["--served-model-name"], caching, length).serve_forever()


if __name__ == "__main__":
    main()
