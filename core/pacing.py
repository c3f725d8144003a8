"""When a worker's round ends. Here as in the paper: after tau local steps."""

from __future__ import annotations

from collections.abc import Callable

from .errors import UserError
from .held import Held


class Pacing:
    """tau: local steps a round, or a function of the round's number that gives them.

    Attributes: tau, of the round that runs; together, whether all workers are in the same round at a boundary.
    """

    together = True

    def __init__(self, tau: int | Callable[[int], int]):
        self._tau_of = tau if callable(tau) else lambda number: tau
        self.begin(0)

    def begin(self, number: int, taken: int = 0) -> None:
        """Round `number` begins, counted from 0; or goes on after so many local steps, from a checkpoint."""
        self.tau = self._tau_of(number)
        if not isinstance(self.tau, int) or self.tau < 1:
            raise UserError(f"tau={self.tau!r}: give a whole number of local steps, 1 or more")

    def closes(self, method: Held, *, last: bool) -> bool:
        """After a local step: whether the round ends with it. last: no other follows."""
        return method.local_steps >= self.tau

    def check_saving(self, method: Held) -> None:
        """UserError where no run could go on from a checkpoint of now."""
