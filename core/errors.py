"""The errors that a user of this project meets."""

from typing import NoReturn


class UserError(ValueError):
    """A mistake in what the user asked for: one line that names the value and the remedy.

    The train scripts print it without a traceback and exit with status 2.
    """


class Moved:
    """An attribute that has gone elsewhere: reading it raises AttributeError and writing to it UserError, which would
    otherwise have no effect, and no word about it. to: where it is now."""

    def __init__(self, to: str):
        self._to = to

    def __set_name__(self, owner: type, name: str) -> None:
        self._text = f"{owner.__name__} has no {name} any more: it is {self._to}"

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(self._text)

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise UserError(self._text)


class CollectiveError(RuntimeError):
    """A collective failed: names this rank, the round, and the ranks that did not answer."""


class DivergedError(RuntimeError):
    """Training cannot go on: what workers hold is not finite, or one is left out of the mean round after round.

    The train scripts print it without a traceback and exit with status 2; the last checkpoint stays.
    """
