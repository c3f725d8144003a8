"""Counters of a loop: steps until an action is due, averages of scalars, and seconds of training."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Period:
    """Says when an action that repeats every `period` steps (0: never) is due, if asked at some steps after `start`."""

    def __init__(self, period: int, start: int = 0):
        self.period = period
        self._last = start

    def due(self, step: int) -> bool:
        """Returns whether the run has passed a multiple of the period since this was last True."""
        if due := self.would_be(step):
            self._last = step
        return due

    def would_be(self, step: int) -> bool:
        """Returns the same as `due`, without recording the answer."""
        return self.period > 0 and step // self.period > self._last // self.period


class Averages:
    """Running averages of scalars, kept on their device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, scalars: dict[str, Tensor]) -> None:
        """Adds one step's values, each 0-d, always with the same names."""
        for name, value in scalars.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().float()
        self._count += 1

    def pop(self) -> dict[str, Tensor]:
        """Returns the averages since the last call."""
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
        self._since: float | None = None  # start of the present interval

    @property
    def seconds(self) -> float:
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def start(self, seconds: float = 0.0) -> None:
        """Starts from `seconds`, the training time of the run that is resumed."""
        self._seconds, self._since = seconds, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the block."""
        self._seconds, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter()
