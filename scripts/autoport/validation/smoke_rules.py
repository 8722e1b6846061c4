"""The smoke test's verdict: rules over what the port's run.py generated."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Status = Literal["pass", "fail", "skip"]

LONGEST_RUN = 8  # equal tokens in a row; a sound model writes less, e.g. in rules of dashes and indents
PERIODS = range(2, 9)  # tokens; lengths of phrases that a loop repeats
PERIOD_REPEATS = 4
FEWEST_TOKENS = 12  # a shorter answer is not judged for repetition
SMALL_VARIETY = 0.2  # share of different tokens under which a text is degenerate
PROBE_LOGPROBS = 20  # most likely tokens that are recorded for the first position


class Check(msgspec.Struct, frozen=True):
    """Result of one rule; `found` says what was seen, or why it was not judged."""

    name: str
    status: Status
    found: str
    seconds: float = 0.0


class Generation(msgspec.Struct):
    """What one prompt gave.

    Attributes:
        top: Log-probability by token id at the first new position; empty when it was not recorded.
    """

    prompt: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    top: dict[int, float] = {}


class Recorded(msgspec.Struct):
    """What the run wrote down, see `autoport.validation.smoke_recorder`.

    Attributes:
        probe_error: Why there are no log-probabilities.
    """

    generations: list[Generation]
    probe_error: str = ""


class Expected(msgspec.Struct, frozen=True):
    """What the run is judged against.

    Attributes:
        random_weights: The text means nothing, so repetition is not judged.
        tp_size: Ranks; each holds an equal part of the vocabulary.
    """

    vocab_size: int
    tp_size: int
    random_weights: bool


def judge(recorded: Recorded, expected: Expected) -> list[Check]:
    """Apply every rule to a run that ended well."""
    rules: tuple[tuple[str, Callable[[Recorded, Expected], Check | str]], ...] = (
        ("text for every prompt", _every_prompt),
        ("no repetition", _repetition),
        ("vocabulary", _vocabulary),
        ("different prompts, different texts", _different_texts),
        ("different prompts, different logits", _different_logits),
    )
    checks = []
    for name, rule in rules:
        result = rule(recorded, expected)
        checks.append(Check(name, "pass", result) if isinstance(result, str) else _named(result, name))
    return checks


def _named(check: Check, name: str) -> Check:
    return Check(name, check.status, check.found)


def _fail(found: str) -> Check:
    return Check("", "fail", found)


def _skip(found: str) -> Check:
    return Check("", "skip", found)


def _every_prompt(recorded: Recorded, expected: Expected) -> Check | str:
    if not recorded.generations:
        return _fail("run.py generated nothing")
    empty = [g.prompt for g in recorded.generations if not g.token_ids or not g.text.strip()]
    if empty:
        return _fail(f"no text for {len(empty)} of {len(recorded.generations)} prompts, e.g. {empty[0]!r}")
    tokens = sum(len(g.token_ids) for g in recorded.generations)
    return f"{len(recorded.generations)} prompts, {tokens} tokens"


def _repetition(recorded: Recorded, expected: Expected) -> Check | str:
    if expected.random_weights:
        return _skip("random weights: their text says nothing")
    for generation in recorded.generations:
        reason = degenerate(generation.token_ids)
        if reason:
            return _fail(f"{generation.prompt!r}: {reason}")
    return "no loop of a token or a phrase"


def degenerate(tokens: Sequence[object]) -> str:
    """Why a sequence of tokens is degenerate; empty when it is not, or too short to say."""
    if len(tokens) < FEWEST_TOKENS:
        return ""
    run = longest = 1
    for previous, token in itertools.pairwise(tokens):
        run = run + 1 if token == previous else 1
        longest = max(longest, run)
    if longest > LONGEST_RUN:
        return f"one token {longest} times in a row"
    for period in PERIODS:
        length = period * PERIOD_REPEATS
        for start in range(len(tokens) - length + 1):
            window = tokens[start : start + length]
            if len(set(window)) > 1 and all(window[i] == window[i % period] for i in range(length)):
                return f"{period} tokens repeated {PERIOD_REPEATS} times"
    if len(set(tokens)) < SMALL_VARIETY * len(tokens):
        return f"only {len(set(tokens))} different tokens in {len(tokens)}"
    return ""


def _vocabulary(recorded: Recorded, expected: Expected) -> Check | str:
    ids = [token for g in recorded.generations for token in (*g.token_ids, *g.top)]
    outside = sorted({token for token in ids if not 0 <= token < expected.vocab_size})
    if outside:
        return _fail(f"token {outside[0]} is outside the vocabulary of {expected.vocab_size}")
    if expected.random_weights and ids:
        # With random weights every part of the vocabulary is as likely as the others.
        part = -(-expected.vocab_size // expected.tp_size)
        missing = set(range(expected.tp_size)) - {token // part for token in ids}
        if missing:
            return _fail(f"no token of rank {min(missing)}'s part of the vocabulary: logits of all ranks?")
    return f"{len(set(ids))} different tokens, all below {expected.vocab_size}"


def _different_texts(recorded: Recorded, expected: Expected) -> Check | str:
    texts = [tuple(g.token_ids) for g in recorded.generations]
    if len(texts) < 2:
        return _skip("one prompt")
    if len(set(texts)) == 1:
        return _fail("every prompt gave the same text")
    if len(set(texts)) < len(texts):
        return _fail(f"{len(texts)} prompts gave {len(set(texts))} different texts")
    return f"{len(texts)} different texts"


def _different_logits(recorded: Recorded, expected: Expected) -> Check | str:
    tops = [g.top for g in recorded.generations if g.top]
    if not tops:
        return _skip(f"no log-probabilities: {recorded.probe_error or 'none recorded'}")
    bad = [value for top in tops for value in top.values() if not math.isfinite(value) or value > 1e-4]
    if bad:
        return _fail(f"{bad[0]} is no log-probability")
    same = [
        (i, j) for i, one in enumerate(tops) for j, other in enumerate(tops[:i]) if _equal_tops(one, other)
    ]
    if same:
        return _fail(f"prompts {same[0][1] + 1} and {same[0][0] + 1} have the same log-probabilities")
    return f"{len(tops)} different distributions"


def _equal_tops(one: dict[int, float], other: dict[int, float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[token] - other[token]) < 1e-6 for token in one)
