"""Ending a run early: a signal to any worker ends the run of all, which then save and can be resumed."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Whether a signal has asked to end the run.

    Attributes: interrupted, of the class, whether Ctrl-C has ended this process's run; number, of the signal that this
    worker got, 0 for none. The workers agree on where they stop in a collective that their method makes anyway: see
    ask_to_stop of core's methods.
    """

    interrupted = False

    def __init__(self) -> None:
        self.number = 0
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Handles the signals from now on."""
        StopSignal.interrupted = False
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def ignore(self) -> None:
        """Leaves the signals to those who handled them before, for what the process does after the run. Not where one
        has come: the terminal and torchrun each send one, and the second must not spoil the exit status."""
        if not self.number:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """The first signal ends the run at one of the next boundaries; another one, over 2 s later, at once."""
        now = time.monotonic()
        if self.number and now - self._asked_at > 2:  # torchrun and the terminal both send one
            raise KeyboardInterrupt
        if not self.number:
            self.number, self._asked_at = number, now
            StopSignal.interrupted = number == signal.SIGINT
