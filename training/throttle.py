"""A slow network link, emulated in software."""

from __future__ import annotations

import time

import torch

from core.errors import UserError


class ThrottledLink:
    """A slow network link emulated in software, for measurements on one machine.

    Every collective is held back until its bytes would have crossed a link of `mbit` Mbit/s in each direction:
    2 (n - 1) / n x bytes for a ring all-reduce over n workers. Collectives queue one behind the other, as on a
    real link. The data itself moves at full speed, so the emulated time is a lower bound that includes no latency.
    """

    def __init__(self, mbit: float):
        if not mbit > 0:
            raise UserError(f"link rate {mbit} Mbit/s: give a rate above 0")
        self.bytes_per_second = mbit * 1e6 / 8
        self._free_at = 0.0

    def reserve(self, nbytes: float) -> float:
        """Queues `nbytes` on the link and returns the time.perf_counter() at which they have crossed it."""
        self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self.bytes_per_second
        return self._free_at


def make_link(mbit: float | None, device: torch.device) -> ThrottledLink | None:
    """The link that a recipe asks for; None for the real one."""
    if mbit is None:
        return None
    if device.type == "cuda":
        raise UserError(f"link_mbit={mbit}: the emulated link works on CPUs only; leave it out")
    return ThrottledLink(mbit)
