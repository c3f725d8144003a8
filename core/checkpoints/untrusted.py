"""What is read from files that nobody should trust."""

from __future__ import annotations

import json
from typing import Any

LEVELS = 64  # of lists and objects in each other; our own files have five


def parse_json(text: str | bytes) -> Any:
    """Calls json.loads. ValueError also for what is nested too deep for programs to walk, for half a surrogate, which
    no file or screen takes, and for a whole number that no float can be."""

    def check(value: Any, levels: int) -> None:
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, int):
            float(value)
        elif isinstance(value, list | dict):
            if not levels:
                raise RecursionError
            for inner in [*value, *value.values()] if isinstance(value, dict) else value:
                check(inner, levels - 1)

    try:
        check(found := json.loads(text), LEVELS)
    except RecursionError:
        raise ValueError(f"more than {LEVELS} levels") from None
    except OverflowError as error:
        raise ValueError(str(error)) from None
    return found


def reason(error: BaseException) -> str:
    """Returns one line; for an error of the operating system, what that says."""
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
