"""The smoke test's rules, each green and red."""

import pytest
from autoport.validation.smoke_rules import Expected, Generation, Recorded, degenerate, judge

TEXT = list(range(100, 132))
REAL = Expected(vocab_size=1000, tp_size=2, random_weights=False)
RANDOM = Expected(vocab_size=1000, tp_size=2, random_weights=True)


def generation(start=0, tokens=None, text=" some text", top=None):
    ids = [start + token for token in TEXT] if tokens is None else tokens
    top = {start + 1: -0.5, 900 - start: -1.5} if top is None else top
    return Generation(f"prompt {start}", [1, 2], text, ids, "length", top)


def verdicts(*generations, expected=REAL, probe_error=""):
    checks = judge(Recorded(list(generations), probe_error), expected)
    return {check.name: check for check in checks if check.status != "pass"}


def test_sound_text_passes_every_rule():
    assert verdicts(generation(0), generation(1), generation(2)) == {}


@pytest.mark.parametrize(
    ("generations", "rule", "found"),
    [
        ([], "text for every prompt", "nothing"),
        ([generation(), generation(1, text=" ")], "text for every prompt", "1 of 2"),
        ([generation(), generation(1, tokens=[])], "text for every prompt", "1 of 2"),
        ([generation(), generation(1, tokens=[7] * 20)], "no repetition", "20 times"),
        ([generation(), generation(1, tokens=[*TEXT, 1000])], "vocabulary", "1000 is outside"),
        ([generation(), generation(1, top={-1: -0.5})], "vocabulary", "-1 is outside"),
        ([generation(0, top={1: -1.0}), generation(0)], "different prompts, different texts", "same text"),
        (
            [generation(0), generation(1), generation(0, top={3: -1.0})],
            "different prompts, different texts",
            "3 prompts gave 2",
        ),
        (
            [generation(0, top={1: -1.0}), generation(1, top={1: -1.0})],
            "different prompts, different logits",
            "prompts 1 and 2",
        ),
        ([generation(0, top={1: float("nan")})], "different prompts, different logits", "no log-prob"),
        ([generation(0, top={1: 0.7})], "different prompts, different logits", "no log-prob"),
    ],
)
def test_each_rule_is_red_for_its_fault(generations, rule, found):
    check = verdicts(*generations)[rule]
    assert (check.status, found in check.found) == ("fail", True), check


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([5] * 9 + TEXT, "one token 9 times"),
        ([5] * 8 + TEXT, ""),
        (TEXT + [1, 2, 3] * 4, "3 tokens repeated 4 times"),
        (TEXT + [1, 2, 3] * 3, ""),
        ([1, 2] * 4, ""),  # too short to say
        (list("abcabcabcabcd"), "3 tokens repeated"),
        ([token for token in range(9) for _ in range(8)], "only 9 different tokens in 72"),
    ],
)
def test_degenerate(tokens, found):
    reason = degenerate(tokens)
    assert bool(reason) == bool(found)
    assert found in reason


def test_random_weights_repeat_what_they_like_but_use_every_rank():
    one, other = generation(0, tokens=[7] * 20), generation(1, tokens=[600] * 20)
    assert verdicts(one, other, expected=RANDOM).keys() == {"no repetition"}
    half = [generation(0, top={}), generation(1, top={})]  # nothing at or above 500
    assert verdicts(*half, expected=RANDOM)["vocabulary"].status == "fail"
    assert "vocabulary" not in verdicts(*half, expected=REAL)


def test_without_log_probabilities_the_reason_is_given():
    check = verdicts(generation(0, top={}), generation(1, top={}), probe_error="off")
    assert check["different prompts, different logits"].found.endswith("off")
