"""Refusals: what stops a run, said so that the reader knows what to do next."""

import enum

import msgspec


class ExitCode(enum.IntEnum):
    """Process exit codes of every command."""

    DONE = 0
    RED = 1
    REFUSED = 2
    WAITING = 3


class Problem(msgspec.Struct, frozen=True):
    """One reason for a refusal.

    Attributes:
        rule: Stable id of the rule, e.g. ``"CFG-JSON"``.
        found: The offending value, in words.
        where: File (and key or line) the value was read from.
        next_step: What the reader can do about it.
    """

    rule: str
    found: str
    where: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.found} ({self.where}). Next: {self.next_step}"


class Refusal(Exception):
    """Input or use that the tool will not go on with; carries every problem found, not only the first."""

    def __init__(self, *problems: Problem):
        if not problems:
            raise ValueError("a Refusal needs at least one Problem")
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


def refuse(rule: str, found: str, where: object, next_step: str) -> Refusal:
    """Return a `Refusal` with a single problem, ready to raise."""
    return Refusal(Problem(rule=rule, found=found, where=str(where), next_step=next_step))
