"""The checks of Step 9's battery. Each returns what it saw, or raises `Failed` or `Skipped`."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from autoport.validation.client import Answer, BadReply, Client
from autoport.validation.smoke_rules import degenerate

FRANCE = "The capital of France is"
PROMPTS = (FRANCE, "Once upon a time, there was a", "def fibonacci(n):", "The three primary colours are")
COUNTING = "Count: 1 2 3 4 5 6 7 8 9"
UNICODE = "naïve café — 数学, עברית, 😀👍🏽, Ω≈ç√"
NEW_TOKENS = 32
TOP = 5
CONCURRENT = 16
ABORTED_TOKENS = 400
ABORT_SECONDS = 20.0  # for an aborted request to leave the engine
REPEATED_TOKENS = 600  # more than the smallest segment of a prefill, and many cache blocks
HITS, RUNNING = "vllm:prefix_cache_hits_total", "vllm:num_requests_running"


class Failed(Exception):
    """The rule of a check is broken; the message says how."""


class Skipped(Exception):
    """The check does not apply; the message says why."""


class Session(msgspec.Struct):
    """A server under test.

    Attributes:
        max_model_len: Tokens of prompt and answer; None when it is not known.
        random_weights: Texts mean nothing, so they are not judged.
        seeds: Whether the server takes seeds; sampling on the device does not.
        prefix_caching: Whether it was started with prefix caching; None when that is not known.
        tie: Nats; tokens nearer than this in log-probability are as good as equal, see `difference`.
        answers: Greedy answers by name, to compare with those of another server.
    """

    client: Client
    max_model_len: int | None
    random_weights: bool
    seeds: bool
    prefix_caching: bool | None
    tie: float
    answers: dict[str, Answer] = {}


def completion(session: Session) -> str:
    answer = _greedy(session, "completion", FRANCE)
    if not answer.text.strip():
        raise Failed("an empty text")
    if answer.finish_reason not in ("stop", "length"):
        raise Failed(f"finish reason {answer.finish_reason!r}")
    used = answer.completion_tokens
    if used is not None and not 0 < used <= NEW_TOKENS:
        raise Failed(f"{used} tokens used, asked for {NEW_TOKENS}")
    _sound(session, answer)
    return repr(answer.text[:60])


def batch_of_four(session: Session) -> str:
    answers = session.client.complete(list(PROMPTS), max_tokens=NEW_TOKENS, logprobs=TOP)
    if len(answers) != len(PROMPTS):
        raise Failed(f"{len(answers)} answers to {len(PROMPTS)} prompts")
    for index, answer in enumerate(answers):
        session.answers[f"batch {index + 1}"] = answer
    if len({answer.text for answer in answers}) < len(answers):
        raise Failed("different prompts have the same answer")
    alone = _alone(session)
    _same(session, alone, answers[0], "in a batch and alone")
    for answer in answers:
        _sound(session, answer)
    return "four different answers, the first as alone"


def streaming(session: Session) -> str:
    options: dict[str, Any] = {
        "max_tokens": NEW_TOKENS,
        "logprobs": TOP,
        "stream_options": {"include_usage": True},
    }
    streamed = session.client.stream(FRANCE, **options)
    if streamed.problem:
        raise Failed(f"malformed events: {streamed.problem}")
    plain, found = _alone(session), streamed.answer
    if found.tokens and plain.tokens and found.tokens != plain.tokens:
        at = _first_difference(found.tokens, plain.tokens)
        raise Failed(f"token {at + 1} differs from the answer that was not streamed")
    if found.text != plain.text:
        raise Failed(f"text {found.text[:60]!r}, not streamed {plain.text[:60]!r}")
    if found.finish_reason != plain.finish_reason:
        raise Failed(f"finish reason {found.finish_reason!r}, not streamed {plain.finish_reason!r}")
    if None not in (found.completion_tokens, plain.completion_tokens) and (
        found.completion_tokens != plain.completion_tokens
    ):
        raise Failed(f"{found.completion_tokens} tokens, not streamed {plain.completion_tokens}")
    return f"{streamed.events} events, the same tokens"


def counting(session: Session) -> str:
    answer = _greedy(session, "counting", COUNTING)
    if session.random_weights:
        if not answer.text:
            raise Failed("an empty text")
        return "answered; random weights do not count"
    if not answer.text.strip().startswith("10"):
        raise Failed(f"does not go on with 10: {answer.text[:60]!r}")
    return repr(answer.text[:40])


def chat(session: Session) -> str:
    try:
        answer = session.client.chat(
            [{"role": "user", "content": "What is the capital of France?"}], max_tokens=16
        )
    except BadReply as error:
        if error.status == 404 or (error.status == 400 and "provide a chat template" in str(error)):
            raise Skipped("the model has no chat template") from error
        if error.status == 400:
            raise Skipped(f"the model's chat template refuses a single message of a user: {error}") from error
        raise
    if not answer.text.strip():
        raise Failed("an empty message")
    if answer.finish_reason not in ("stop", "length"):
        raise Failed(f"finish reason {answer.finish_reason!r}")
    session.answers["chat"] = answer
    return repr(answer.text[:60])


def stop_string(session: Session) -> str:
    whole = _alone(session).text
    stop = _stop_in(whole)
    if not stop:
        raise Skipped("the answer has no text to stop at")
    [answer] = session.client.complete(FRANCE, max_tokens=NEW_TOKENS, stop=[stop])
    expected = whole[: whole.index(stop)]
    if answer.text != expected:
        raise Failed(f"stop at {stop!r} gave {answer.text[-40:]!r}, expected {expected[-40:]!r}")
    if answer.finish_reason != "stop":
        raise Failed(f"finish reason {answer.finish_reason!r}, expected 'stop'")
    return f"ends before {stop!r}"


def one_token(session: Session) -> str:
    [answer] = session.client.complete(FRANCE, max_tokens=1, logprobs=TOP)
    if answer.completion_tokens not in (None, 1) or len(answer.tokens) > 1:
        raise Failed(f"{answer.completion_tokens or len(answer.tokens)} tokens")
    if answer.finish_reason not in ("length", "stop"):
        raise Failed(f"finish reason {answer.finish_reason!r}")
    whole = _alone(session)
    if answer.tokens and whole.tokens:
        if answer.tokens[0] != whole.tokens[0]:
            raise Failed(f"{answer.tokens[0]!r}, the longer answer starts with {whole.tokens[0]!r}")
    elif not whole.text.startswith(answer.text):
        raise Failed(f"{answer.text!r}, the longer answer starts with {whole.text[:20]!r}")
    return f"one token, finish reason {answer.finish_reason}"


def logprobs(session: Session) -> str:
    answer = _alone(session)
    if not answer.tokens:
        raise Failed("asked for, and none given")
    if not len(answer.tokens) == len(answer.logprobs) == len(answer.top):
        raise Failed("tokens, log-probabilities and top lists differ in length")
    for index, (token, value, top) in enumerate(
        zip(answer.tokens, answer.logprobs, answer.top, strict=True), start=1
    ):
        if not math.isfinite(value) or value > 1e-4:
            raise Failed(f"{value} at token {index} is no log-probability")
        total = sum(math.exp(logprob) for logprob in top.values())
        if total > 1.001:
            raise Failed(f"the probabilities at token {index} sum to {total:.3f}")
        if value < max(top.values(), default=value) - 1e-6:
            raise Failed(f"token {index}, {token!r}, was sampled greedily and is not the most likely one")
    return f"{len(answer.tokens)} tokens, each the most likely of {TOP}"


def _answer_to_a_seed(session: Session) -> str:
    """What the server does with a seed that sampling on the device cannot heed."""
    try:
        session.client.complete(FRANCE, temperature=1.0, seed=1, max_tokens=1)
    except BadReply as error:
        if error.status != 400:
            raise Failed(f"HTTP {error.status} instead of 400 for a seed: {error}") from error
        if "seed" not in str(error):
            raise Failed(f"HTTP 400 for a seed that does not name it: {error}") from error
        return "one is refused by a clean HTTP 400"
    return "one is taken and not heeded"


def two_seeds(session: Session) -> str:
    if not session.seeds:
        params: dict[str, Any] = {"temperature": 1.0, "max_tokens": NEW_TOKENS}
        [answer] = session.client.complete(FRANCE, **params)
        if not answer.text:
            raise Failed("sampling gave an empty text")
        [greedy] = session.client.complete(FRANCE, seed=1, max_tokens=NEW_TOKENS, logprobs=TOP)
        _same(session, _alone(session), greedy, "a seed of a greedy answer")
        raise Skipped(
            f"sampling on the device has no seeds: {_answer_to_a_seed(session)}, and without effect on a greedy "
            "answer (--host-sampling compares two)"
        )
    first, again, other = (
        session.client.complete(FRANCE, temperature=1.0, seed=seed, max_tokens=NEW_TOKENS)[0].text
        for seed in (1, 1, 2)
    )
    if first != again:
        raise Failed("the same seed gave two texts")
    if first == other:
        raise Failed("two seeds gave the same text")
    return "the same seed repeats, another one differs"


def concurrent_requests(session: Session) -> str:
    if not all(f"batch {index + 1}" in session.answers for index in range(len(PROMPTS))):
        raise Skipped("there is no batch to compare with")

    def ask(index: int) -> Answer:
        prompt = PROMPTS[index % len(PROMPTS)]
        [answer] = session.client.complete(prompt, max_tokens=NEW_TOKENS, logprobs=TOP)
        return answer

    with ThreadPoolExecutor(CONCURRENT) as pool:
        answers = list(pool.map(ask, range(CONCURRENT)))
    for index, answer in enumerate(answers):
        expected = session.answers[f"batch {index % len(PROMPTS) + 1}"]
        _same(session, expected, answer, f"request {index + 1} of {CONCURRENT} and the batch")
    return f"{CONCURRENT} answers, as in the batch"


def aborted_stream(session: Session) -> str:
    before = _alone(session)
    length = min(ABORTED_TOKENS, (session.max_model_len or 2 * ABORTED_TOKENS) // 2)
    params: dict[str, Any] = {"max_tokens": length, "ignore_eos": True}
    with session.client.open_stream(FRANCE, **params) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data:"))
        seen = [next(lines, "") for _ in range(2)]
    if "" in seen or "[DONE]" in seen[1]:
        raise Failed("the stream ended after fewer than two events")
    deadline = time.monotonic() + ABORT_SECONDS
    running = session.client.metric(RUNNING)
    while running and time.monotonic() < deadline:
        time.sleep(0.2)
        running = session.client.metric(RUNNING)
    if running:
        raise Failed(f"{running:.0f} requests still run {ABORT_SECONDS:.0f} s after the client left")
    [answer] = session.client.complete(FRANCE, max_tokens=NEW_TOKENS, logprobs=TOP)
    _same(session, before, answer, "after the abort and before")
    counted = "left the engine; " if running is not None else ""
    return f"{counted}the next answer is as before"


def longest_prompt(session: Session) -> str:
    longest = _longest(session)
    [answer] = session.client.complete(_ids(longest - 1), max_tokens=1, logprobs=TOP)
    if answer.finish_reason not in ("length", "stop"):
        raise Failed(f"finish reason {answer.finish_reason!r}")
    session.answers["longest prompt"] = answer
    return f"{longest - 1} tokens and one new one"


def too_long(session: Session) -> str:
    longest = _longest(session)
    try:
        session.client.complete(_ids(longest + 1), max_tokens=1)
    except BadReply as error:
        if error.status != 400:
            raise Failed(f"HTTP {error.status} instead of 400: {error}") from error
        if str(error).endswith("(no message)"):
            raise Failed("HTTP 400 without a message") from error
    else:
        raise Failed(f"{longest + 1} tokens were taken, {longest} is the limit")
    if not session.client.healthy():
        raise Failed("the server is not healthy after it")
    return "a clean HTTP 400"


def unicode_text(session: Session) -> str:
    [echoed] = session.client.complete(UNICODE, max_tokens=1, echo=True)
    if not echoed.text.startswith(UNICODE):
        raise Failed(f"the prompt came back as {echoed.text[:40]!r}")
    answer = _greedy(session, "unicode", UNICODE)
    answer.text.encode()  # half a surrogate pair would not encode
    streamed = session.client.stream(UNICODE, max_tokens=NEW_TOKENS)
    if streamed.problem or streamed.answer.text != answer.text:
        raise Failed(streamed.problem or "the streamed text differs")
    return "came back unchanged; streamed as plain"


def repeated_prompt(session: Session) -> str:
    """A long prompt twice; with prefix caching the second one has to hit the cache."""
    length = min(REPEATED_TOKENS, _longest(session) - NEW_TOKENS)
    ids = _ids(length, start=7)
    before = session.client.metric(HITS)
    answers = []
    for name in ("long prompt", "long prompt again"):
        [answer] = session.client.complete(ids, max_tokens=NEW_TOKENS, logprobs=TOP)
        session.answers[name] = answer
        answers.append(answer)
    _same(session, answers[0], answers[1], "the second time and the first")
    hits = (session.client.metric(HITS) or 0) - (before or 0)
    if session.prefix_caching and not hits > 0:
        raise Failed(f"{HITS} did not rise when {length} tokens were repeated")
    cached = f"{hits:.0f} tokens from the cache" if hits else "nothing cached"
    return f"{length} tokens twice, the same answer, {cached}"


# --- Shared -----------------------------------------------------------------------------------------------


def _greedy(session: Session, name: str, prompt: str) -> Answer:
    [answer] = session.client.complete(prompt, max_tokens=NEW_TOKENS, logprobs=TOP)
    session.answers[name] = answer
    return answer


def _alone(session: Session) -> Answer:
    """The answer of the first check."""
    if "completion" not in session.answers:
        _greedy(session, "completion", FRANCE)
    return session.answers["completion"]


def _sound(session: Session, answer: Answer) -> None:
    if session.random_weights:
        return
    reason = degenerate(answer.tokens or answer.text.split())
    if reason:
        raise Failed(f"degenerate text: {reason}: {answer.text[:60]!r}")


def _same(session: Session, expected: Answer, found: Answer, what: str) -> None:
    reason = difference(expected, found, session.tie)
    if reason:
        raise Failed(f"{what} differ: {reason}")


def difference(expected: Answer, found: Answer, tie: float) -> str:
    """How two greedy answers differ; empty when they are equal, or differ only after a near tie.

    Rounding depends on the batch and on how a prompt is split. Where two tokens were nearer than `tie` in the
    expected answer, the other one may be taken; what follows then cannot be compared.
    """
    if expected.tokens and found.tokens:
        at = _first_difference(expected.tokens, found.tokens)
        if at < 0:
            return "" if expected.text == found.text else "equal tokens and different texts"
        if at < min(len(expected.tokens), len(found.tokens)) and at < len(expected.top):
            top = expected.top[at]
            other = top.get(found.tokens[at])
            if other is not None and abs(expected.logprobs[at] - other) <= tie:
                return ""
        one, two = (answer.tokens[at : at + 1] or ("(end)",) for answer in (expected, found))
        return f"token {at + 1} is {two[0]!r}, expected {one[0]!r}"
    if expected.text != found.text:
        return f"{found.text[:40]!r}, expected {expected.text[:40]!r}"
    return ""


def _first_difference(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Index of the first place where they differ, -1 when there is none."""
    shared = zip(one, other, strict=False)
    at = next((index for index, (a, b) in enumerate(shared) if a != b), min(len(one), len(other)))
    return -1 if at == len(one) == len(other) else at


def _stop_in(text: str) -> str:
    """Three plain characters from the middle of the text, which do not begin it."""
    for start in range(len(text) // 3, len(text) - 2):
        stop = text[start : start + 3]
        if stop.isascii() and stop.isprintable() and stop.strip() and text.index(stop) > 0:
            return stop
    return ""


def _longest(session: Session) -> int:
    if session.max_model_len is None:
        raise Skipped("the server does not say how long a prompt may be")
    return session.max_model_len


def _ids(length: int, start: int = 0) -> list[int]:
    """Token ids that any vocabulary has; none of them special in the usual ones."""
    return [40 + (start + 7 * index + index // 13) % 150 for index in range(length)]
