"""An emulated slow link, over which AsyncAllReduce delays every step of a reduction."""

from __future__ import annotations

import time

from ..errors import UserError


class ThrottledLink:
    """A slow network link emulated in software, for measurements on one machine.

    It delays every collective until its bytes would have crossed a link of `mbit` Mbit/s in each direction. A ring
    all-reduce over n workers sends 2 (n - 1) / n times its bytes. Collectives queue one after the other, as on a real
    link. The data itself moves at full speed, so the emulated time is a lower bound without latency.

    Args:
        mbit: Rate in Mbit/s, above 0.
    """

    def __init__(self, mbit: float):
        if not mbit > 0:
            raise UserError(f"link rate {mbit} Mbit/s: give a rate above 0")
        self.bytes_per_second = mbit * 1e6 / 8
        self._free_at = 0.0

    def reserve(self, nbytes: float) -> float:
        """Queues `nbytes` on the link, and returns the time.perf_counter() at which they have crossed it."""
        self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self.bytes_per_second
        return self._free_at
