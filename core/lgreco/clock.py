"""When L-GreCo decides: at fixed reductions, or less often where deciding would take too much of the time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..stats import Mark, Seconds, between, ready

SUMMED = 10  # reductions whose compressed tensors the curves are taken of, as released
IN_HAND = 0.8  # of the share: a plan does not know yet how long the programme of its own decision takes


class Clock:
    """The time that a worker has spent on deciding; and the next decision's reduction, which all workers plan alike.

    first: the reduction that decides first. The second decision comes as many reductions later, at 2 x first, and so
    on: the time between two doubles, up to `every`, for at the beginning of a run gradients change fast. time_share:
    the share of the time since the first reduction that deciding may take, for which it waits longer; 1: no limit.
    numbers: float64 [5] on the CPU, for a checkpoint: the reduction that decides next, 0 for the first; decisions so
    far; seconds that they took here; reductions since the first one, and their seconds. On a GPU times lie between
    events, and count once it has passed them.
    """

    def __init__(self, every: int, first: int, time_share: float):
        self.every, self.first, self.time_share = every, first, time_share
        self.numbers = torch.zeros(5, dtype=torch.float64)
        self._next, self._decisions, self._spent, self._reductions, self._elapsed = self.numbers
        self._since: Mark | None = None
        self._laps: list[Seconds] = []  # of reductions, that a GPU may not have passed yet
        self._costs: list[Seconds] = []  # of deciding

    def due(self, number: int) -> bool:
        """Whether the `number`-th reduction, from 1, is to decide."""
        return number >= self._planned

    def counts(self, number: int) -> bool:
        """Whether the `number`-th reduction is one of the SUMMED up to the one that is to decide."""
        return number > self._planned - SUMMED

    @property
    def _planned(self) -> float:
        return max(self.first, self.numbers.tolist()[0])

    def tick(self, now: Mark) -> None:
        """Call it when a reduction begins."""
        if self._since is not None:
            self._laps.append(between(self._since, now))
        self._since = now
        self._read()

    def spend(self, seconds: Seconds) -> None:
        """Adds to the time of deciding."""
        self._costs.append(seconds)
        self._read()

    def tell(self, to: Tensor) -> None:
        """Writes `plan`'s numbers into to [3]: with their means over the workers all of them plan alike. A decision
        that a GPU has not passed yet counts as the decisions before it; the first has none, so the host waits for it.
        """
        decisions = self.numbers.tolist()[1]
        if self._costs and not decisions:
            float(self._costs[-1])
        self._read()
        spent, reductions, elapsed = self.numbers.tolist()[2:]
        spent *= 1 + len(self._costs) / max(1.0, decisions)
        for place, value in zip(to, (spent, reductions, elapsed), strict=True):
            place.fill_(value)

    def _read(self) -> None:
        """Adds up the times that have passed: on a CPU, all."""
        while self._laps and ready(self._laps[0]):
            self._reductions += 1
            self._elapsed += float(self._laps.pop(0))
        while self._costs and ready(self._costs[0]):
            self._spent += float(self._costs.pop(0))

    def plan(self, number: int, spent: float, reductions: float, elapsed: float) -> str:
        """After the `number`-th reduction, which decides: plans the next decision, and says why it is late, if it is.
        The other numbers are the workers' means."""
        self._decisions += 1
        usual = after = min(self.every, number)
        if self.time_share < 1 and elapsed > 0:
            each = spent / self.numbers.tolist()[1]
            wanted = (spent + each) / (IN_HAND * self.time_share)  # seconds since the first reduction
            after = max(after, math.ceil((wanted - elapsed) / elapsed * reductions))
        self._next.fill_(number + after)
        if after == usual:
            return ""
        return f"; next in {after} reductions, for deciding to take {self.time_share:.2g} of the time at most"
