"""What a training loop counts with: when something is due, and means between two lines of the log."""

from __future__ import annotations

from torch import Tensor


class Every:
    """Says when something that happens every `period` steps is due; it may be asked at some steps only.

    period 0: never. start: the step that the run begins or resumes at.
    """

    def __init__(self, period: int, start: int = 0):
        self.period = period
        self._last = start

    def due(self, step: int) -> bool:
        """Whether a multiple of the period lies behind the last step at which this was True."""
        if not self.period or step // self.period <= self._last // self.period:
            return False
        self._last = step
        return True


class Averages:
    """Running means of scalars, kept on their device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, **scalars: Tensor) -> None:
        """Adds one step's values, 0-d each, always the same names."""
        for name, value in scalars.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().float()
        self._count += 1

    def pop(self) -> dict[str, Tensor]:
        """The means since the last pop."""
        means = {name: total / self._count for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        return means
