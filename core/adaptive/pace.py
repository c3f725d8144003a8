"""Local steps by speed: a slower worker takes fewer of a round's tau, so that nobody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..groups import Stage
from ..riders import Heard, Rider
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


class BySpeed(Rider):
    """The workers' speeds; what a worker sends counts by its local steps. Comes after the guard, whose judgement is of
    what one worker has trained."""

    name, of_each = "pace", {"step_seconds": 1}

    def __init__(self, rank: int, workers: int):
        self.pace = Pace(rank, workers)

    def pack(self) -> None:
        m = self.method
        self._steps = m.local_steps
        if not m.sends_later:
            self._weigh()
        self.pace.tell(m.stats, m.clock.before, m.scalars["step_seconds"])

    def stages(self) -> Iterator[Stage]:
        if self.method.sends_later:
            self._weigh()
        yield from ()

    @torch.no_grad()
    def _weigh(self) -> None:
        for flat in (part for b in self.method.buckets for part in (b.payload, b.values)):
            flat.mul_(self._steps)
        self.method.scalars["weight"].mul_(self._steps)

    def hear(self, sums: Mapping[str, Sequence[float]], of: Heard) -> None:
        self.pace.hear(sums["step_seconds"])

    def end(self) -> None:
        self.pace.follow()

    def state_dict(self) -> Any:
        return self.pace.state_dict()

    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        if of_others:
            self.method.scalars["step_seconds"].zero_()
        elif state:
            self.pace.load_state_dict(state)
