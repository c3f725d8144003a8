"""What a round did and what it cost: statistics of the outer step, and how much communication was hidden.

Times are taken where the work happens: on a CPU by the host's clock, on a GPU by events in its streams, which are
read a round later: the host waits for nothing that it has queued since, and is at most a round ahead of the GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .buckets import read_blocks

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """This moment: time.perf_counter() on a CPU, on a GPU an event in the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True)
class DeferredNumber:
    """A number of a GPU's, such as seconds, which is known when it has passed `end`."""

    end: Mark
    number: Callable[[], float]

    def __float__(self) -> float:
        """Waits for it."""
        if not isinstance(self.end, int | float):
            self.end.synchronize()
        return self.number()


Seconds = float | DeferredNumber


def between(start: Mark, end: Mark, parts: int = 1, less: Seconds = 0.0) -> Seconds:
    """The time between two marks of one device without what of it is `less`, or one of its equal `parts`."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return DeferredNumber(end, lambda: (start.elapsed_time(end) / 1e3 - float(less)) / parts)
    assert not isinstance(start, torch.cuda.Event) and not isinstance(end, torch.cuda.Event), "two devices"
    return (end - start - float(less)) / parts


def plus(time: Seconds, more: float) -> Seconds:
    """`more` seconds of the host's added to it."""
    return DeferredNumber(time.end, lambda: float(time) + more) if isinstance(time, DeferredNumber) else time + more


def ready(*times: Seconds) -> bool:
    """Whether all of them can be read without waiting."""
    return all(t.end.query() for t in times if isinstance(t, DeferredNumber) and not isinstance(t.end, int | float))


class HostCopy:
    """A GPU's numbers, 1-d, on their way to the host in one copy; where they were computed, nothing waits for it."""

    def __init__(self, numbers: Tensor):
        self._copy = numbers.to("cpu", non_blocking=True)  # which torch takes pinned memory for
        self.end = mark(numbers.device)

    def read(self) -> list[float]:
        """Waits until the copy is there, but for nothing that was queued after it."""
        if isinstance(self.end, torch.cuda.Event):
            self.end.synchronize()
        return self._copy.tolist()


def defer(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with all numbers that lie on a GPU, 0-d each, on their way to the host: read a round later by float(),
    they make it wait for nothing queued since. Others as they are."""
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    if not tensors or not read_blocks(tensors[0]):
        return dict(values)
    there = {name: v for name, v in values.items() if isinstance(v, Tensor) and read_blocks(v)}
    copy = HostCopy(torch.stack([v.detach().double() for v in there.values()]))
    return dict(values) | {name: DeferredNumber(copy.end, lambda i=i: copy.read()[i]) for i, name in enumerate(there)}


class AsyncReadback:
    """A device's numbers for the host: on a GPU it gets those of the call before, and waits until they are there."""

    def __init__(self) -> None:
        self._coming: tuple[HostCopy, Any] | None = None

    def exchange(self, numbers: Tensor, of: Any = None) -> tuple[list[float], Any] | None:
        """numbers: 1-d. of: what they are of. Returns both, of the same call; None: there are none yet."""
        if not read_blocks(numbers):
            return numbers.tolist(), of
        arrived, self._coming = self._coming, (HostCopy(numbers), of)
        return arrived and (arrived[0].read(), arrived[1])  # the host gets no further ahead than a call


Number = float | Tensor | DeferredNumber


@dataclass
class RoundStats:
    """One closed round, as seen by this worker. Times are seconds; bytes are sent, not received.

    Values may still be on their way on a GPU: as_dict() reads them, and waits for nothing that was queued since.
    """

    round: int = 0
    tau: int = 1
    local_steps: int = 0
    pseudo_gradient_norm: Number = 0.0
    momentum_norm: Number = 0.0
    consensus_distance: Number = 0.0  # of the workers: their root mean square distance from their mean, at the sending
    gap_mean: Number = 1.0  # Lambda over all elements
    gap_max: Number = 1.0
    drifted: float = 0.0  # 1 when workers were found to differ that should be equal, bit for bit
    excluded: int = 0  # workers that were left out of the mean, as far as the host has heard
    clipped_share: Number = 0.0  # of the momentum's elements
    step_seconds: Seconds = 0.0  # of one local step; the round's first is left out, it may follow an evaluation
    exposed_seconds: Seconds = 0.0  # exposed communication: how long launching, polling and waiting held step() up
    boundary_seconds: Seconds = 0.0  # the whole boundary, the waiting included
    merge_seconds: Seconds = 0.0  # where a mean was merged or awaited in mid-round: that, the waiting included
    merged_after: int = 0  # local steps after its sending
    allreduce_seconds: Seconds = 0.0  # from launch to landing of the all-reduce that landed in this round
    bytes_sent: int = 0

    def as_dict(self) -> dict[str, float]:
        """Plain floats, with what follows from them; of a GPU's values of this round the host may wait here."""
        values = {name: float(value) for name, value in vars(self).items()}
        busy = values["allreduce_seconds"]
        values["hidden_seconds"] = max(0.0, busy - values["exposed_seconds"])
        values["link_mbit"] = values["bytes_sent"] * 8e-6 / busy if busy else 0.0
        return values


class RoundClock:
    """Takes the times of rounds. Attributes: stats, of the round that closed last or is closing, and once a mean was
    merged in mid-round of the one that runs; before, of the one before that."""

    def __init__(self, device: torch.device):
        self._device = device
        self.stats = self.before = RoundStats()
        self._early: RoundStats | None = None  # of the round that runs, where its mean was merged before its end
        self.steps_begin()

    def steps_begin(self) -> None:
        """The steps that are timed begin here."""
        self._since = mark(self._device)
        self._away: Seconds = 0.0  # from them since then, in a merge

    @contextlib.contextmanager
    def boundary(self, tau: int, local_steps: int) -> Iterator[None]:
        """The end of a round of so many steps, of which the first is timed only where there is no other."""
        arrived = mark(self._device)
        timed = local_steps - (tau > 1)
        self.before = self.stats if self._early is None else self.before
        self.stats, self._early = self._early or RoundStats(merged_after=local_steps), None
        self.stats.tau, self.stats.local_steps = tau, local_steps
        if timed > 0:
            self.stats.step_seconds = between(self._since, arrived, timed, self._away)
        yield
        vars(self.stats).update(defer(vars(self.stats)))
        self.steps_begin()
        self.stats.boundary_seconds = between(arrived, self._since)

    @contextlib.contextmanager
    def early_merge(self, local_steps: int) -> Iterator[None]:
        """A merge in mid-round, whose statistics are told when the round closes; it is no part of a local step."""
        began = mark(self._device)
        self.before = self.stats
        self.stats = self._early = RoundStats(merged_after=local_steps)
        yield
        self._early.merge_seconds = self._away = between(began, mark(self._device))
