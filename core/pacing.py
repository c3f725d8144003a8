"""When a worker's round ends. Here as in the paper: after tau local steps."""

from __future__ import annotations

from collections.abc import Callable

from .errors import UserError
from .held import Held


class Pacing:
    """tau: local steps a round, or a function of the round's number that gives them.

    Attributes: tau, of the round that runs.
    """

    def __init__(self, tau: int | Callable[[int], int]):
        self._tau_of = tau if callable(tau) else lambda number: tau
        self.begin(0)

    def begin(self, number: int) -> None:
        """Round `number` begins, counted from 0."""
        self.tau = self._tau_of(number)
        if not isinstance(self.tau, int) or self.tau < 1:
            raise UserError(f"tau={self.tau!r}: give a whole number of local steps, 1 or more")

    def closes(self, method: Held) -> bool:
        """After a local step: whether the round ends with it."""
        return method.local_steps >= self.tau

    def merges(self, method: Held) -> bool:  # noqa: ARG002
        """After a local step that ends no round: whether to merge the mean that is in flight."""
        return False
