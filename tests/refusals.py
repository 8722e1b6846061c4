"""What a test expects of a refusal."""

import pytest
from autoport.errors import Refusal


def rules(caught: pytest.ExceptionInfo[Refusal]) -> list[str]:
    """The rule of each problem, in their order."""
    return [problem.rule for problem in caught.value.problems]
