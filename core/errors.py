"""The errors that users get, and checks of settings that raise them."""

from numbers import Real
from typing import Any


class UserError(ValueError):
    """A user's mistake, in one line that names the value and the remedy.

    The train scripts print it without a traceback and exit with status 2.
    """


class CollectiveError(RuntimeError):
    """A collective failed. The message names this rank, the round, and the ranks that did not answer."""


class DivergedError(RuntimeError):
    """Training cannot continue: the parameters are not finite, or a worker is excluded in too many rounds in a row."""


def is_number(value: Any) -> bool:
    """Returns whether value is a real number. Text and booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Returns whether value is an integer above 0, such as a number of local steps."""
    return isinstance(value, int) and is_number(value) and value >= 1


def require(settings: Any, ok: bool, name: str, remedy: str) -> None:
    """Raises UserError with a setting's value and the remedy, unless it is ok."""
    if not ok:
        raise UserError(f"{name}={getattr(settings, name)!r}: {remedy}")
