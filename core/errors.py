"""The errors that a user of this project meets, and checks of settings that raise them."""

from numbers import Real
from typing import Any


class UserError(ValueError):
    """A mistake in what the user asked for: one line that names the value and the remedy.

    The train scripts print it without a traceback and exit with status 2.
    """


class CollectiveError(RuntimeError):
    """A collective failed: names this rank, the round, and the ranks that did not answer."""


class DivergedError(RuntimeError):
    """Training cannot continue: the parameters are not finite, or a worker is excluded in too many rounds in a row."""


def is_number(value: Any) -> bool:
    """Whether it can be compared with numbers: a text cannot."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number above 0, as a number of local steps."""
    return isinstance(value, int) and is_number(value) and value >= 1


def require(settings: Any, ok: bool, name: str, remedy: str) -> None:
    """Raises UserError with a setting's value and the remedy, unless it is ok."""
    if not ok:
        raise UserError(f"{name}={getattr(settings, name)!r}: {remedy}")
