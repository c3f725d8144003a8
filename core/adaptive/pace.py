"""Local steps by speed: a slower worker takes fewer of a round's tau, so that nobody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from ..groups import Stage
from ..riders import Heard, Rider
from ..stats import ready

WINDOW = 5  # rounds over which medians are taken


class BySpeed(Rider):
    """How many of a round's local steps this worker takes: tau times its speed over that of the fastest worker. What it
    sends counts by its local steps. Comes after the guard, whose judgement is of what one worker has trained.

    The rule is DyLU's, "Dynamic Local Updates" (Liu et al., arXiv 2401.09135), but for the rounding: to the nearest,
    at least 2 (the first of a round is not timed), tau until the times are known. A worker tells the seconds of its
    local steps with each reduction, and all hear them in the same round. rank: its place among the workers.
    """

    name, of_each = "pace", {"step_seconds": 1}

    def __init__(self, rank: int, workers: int):
        self.rank = rank
        self._seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(workers)]
        self._heard: Sequence[float] = []
        self._told = 0.0

    def steps(self, tau: int) -> int:
        """This worker's part of tau local steps; the same until a round's end."""
        if not all(self._seconds):
            return tau
        medians = [median(times) for times in self._seconds]
        return min(tau, max(2, round(tau * min(medians) / medians[self.rank])))

    def pack(self) -> None:
        m = self.method
        self._steps = m.local_steps
        if not m.sends_later:
            self._weigh()
        for known in (m.stats, m.clock.before):  # a GPU has passed the round before where it has not passed this one
            if ready(known.step_seconds) and float(known.step_seconds):
                self._told = float(known.step_seconds)
                break
        m.scalars["step_seconds"].view(-1).zero_()[self.rank].fill_(self._told)

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
        self._heard = sums["step_seconds"]

    def end(self) -> None:
        if self._heard and all(self._heard):  # 0 where a worker has none yet
            for times, heard in zip(self._seconds, self._heard, strict=True):
                times.append(heard)
        self._heard = []

    def state_dict(self) -> Any:
        return {"seconds": [list(times) for times in self._seconds], "told": self._told}

    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        if of_others:
            self.method.scalars["step_seconds"].zero_()
        elif state:
            self._seconds = [deque(times, maxlen=WINDOW) for times in state["seconds"]]
            self._told = state["told"]
