"""What a training loop counts with: when something is due, means between two lines of the log, and its time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Due:
    """What a loop has to do after a step."""

    evaluation: bool
    checkpoint: bool
    stop: bool


class Every:
    """Says when something that happens every `period` steps is due, though it is asked at some steps only.

    period: 0 for never. start: the step that the run begins or resumes at.
    """

    def __init__(self, period: int, start: int = 0):
        self.period = period
        self._last = start

    def due(self, step: int) -> bool:
        """Whether a multiple of the period has been passed since the last step at which this was True."""
        due = self.would_be(step)
        self._last = step if due else self._last
        return due

    def would_be(self, step: int) -> bool:
        """`due`, which does not count as asked."""
        return self.period > 0 and step // self.period > self._last // self.period


class Timer:
    """Says when `minutes` have passed, by this worker's clock; 0 for never."""

    clock = staticmethod(time.monotonic)  # seconds

    def __init__(self, minutes: float):
        self.minutes = minutes
        self.restart()

    def restart(self) -> None:
        self._since = self.clock()

    def due(self) -> bool:
        return self.minutes > 0 and self.clock() - self._since >= 60 * self.minutes


class Averages:
    """Running means of scalars, kept on their device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, scalars: dict[str, Tensor]) -> None:
        """Adds one step's values, 0-d each, always the same names."""
        for name, value in scalars.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().float()
        self._count += 1

    def pop(self) -> dict[str, Tensor]:
        """The means since the last pop."""
        means = {name: total / self._count for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._count = dict(state["sums"]), state["count"]


class Stopwatch:
    """Measures the seconds of training, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None  # the start of the stretch that runs

    @property
    def seconds(self) -> float:
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def start(self, seconds: float = 0.0) -> None:
        """Goes on from `seconds`, those of the run that is resumed."""
        self._seconds, self._since = seconds, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the time of the block."""
        self._seconds, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter()
