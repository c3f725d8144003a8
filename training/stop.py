"""Ending a run early: a signal to any worker ends the run of all, which then save and can be resumed."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LOOK_EVERY = 0.25  # seconds between two looks at the store where workers need not stop together
_KEY = "co2/stop"  # in the store that all workers share: the step at which they stop


class StopSignal:
    """Whether a signal has asked to end the run.

    Attributes: number, of the signal that this worker got; 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._asked_at = 0.0
        self._looked_at = 0.0

    def listen(self) -> None:
        """Handles the signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """The first signal ends the run after the current steps; another one, over 2 s later, ends it at once."""
        now = time.monotonic()
        if self.number and now - self._asked_at > 2:  # torchrun and the terminal both send one
            raise KeyboardInterrupt
        if not self.number:
            self.number, self._asked_at = number, now

    def reached(self, step: int, *, together: bool) -> bool:
        """Whether this worker stops here; call it after every step, with the number of steps taken.

        All workers stop two steps after the first one that knows of the signal asks. together: at the same step, as
        ddp's must. The workers of a local method may be past that step already, and then stop at their next one; so
        they ask the store now and then only, for an answer takes a moment on a machine whose cores are busy.
        """
        if not dist.is_initialized():
            return bool(self.number)
        now = time.monotonic()
        if not together and not self.number and now - self._looked_at < LOOK_EVERY:
            return False
        self._looked_at = now
        store = dist.distributed_c10d._get_default_store()
        if self.number and not store.check([_KEY]):
            store.set(_KEY, str(step + 2))
        return store.check([_KEY]) and step >= int(store.get(_KEY))
