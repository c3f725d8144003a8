"""A trace of some rounds, in which one sees the all-reduce under the local steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


class Trace:
    """Writes a torch.profiler trace of some rounds: the all-reduce is seen under the local steps.

    Open it in https://ui.perfetto.dev or chrome://tracing: gloo's all-reduce lies in a thread of its own
    (`gloo:all_reduce`), NCCL's in a stream of its own. The trace begins when `first` rounds have closed, so that
    everything has warmed up, and covers `rounds` rounds.
    """

    def __init__(self, path: Path, *, cuda: bool = False, first: int = 2, rounds: int = 2):
        self.path, self.first, self.rounds = path, first, rounds
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        self._profile: Any = profile(activities=activities)
        self._running = False
        self._closed = 0

    @property
    def began(self) -> bool:
        return self._closed >= self.first

    def close_round(self) -> bool:
        """Call it when a round has closed; True when that wrote the trace."""
        self._closed += 1
        if self._closed == self.first:
            self._profile.start()
            self._running = True
        return self._closed == self.first + self.rounds and self.finish()

    def finish(self) -> bool:
        """Writes what there is; True when there was something (a run may end before the trace begins)."""
        if not self._running:
            return False
        self._running = False
        self._profile.stop()
        self._profile.export_chrome_trace(str(self.path))
        return True
