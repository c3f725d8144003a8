"""When L-GreCo decides."""

from __future__ import annotations

import torch

SUMMED = 10  # reductions whose compressed tensors the curves are taken of, as released


class Clock:
    """At fixed reductions, so that a run can be repeated.

    first: the reduction that decides first. The second decision comes as many reductions later, at 2 x first, and so
    on: the time between two doubles, up to `every`, for at the beginning of a run gradients change fast.
    numbers: float64 [1] on the CPU, for a checkpoint: the reduction that decides next, 0 for the first.
    """

    def __init__(self, every: int, first: int):
        self.every, self.first = every, first
        self.numbers = torch.zeros(1, dtype=torch.float64)

    def due(self, number: int) -> bool:
        """Whether the `number`-th reduction, from 1, is to decide."""
        return number >= self._planned

    def counts(self, number: int) -> bool:
        """Whether the `number`-th reduction is one of the SUMMED up to the one that is to decide."""
        return number > self._planned - SUMMED

    @property
    def _planned(self) -> float:
        return max(self.first, self.numbers.item())

    def plan(self, number: int) -> None:
        """After the `number`-th reduction, which decides: plans the next decision."""
        self.numbers.fill_(number + min(self.every, number))
