"""Rounds whose length follows from what is measured, and means that are merged within a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..rounds import Pacing, Rounds
from .tau import TauDecision, Tuned


class Adaptive(Pacing):
    """delay: when a mean is merged, see AdaptiveConfig. tuned: the rider that hears the workers' times; None where they
    are not needed.
    """

    def __init__(
        self,
        tau: Callable[[int], int],
        delay: int | Literal["boundary", "auto"] = "boundary",
        *,
        tuned: Tuned | None = None,
    ):
        self.delay, self.tuned = delay, tuned
        super().__init__(tau)

    @property
    def decision(self) -> TauDecision | None:
        """Taken by tau auto at the last boundary, if any was."""
        return self.tuned.decision if self.tuned is not None else None

    def begin(self, number: int) -> None:
        if self.tuned is not None and self.tuned.chooses:
            self.tau = self.tuned.tuner.tau
            return
        super().begin(number)
        if self.tuned is not None:
            self.tuned.tuner.given = self.tuned.tuner.tau = self.tau

    def merges(self, method: Rounds) -> bool:
        if self.delay != "auto":
            return method.local_steps == self.delay
        return method.flight.landed() or (self.tuned is not None and method.local_steps == self.tuned.tuner.needed)
