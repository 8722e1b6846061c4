"""The battery against a small server: each check green, and red for each rule that it has."""

import ast
import functools
import sys
from pathlib import Path

import pytest
from autoport.validation import battery_checks
from autoport.validation.battery import BATTERY, ServerGone, compare, run_battery, run_check
from autoport.validation.battery_checks import Failed, Session, difference
from autoport.validation.client import Answer, Client
from autoport.validation.serving_load import measure
from fake_openai import MAX_MODEL_LEN, fake

# (fault of the server, check that must find it, part of what it says)
FAULTS = [
    ("empty", "completion", "empty text"),
    ("bad_reason", "completion", "finish reason 'error'"),
    ("overrun", "completion", "99 tokens used"),
    ("degenerate", "completion", "times in a row"),
    ("drops_one", "batch of four", "3 answers to 4"),
    ("same", "batch of four", "same answer"),
    ("numbering", "batch of four", "numbered"),
    ("degenerate", "batch of four", "same answer"),
    ("stream_type", "streaming", "content type"),
    ("stream_json", "streaming", "not JSON"),
    ("stream_short", "streaming", "token 32 differs"),
    ("stream_text", "streaming", "not streamed"),
    ("stream_reason", "streaming", "finish reason 'stop', not streamed 'length'"),
    ("stream_used", "streaming", "33 tokens, not streamed 32"),
    ("no_done", "streaming", "no [DONE]"),
    ("no_blank", "streaming", "empty line"),
    ("no_reason", "streaming", "finish reason"),
    ("no_count", "counting", "go on with 10"),
    ("random empty", "counting", "empty text"),
    ("chat_empty", "chat", "empty message"),
    ("bad_reason", "chat", "finish reason 'error'"),
    ("chat_500", "chat", "HTTP 500: chat template"),
    ("ignore_stop", "stop string", "expected"),
    ("stop_reason", "stop string", "finish reason 'length', expected 'stop'"),
    ("two_tokens", "max_tokens 1", "2 tokens"),
    ("bad_reason", "max_tokens 1", "finish reason 'error'"),
    ("short_differs", "max_tokens 1", "the longer answer starts with"),
    ("short_differs no_logprobs", "max_tokens 1", "the longer answer starts with"),
    ("no_logprobs", "logprobs", "none given"),
    ("lengths", "logprobs", "differ in length"),
    ("positive", "logprobs", "no log-probability"),
    ("not_greedy", "logprobs", "not the most likely"),
    ("sum", "logprobs", "sum to"),
    ("ignore_seed", "two seeds", "same seed gave two"),
    ("one_text", "two seeds", "same text"),
    ("no_seeds empty_sampled", "two seeds", "empty text"),
    ("no_seeds seed_500", "two seeds", "500 instead of 400"),
    ("no_seeds seed_unnamed", "two seeds", "does not name it"),
    ("no_seeds seed_greedy", "two seeds", "a seed of a greedy answer"),
    ("stream_ends", "aborted stream", "fewer than two events"),
    ("runs_on", "aborted stream", "still run"),
    ("after_abort", "aborted stream", "after the abort and before differ"),
    ("longest_fails", "longest prompt", "HTTP 500"),
    ("bad_reason", "longest prompt", "finish reason 'error'"),
    ("long_500", "prompt too long", "500 instead of 400"),
    ("long_taken", "prompt too long", "were taken"),
    ("no_message", "prompt too long", "without a message"),
    ("unhealthy", "prompt too long", "not healthy"),
    ("ascii", "unicode", "came back as"),
    ("stream_text", "unicode", "streamed text differs"),
    ("no_done", "unicode", "no [DONE]"),
    ("no_hits", "repeated prompt", "did not rise"),
    ("cache_differs", "repeated prompt", "the second time"),
]


def session(server, **changes):
    options = {
        "client": Client(server.url, server.model),
        "max_model_len": MAX_MODEL_LEN,
        "random_weights": False,
        "seeds": True,
        "prefix_caching": True,
        "tie": 0.0,
        "answers": {},
    }
    return Session(**(options | changes))


def test_a_sound_server_passes_every_check():
    with fake() as server:
        results = run_battery(session(server), lambda: True)
    assert {check.name: (check.status, check.found) for check in results if check.status != "pass"} == {}
    assert [check.name for check in results] == list(BATTERY)


class Noted(Failed):
    """A failure that keeps the line of the rule."""

    def __init__(self, message):
        self.line = sys._getframe(1).f_lineno
        LINES.add(self.line)
        super().__init__(message)


LINES: set[int] = set()


@functools.cache
def judged(fault, name):
    """What a check says about a fault, and the line of the rule that was broken."""
    words = set(fault.split())
    options = {"random_weights": "random" in words, "seeds": "no_seeds" not in words}
    with pytest.MonkeyPatch.context() as patch, fake(*words) as server:
        patch.setattr(battery_checks, "ABORT_SECONDS", 0.3)
        patch.setattr(battery_checks, "Failed", Noted)
        return run_check(name, BATTERY[name], session(server, **options))


@pytest.mark.parametrize(("fault", "name", "found"), FAULTS)
def test_a_fault_is_found(fault, name, found):
    check = judged(fault, name)
    assert (check.status, found in check.found) == ("fail", True), check


def test_every_rule_has_a_fault_that_breaks_it():
    for fault, name, _ in FAULTS:
        judged(fault, name)
    tree = ast.parse(Path(battery_checks.__file__).read_text())
    rules = {
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise) and "Failed" in ast.dump(node)
    }
    assert rules - LINES == set()


def test_answers_that_change_in_a_crowd_are_found():
    with fake("in_a_crowd") as server:
        tested = session(server)
        assert run_check("batch", BATTERY["batch of four"], tested).status == "pass"
        check = run_check("16", BATTERY["16 concurrent requests"], tested)
    assert (check.status, "differ" in check.found) == ("fail", True), check


def test_what_does_not_apply_is_skipped_with_a_reason():
    with fake("no_template") as server:
        tested = session(server, seeds=False, max_model_len=None)
        checks = {name: run_check(name, BATTERY[name], tested) for name in BATTERY}
    assert "one is taken and not heeded" in checks["two seeds"].found
    skipped = {name for name, check in checks.items() if check.status == "skip"}
    assert skipped == {"chat", "two seeds", "longest prompt", "prompt too long", "repeated prompt"}
    assert all(checks[name].found for name in skipped)


def test_a_chat_template_may_refuse_what_it_is_asked():
    with fake("template_raises") as server:
        check = run_check("chat", BATTERY["chat"], session(server))
    assert (check.status, "roles must alternate" in check.found) == ("skip", True), check


def test_a_seed_that_the_device_cannot_heed_is_refused():
    with fake("seed_400") as server:
        check = run_check("two seeds", BATTERY["two seeds"], session(server, seeds=False))
    assert check.status == "skip"
    assert "one is refused by a clean HTTP 400" in check.found


def test_random_weights_are_not_judged_by_their_text():
    with fake("no_count", "degenerate") as server:
        tested = session(server, random_weights=True)
        assert run_check("completion", BATTERY["completion"], tested).status == "pass"
        assert run_check("counting", BATTERY["counting"], tested).status == "pass"


def test_a_server_that_is_gone_ends_the_battery_at_once():
    with fake() as server:
        tested = session(server)
    with pytest.raises(ServerGone, match="'completion'") as gone:
        run_battery(tested, lambda: False)
    assert [check.status for check in gone.value.results] == ["fail"]


# --- Comparing answers ------------------------------------------------------------------------------------


def answer(tokens, other=" z", gap=1.0):
    top = tuple({token: -0.5, other: -0.5 - gap} for token in tokens)
    return Answer("".join(tokens), "length", tuple(tokens), (-0.5,) * len(tokens), top)


@pytest.mark.parametrize(
    ("found", "tie", "expected"),
    [
        (answer([" a", " b"]), 0.1, ""),
        (answer([" a", " z"]), 0.1, "token 2 is ' z', expected ' b'"),
        (answer([" a", " z"]), 1.5, ""),
        (answer([" a", " y"]), 1.5, "token 2 is ' y', expected ' b'"),
        (answer([" a"]), 1.5, "token 2 is '(end)', expected ' b'"),
        (Answer(" a b", "length"), 0.1, ""),
        (Answer(" a c", "length"), 0.1, "' a c', expected ' a b'"),
    ],
)
def test_answers_differ_unless_two_tokens_were_as_good_as_equal(found, tie, expected):
    assert difference(answer([" a", " b"]), found, tie) == expected


def test_answers_of_two_servers():
    plain = {"one": answer([" a"]), "two": answer([" b"])}
    same = compare(plain, dict(plain), 0.0).check
    assert (same.status, same.found) == ("pass", "2 answers equal")
    tied = compare(plain, plain | {"two": answer([" z"])}, 2.0).check
    assert (tied.status, "near tie decided otherwise in: two" in tied.found) == ("pass", True)
    for cached in ({"one": plain["one"]}, plain | {"two": answer([" z"])}):
        assert compare(plain, cached, 0.0).check.status == "fail"
    assert compare({}, {}, 0.0).check.status == "fail"


# --- Load -------------------------------------------------------------------------------------------------


def test_load_says_where_it_was_measured():
    with fake() as server:
        load = measure(server.url, server.model, "a laptop", requests=6, concurrency=3, tokens=16)
    assert (load.problem, load.requests, load.place) == ("", 6, "a laptop")
    assert load.output_tokens_per_second == pytest.approx(6 * 16 / load.total_seconds, rel=0.05)
    assert 0 < load.ttft_ms[0] < load.latency_ms[0] <= load.latency_ms[1]
    assert len(load.rows()) == 4


@pytest.mark.parametrize("fault", ["stream_short", "stream_json"])
def test_load_of_other_requests_has_no_numbers(fault):
    with fake(fault) as server:
        load = measure(server.url, server.model, "a laptop", requests=2, tokens=16)
    assert load.problem
    assert "not measured" in load.rows()[0][1]


def test_load_on_a_dead_server_has_no_numbers():
    with fake() as server:
        pass
    assert measure(server.url, "fake", "a laptop", requests=1).problem
