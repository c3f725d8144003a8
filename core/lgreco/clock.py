"""When L-GreCo decides: every so many reductions, or less often where that would take too much of the time."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

IN_HAND = 0.8  # of what deciding may take: a plan does not know yet how long the programme of its own decision takes


class Clock:
    """What a worker has spent on deciding, of how long; and when it is time again, which all workers plan alike.

    every, first: reductions between two decisions at least, and before the first. time_share: of the time since the
    first reduction, what deciding may take; 1: as much as it does. numbers: float64 [5] on the CPU, for a checkpoint:
    the reduction that decides next, 0 for the first; decisions so far; seconds that they took here; reductions since
    the first one, and their seconds.
    """

    def __init__(self, every: int, first: int, time_share: float):
        self.every, self.first, self.time_share = every, first, time_share
        self.numbers = torch.zeros(5, dtype=torch.float64)
        self._next, self._decisions, self._spent, self._reductions, self._elapsed = self.numbers
        self._since: float | None = None

    def due(self, number: int) -> bool:
        """Whether the `number`-th reduction, from 1, is to decide."""
        return number >= max(self.first, self.numbers.tolist()[0])

    def tick(self) -> None:
        """Call it when a reduction begins."""
        now = time.perf_counter()
        if self._since is not None:
            self._reductions += 1
            self._elapsed += now - self._since
        self._since = now

    def spend(self, seconds: float) -> None:
        """Adds to what deciding has taken."""
        self._spent += seconds

    def tell(self, to: Tensor) -> None:
        """Writes into to [3] what `plan` takes: with its mean over the workers all of them plan alike."""
        for place, value in zip(to, self.numbers.tolist()[2:], strict=True):
            place.fill_(value)

    def plan(self, number: int, spent: float, reductions: float, elapsed: float) -> str:
        """After the `number`-th reduction, which decides: when the next one does, and why so late, if it is. The rest:
        the workers' means."""
        self._decisions += 1
        after = self.every
        if self.time_share < 1 and elapsed > 0:
            each = spent / self.numbers.tolist()[1]
            wanted = (spent + each) / (IN_HAND * self.time_share)  # seconds since the first reduction
            after = max(after, math.ceil((wanted - elapsed) / elapsed * reductions))
        self._next.fill_(number + after)
        if after == self.every:
            return ""
        return f"; next in {after} reductions, for deciding to take {self.time_share:.2g} of the time at most"
