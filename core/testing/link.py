"""An emulated slow link. It delays every step of a reduction until its bytes would have crossed the link."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from ..comm import AsyncAllReduce, Pending, Stage
from ..errors import UserError


class Link(Protocol):
    """An emulated slow link, for measurements on one machine."""

    def reserve(self, nbytes: float) -> float:
        """Queues `nbytes` on the link, and returns the time.perf_counter() at which they have crossed it."""
        ...


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


class SlowAllReduce(AsyncAllReduce):
    """An AsyncAllReduce over an emulated link. It delays nothing over NCCL, whose waits do not block the host.

    Args:
        device: As for AsyncAllReduce.
        link: The emulated link.
        **options: Other arguments of AsyncAllReduce.
    """

    def __init__(self, device: torch.device, *, link: Link, **options: Any):
        super().__init__(device, **options)
        self.link = link

    def _count_bytes(self, stage: Stage) -> Iterator[Pending]:
        """Yields the step's collectives one after the other, then waits until the link has carried their bytes."""
        works, crossed_at = super()._count_bytes(stage), self.link.reserve(stage[1])
        yield from works
        if not self._by_nccl:
            time.sleep(max(0.0, crossed_at - time.perf_counter()))


def allreduce_over(link: Link | None, kind: type[AsyncAllReduce] = AsyncAllReduce) -> Callable[..., AsyncAllReduce]:
    """Returns a constructor of AsyncAllReduce or of a derived class, over an emulated link if one is given."""
    return functools.partial(type("SlowAllReduce", (SlowAllReduce, kind), {}), link=link) if link else kind
