"""What is said when a folder cannot be used."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from autoport.errors import Problem, Refusal

P = ParamSpec("P")
T = TypeVar("T")


def write_problem(found: object, where: object) -> Problem:
    return Problem(
        "INSTALL-WRITE", str(found), str(where), "change its permissions, or install in another --scope"
    )


def refusing_os_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Turn an `OSError` of `function` into a refusal, INSTALL-WRITE."""

    @functools.wraps(function)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            raise Refusal(write_problem(error.strerror or error, error.filename or "file system")) from error

    return refusing
