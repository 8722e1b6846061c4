"""Step 9's battery: what users of the server do, each as a check with a rule of its own."""

import time
from collections.abc import Callable

import httpx
import msgspec

from autoport.validation import battery_checks as checks
from autoport.validation.battery_checks import Failed, Session, Skipped
from autoport.validation.client import Answer, BadReply, time_out
from autoport.validation.smoke_rules import Check

BATTERY: dict[str, Callable[[Session], str]] = {
    "completion": checks.completion,
    "batch of four": checks.batch_of_four,
    "streaming": checks.streaming,
    "counting": checks.counting,
    "chat": checks.chat,
    "stop string": checks.stop_string,
    "max_tokens 1": checks.one_token,
    "logprobs": checks.logprobs,
    "two seeds": checks.two_seeds,
    "16 concurrent requests": checks.concurrent_requests,
    "aborted stream": checks.aborted_stream,
    "longest prompt": checks.longest_prompt,
    "prompt too long": checks.too_long,
    "unicode": checks.unicode_text,
    "repeated prompt": checks.repeated_prompt,
}


class ServerGone(Exception):
    """The server died or hangs; the message names the check. `results` are those up to it."""

    def __init__(self, message: str, results: list[Check]):
        self.results = results
        super().__init__(message)


def run_battery(session: Session, is_alive: Callable[[], bool]) -> list[Check]:
    """Run every check.

    Args:
        is_alive: Asked after a check that failed, so that a dead server ends the battery at once.

    Raises:
        ServerGone: The server is not alive any more, or an answer did not come in time.
    """
    results: list[Check] = []
    for name, check in BATTERY.items():
        try:
            result = run_check(name, check, session)
        except ServerGone as gone:
            raise ServerGone(str(gone), [*results, *gone.results]) from gone
        results.append(result)
        if result.status == "fail" and not is_alive():
            raise ServerGone(f"the server died during the check '{name}'", results)
    return results


def run_check(name: str, check: Callable[[Session], str], session: Session) -> Check:
    """Run one check; it passes with what it returns.

    Raises:
        ServerGone: An answer did not come in time: the next one would be waited for as long.
    """
    started = time.monotonic()
    try:
        status, found = "pass", check(session)
    except Skipped as reason:
        status, found = "skip", str(reason)
    except (Failed, BadReply) as reason:
        status, found = "fail", str(reason)
    except httpx.TimeoutException as error:
        found = time_out(error, session.client.answer_seconds)
        result = Check(name, "fail", found, round(time.monotonic() - started, 2))
        raise ServerGone(f"{found} in the check '{name}'", [result]) from error
    except httpx.TransportError as error:
        status, found = "fail", f"the connection broke ({type(error).__name__}: {error})"
    return Check(name, status, found, round(time.monotonic() - started, 2))  # type: ignore[arg-type]


# --- Two servers ------------------------------------------------------------------------------------------


class Comparison(msgspec.Struct, frozen=True):
    """Answers of two servers to the same prompts."""

    equal: int
    ties: list[str]
    different: list[str]

    @property
    def check(self) -> Check:
        name = "same answers as without prefix caching"
        if self.different:
            return Check(name, "fail", "; ".join(self.different[:3]))
        if not self.equal and not self.ties:
            return Check(name, "fail", "no answers to compare")
        ties = f"; a near tie decided otherwise in: {', '.join(self.ties)}" if self.ties else ""
        return Check(name, "pass", f"{self.equal} answers equal{ties}")


def compare(plain: dict[str, Answer], cached: dict[str, Answer], tie: float) -> Comparison:
    """Compare what two servers answered; every answer of the first has to be there.

    Args:
        tie: Nats; two tokens nearer than this in log-probability are as good as equal.
    """
    equal, ties, different = 0, [], []
    for name, expected in plain.items():
        found = cached.get(name)
        reason = "no answer" if found is None else checks.difference(expected, found, tie)
        if found is not None and not reason:
            if found.text == expected.text:
                equal += 1
            else:
                ties.append(name)
        else:
            different.append(f"{name}: {reason}")
    return Comparison(equal, ties, different)
