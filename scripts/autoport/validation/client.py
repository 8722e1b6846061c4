"""A client of an OpenAI-compatible server that reports exactly what the server sent."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec

ANSWER_SECONDS = 300.0  # unless the user says otherwise; a simulator is slow
CONNECT_SECONDS = 10.0


class BadReply(Exception):
    """The server answered with an error, or with what is no answer.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


class Answer(msgspec.Struct, frozen=True):
    """One completion.

    Attributes:
        tokens: Text of each token, where log-probabilities were asked for and given.
        logprobs: Of each token.
        top: For each position, log-probability by token text.
        completion_tokens: As the server counts them; None when it does not say.
    """

    text: str
    finish_reason: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[dict[str, float], ...] = ()
    completion_tokens: int | None = None


class Streamed(msgspec.Struct, frozen=True):
    """A streamed completion. `problem` says what about the event stream is malformed, empty when nothing is."""

    answer: Answer
    events: int
    problem: str = ""


class Client:
    """Talks to one server about one model.

    Attributes:
        model: Name that the server has for it.
        answer_seconds: Longest wait for an answer, or for the next event of a stream.
    """

    def __init__(
        self,
        base_url: str,
        model: str = "",
        answer_seconds: float = ANSWER_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ):
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.answer_seconds = answer_seconds
        timeout = httpx.Timeout(answer_seconds, connect=CONNECT_SECONDS)
        # Proxies of the environment are not for a server on this machine.
        self.http = httpx.Client(
            base_url=self.base_url, timeout=timeout, transport=transport, trust_env=not is_local(base_url)
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()

    def healthy(self) -> bool:
        """Whether ``/health`` answers with 200 (a server without it is asked for its models)."""
        try:
            response = self.http.get("/health", timeout=CONNECT_SECONDS)
            if response.status_code == 404:
                response = self.http.get("/v1/models", timeout=CONNECT_SECONDS)
        except httpx.TransportError:
            return False
        return response.status_code == 200

    def models(self) -> list[dict[str, Any]]:
        """Entries of ``/v1/models``.

        Raises:
            BadReply: An error, or no list of models.
        """
        body = _json(self.http.get("/v1/models"))
        data = body.get("data")
        if not isinstance(data, list) or not all(isinstance(item, dict) and "id" in item for item in data):
            raise BadReply(200, "/v1/models has no list of models")
        return data

    def complete(self, prompt: str | Sequence[int] | Sequence[str], **params: Any) -> list[Answer]:
        """Answers to a prompt (text or token ids) or to several, in the prompts' order.

        Raises:
            BadReply: An error, or a reply that is no completion.
        """
        body = _json(self.http.post("/v1/completions", json=self._body(prompt, params)))
        return read_completion(body)

    def chat(self, messages: list[dict[str, str]], **params: Any) -> Answer:
        """Answer to a chat.

        Raises:
            BadReply: An error, or a reply that is no chat completion.
        """
        body = {"model": self.model, "messages": messages, "temperature": 0.0, **params}
        reply = _json(self.http.post("/v1/chat/completions", json=body))
        try:
            [choice] = reply["choices"]
            message = choice["message"]
            if message["role"] != "assistant":
                raise ValueError(f"role {message['role']!r}")
            return Answer(message["content"] or "", choice["finish_reason"] or "")
        except (KeyError, TypeError, ValueError) as error:
            raise BadReply(200, f"no chat completion: {type(error).__name__} {error}") from error

    def stream(self, prompt: str | Sequence[int], **params: Any) -> Streamed:
        """A streamed completion, read to its end.

        Raises:
            BadReply: An error instead of a stream.
        """
        with self.open_stream(prompt, **params) as response:
            content_type = response.headers.get("content-type", "")
            return read_stream(content_type, response.iter_lines())

    @contextlib.contextmanager
    def open_stream(self, prompt: str | Sequence[int], **params: Any) -> Iterator[httpx.Response]:
        """The response of a streamed completion; leaving the block early breaks the connection."""
        body = {**self._body(prompt, params), "stream": True}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                _json(response)
            yield response

    def metric(self, name: str) -> float | None:
        """Sum of a metric over its labels, from ``/metrics``; None when there is none of that name."""
        response = self.http.get("/metrics")
        if response.status_code != 200:
            return None
        values = [
            float(line.rpartition(" ")[2])
            for line in response.text.splitlines()
            if line.partition("{")[0].partition(" ")[0] == name
        ]
        return sum(values) if values else None

    def _body(self, prompt: str | Sequence[int] | Sequence[str], params: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0.0, **params}


def time_out(error: httpx.TimeoutException, answer_seconds: float) -> str:
    """How long was waited for what."""
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection to the server within {CONNECT_SECONDS:g} s"
    return f"no answer from the server within {answer_seconds:g} s (--timeout)"


def is_local(base_url: str) -> bool:
    return httpx.URL(base_url).host in ("127.0.0.1", "localhost", "::1")


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError as error:
        raise BadReply(response.status_code, f"not JSON: {response.text[:200]!r}") from error
    if response.status_code != 200:
        error_body = body.get("error", body) if isinstance(body, dict) else body
        message = error_body.get("message", "") if isinstance(error_body, dict) else str(error_body)
        raise BadReply(response.status_code, f"HTTP {response.status_code}: {message or '(no message)'}")
    if not isinstance(body, dict):
        raise BadReply(200, "not a JSON object")
    return body


def read_completion(body: dict[str, Any]) -> list[Answer]:
    """The answers of a reply to ``/v1/completions``.

    Raises:
        BadReply: It is no completion, or its choices are not numbered from 0.
    """
    try:
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(len(choices))) or not choices:
            raise ValueError(f"choices are numbered {[choice['index'] for choice in choices]}")
        used = (body.get("usage") or {}).get("completion_tokens") if len(choices) == 1 else None
        return [_answer(choice, used) for choice in choices]
    except (KeyError, TypeError, ValueError) as error:
        raise BadReply(200, f"no completion: {type(error).__name__} {error}") from error


def _answer(choice: dict[str, Any], completion_tokens: int | None) -> Answer:
    logprobs = choice.get("logprobs") or {}
    if not isinstance(choice["text"], str):
        raise TypeError("text is no string")
    return Answer(
        text=choice["text"],
        finish_reason=choice["finish_reason"] or "",
        tokens=tuple(logprobs.get("tokens") or ()),
        logprobs=tuple(logprobs.get("token_logprobs") or ()),
        top=tuple(logprobs.get("top_logprobs") or ()),
        completion_tokens=completion_tokens,
    )


def read_stream(content_type: str, lines: Iterator[str]) -> Streamed:
    """Read server-sent events and check their form.

    Every event is one line ``data: ...`` and an empty line; the last one is ``[DONE]``, all others are JSON
    completions, exactly one of which has a finish reason.
    """
    chunks, problem, done = [], "", False
    if not content_type.startswith("text/event-stream"):
        problem = f"content type {content_type!r}"
    after_event = False
    for line in lines:
        if line == "":
            after_event = False
            continue
        if line.startswith(":"):
            continue  # a comment
        if not line.startswith("data:") or after_event:
            problem = problem or (
                "no empty line between events" if after_event else f"unexpected line {line[:80]!r}"
            )
            continue
        after_event = True
        data = line.removeprefix("data:").strip()
        if done:
            problem = problem or "an event after [DONE]"
        if data == "[DONE]":
            done = True
            continue
        try:
            chunks.append(json.loads(data))
        except ValueError:
            problem = problem or f"an event is not JSON: {data[:80]!r}"
    if not done:
        problem = problem or "no [DONE] at the end"
    return _joined(chunks, problem)


def _joined(chunks: list[Any], problem: str) -> Streamed:
    text: list[str] = []
    tokens: list[str] = []
    logprobs: list[float] = []
    reasons: list[str] = []
    used: int | None = None
    for chunk in chunks:
        if not isinstance(chunk, dict) or "error" in chunk or "choices" not in chunk:
            problem = problem or f"an event is no completion: {str(chunk)[:120]}"
            continue
        used = (chunk.get("usage") or {}).get("completion_tokens", used)
        for choice in chunk["choices"]:
            text.append(choice.get("text") or "")
            given = choice.get("logprobs") or {}
            tokens += given.get("tokens") or ()
            logprobs += given.get("token_logprobs") or ()
            if choice.get("finish_reason"):
                reasons.append(choice["finish_reason"])
    if len(reasons) != 1:
        problem = problem or f"{len(reasons)} events with a finish reason"
    answer = Answer(
        "".join(text),
        reasons[0] if reasons else "",
        tuple(tokens),
        tuple(logprobs),
        completion_tokens=used,
    )
    return Streamed(answer, len(chunks), problem)
