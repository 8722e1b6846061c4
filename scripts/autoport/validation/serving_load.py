"""Latency and throughput of a server, measured by an asynchronous client.

The names are those of vLLM's own benchmark: time to first token (TTFT), time per output token after the first
(TPOT), end-to-end latency, and output tokens per second of the whole load. Its command needs packages that a
plain installation of vLLM does not bring, so it is not used here.
"""

import asyncio
import json
import statistics
import time

import httpx
import msgspec

from autoport.validation.battery_checks import PROMPTS
from autoport.validation.client import ANSWER_SECONDS, CONNECT_SECONDS, is_local

REQUESTS = 10
TOKENS = 64
LOAD_REQUESTS = 16
LOAD_CONCURRENCY = 8


class Timing(msgspec.Struct, frozen=True):
    """One streamed request, in seconds from when it was sent."""

    first_token: float
    total: float
    tokens: int


class Load(msgspec.Struct, frozen=True):
    """What a number of requests took.

    Attributes:
        place: Where server and client ran.
        total_seconds: Wall time of all requests.
        latency_ms, ttft_ms, tpot_ms: (median, 99th percentile).
        output_tokens_per_second: Of all requests together.
        problem: Why there are no numbers, empty when there are.
    """

    requests: int
    concurrency: int
    tokens: int
    place: str
    total_seconds: float = 0.0
    latency_ms: tuple[float, float] = (0.0, 0.0)
    ttft_ms: tuple[float, float] = (0.0, 0.0)
    tpot_ms: tuple[float, float] = (0.0, 0.0)
    requests_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    problem: str = ""

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) for reports."""
        name = f"{self.requests} requests of {self.tokens} tokens, {self.concurrency} at a time"
        if self.problem:
            return [(name, f"not measured: {self.problem}")]
        return [
            (f"{name}: output tokens/s", f"{self.output_tokens_per_second:.1f}"),
            (f"{name}: latency, median / p99", _milliseconds(self.latency_ms)),
            (f"{name}: time to first token, median / p99", _milliseconds(self.ttft_ms)),
            (f"{name}: time per output token, median / p99", _milliseconds(self.tpot_ms)),
        ]


def _milliseconds(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1f} / {pair[1]:.1f} ms"


def measure(
    base_url: str,
    model: str,
    place: str,
    requests: int = REQUESTS,
    concurrency: int = 1,
    tokens: int = TOKENS,
    answer_seconds: float = ANSWER_SECONDS,
) -> Load:
    """Send `requests` streamed requests of exactly `tokens` new tokens, `concurrency` at a time.

    Raises:
        httpx.TimeoutException: An answer, or its next event, did not come within `answer_seconds`.
    """
    started = time.perf_counter()
    try:
        timings = asyncio.run(_send(base_url, model, requests, concurrency, tokens, answer_seconds))
    except httpx.TimeoutException:
        raise
    except (httpx.HTTPError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        return Load(requests, concurrency, tokens, place, problem=problem)
    total = time.perf_counter() - started
    short = [timing.tokens for timing in timings if timing.tokens != tokens]
    if short:
        problem = f"{len(short)} answers of {short[0]} tokens instead of {tokens}"
        return Load(requests, concurrency, tokens, place, problem=problem)
    return Load(
        requests=requests,
        concurrency=concurrency,
        tokens=tokens,
        place=place,
        total_seconds=round(total, 3),
        latency_ms=_spread([timing.total for timing in timings]),
        ttft_ms=_spread([timing.first_token for timing in timings]),
        tpot_ms=_spread([(t.total - t.first_token) / (t.tokens - 1) for t in timings if t.tokens > 1]),
        requests_per_second=round(requests / total, 3),
        output_tokens_per_second=round(requests * tokens / total, 2),
    )


def _spread(seconds: list[float]) -> tuple[float, float]:
    """(median, 99th percentile) in milliseconds."""
    if len(seconds) < 2:
        return (round(1000 * seconds[0], 2),) * 2 if seconds else (0.0, 0.0)
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return round(1000 * statistics.median(seconds), 2), round(1000 * p99, 2)


async def _send(
    base_url: str, model: str, requests: int, concurrency: int, tokens: int, answer_seconds: float
) -> list[Timing]:
    limit = asyncio.Semaphore(concurrency)
    timeout = httpx.Timeout(answer_seconds, connect=CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=timeout, limits=limits, trust_env=not is_local(base_url)
    ) as client:

        async def one(index: int) -> Timing:
            async with limit:
                # A number in front, so that no request finds another one's prefix in the cache.
                return await _timed(client, model, f"{index}. {PROMPTS[index % len(PROMPTS)]}", tokens)

        return list(await asyncio.gather(*(one(index) for index in range(requests))))


async def _timed(client: httpx.AsyncClient, model: str, prompt: str, tokens: int) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first, last, counted = 0.0, 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "choices" not in event:
                raise ValueError(f"an event is no completion: {data[:200]}")
            last = time.perf_counter() - started
            first = first or last
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
    return Timing(first, last, counted)
