"""Local steps by speed: a slower worker takes fewer of a round's tau, so that nobody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from torch import Tensor

from ..stats import RoundStats, ready

WINDOW = 5  # rounds over which medians are taken


class Pace:
    """How many of a round's local steps this worker takes: tau times its speed over that of the fastest worker.

    The rule is DyLU's, "Dynamic Local Updates" (Liu et al., arXiv 2401.09135), but for the rounding: to the nearest,
    at least 2 (the first of a round is not timed), tau until the times are known. A worker tells the seconds of its
    local steps with each reduction, and all hear them in the same round. rank: its place among the workers.
    """

    def __init__(self, rank: int, workers: int):
        self.rank = rank
        self._seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(workers)]
        self._heard: list[float] = []
        self._told = 0.0

    @staticmethod
    def sizes(workers: int) -> dict[str, int]:
        """The scalars, and how many numbers each stands for."""
        return {"step_seconds": workers}

    def steps(self, tau: int) -> int:
        """This worker's part of tau local steps; the same until `follow`."""
        if not all(self._seconds):
            return tau
        medians = [median(times) for times in self._seconds]
        return min(tau, max(2, round(tau * min(medians) / medians[self.rank])))

    def tell(self, stats: RoundStats, before: RoundStats, places: Tensor) -> None:
        """Writes the last known seconds of a local step to places, [workers], where all others write 0.

        before: of the round before, which a GPU has passed where it has not passed this one yet.
        """
        for known in (stats, before):
            if ready(known.step_seconds) and float(known.step_seconds):
                self._told = float(known.step_seconds)
                break
        places.view(-1).zero_()[self.rank].fill_(self._told)

    def hear(self, seconds: Sequence[float]) -> None:
        """Every worker's, 0 where one has none."""
        self._heard = list(seconds)

    def follow(self) -> None:
        """What was heard takes effect at a round's end."""
        if self._heard and all(self._heard):
            for times, heard in zip(self._seconds, self._heard, strict=True):
                times.append(heard)
        self._heard = []

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": [list(times) for times in self._seconds], "told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seconds = [deque(times, maxlen=WINDOW) for times in state["seconds"]]
        self._told = state["told"]
