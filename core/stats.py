"""Statistics of a round: the outer step, the times, and how much of the communication was hidden.

Times are measured where the work happens: by the host's clock on a CPU, by CUDA events in the streams on a GPU. The
events of a round are read one round later, so the host waits only for work that the GPU has probably finished. The host
runs at most one round ahead of the GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Mark = float | torch.cuda.Event


def read_blocks(t: Tensor) -> bool:
    """Returns whether the host would wait for the device to read a number of this tensor."""
    return t.is_cuda


def mark(device: torch.device) -> Mark:
    """Returns the current time: time.perf_counter() on a CPU, an event in the current stream on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True)
class DeferredNumber:
    """A number from a GPU, such as seconds. `number` can read it once the GPU has reached the event `end`."""

    end: Mark
    number: Callable[[], float]

    def __float__(self) -> float:
        """Waits until the number is available, and returns it."""
        if not isinstance(self.end, int | float):
            self.end.synchronize()
        return self.number()


Seconds = float | DeferredNumber


def between(start: Mark, end: Mark, parts: int = 1, excluding: Seconds = 0.0) -> Seconds:
    """Returns the seconds between two marks of one device, minus `excluding`, divided by `parts`."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return DeferredNumber(end, lambda: (start.elapsed_time(end) / 1e3 - float(excluding)) / parts)
    assert not isinstance(start, torch.cuda.Event) and not isinstance(end, torch.cuda.Event), "two devices"
    return (end - start - float(excluding)) / parts


def plus(time: Seconds, more: Seconds) -> Seconds:
    """Returns the sum of two times, of which `more` ends last."""
    if isinstance(time, int | float) and isinstance(more, int | float):
        return time + more
    end = more.end if isinstance(more, DeferredNumber) else time.end  # pyright: ignore[reportAttributeAccessIssue]
    return DeferredNumber(end, lambda: float(time) + float(more))


def ready(*times: Seconds) -> bool:
    """Returns whether all of the times can be read without waiting."""
    return all(t.end.query() for t in times if isinstance(t, DeferredNumber) and not isinstance(t.end, int | float))


class HostCopy:
    """Copies numbers from a GPU to the host in one transfer, without making the compute stream or the host wait.

    Args:
        numbers: 1-d.
    """

    def __init__(self, numbers: Tensor):
        self._copy = numbers.to("cpu", non_blocking=True)  # torch uses pinned memory for this copy
        self.end = mark(numbers.device)

    def is_ready(self) -> bool:
        """Returns whether the numbers can be read without waiting."""
        return not isinstance(self.end, torch.cuda.Event) or self.end.query()

    def read(self) -> list[float]:
        """Waits for the copy, but not for later work, and returns the numbers."""
        if isinstance(self.end, torch.cuda.Event):
            self.end.synchronize()
        return self._copy.tolist()


def defer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values`, where each 0-d tensor on a GPU is replaced by a DeferredNumber.

    All of these tensors travel to the host in one copy. Other values stay as they are.
    """
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    if not tensors or not read_blocks(tensors[0]):
        return dict(values)
    on_gpu = {name: v for name, v in values.items() if isinstance(v, Tensor) and read_blocks(v)}
    copy = HostCopy(torch.stack([v.detach().double() for v in on_gpu.values()]))
    return dict(values) | {name: DeferredNumber(copy.end, lambda i=i: copy.read()[i]) for i, name in enumerate(on_gpu)}


class AsyncReadback:
    """Brings numbers to the host. On a GPU, each call returns the numbers of the previous call."""

    def __init__(self) -> None:
        self._pending: tuple[HostCopy, Any] | None = None

    def exchange(self, numbers: Tensor, info: Any = None) -> tuple[list[float], Any] | None:
        """Starts the copy of `numbers` to the host, and returns the last copy that is complete.

        Args:
            numbers: 1-d, on any device.
            info: Describes the numbers, and is returned with them.

        Returns:
            The numbers and info of this call on a CPU, of the previous call on a GPU. None in the first call on a GPU.
        """
        if not read_blocks(numbers):
            return numbers.tolist(), info
        previous, self._pending = self._pending, (HostCopy(numbers), info)
        return previous and (previous[0].read(), previous[1])  # the host is at most one call ahead


Number = float | Tensor | DeferredNumber


@dataclass
class RoundStats:
    """Statistics of one closed round on this worker. Times are in seconds, and bytes are bytes sent.

    On a GPU some values are still on their way to the host. as_dict() reads them.
    """

    round: int = 0
    tau: int = 1
    local_steps: int = 0
    pseudo_gradient_norm: Number = 0.0
    momentum_norm: Number = 0.0
    consensus_distance: Number = 0.0  # RMS distance of the workers from their average; 0 with fragments
    gap_mean: Number = 1.0  # mean of Lambda over all elements
    gap_max: Number = 1.0
    drifted: float = 0.0  # 1 if a checksum shows that replicas differ which must be equal bit for bit
    excluded: int = 0  # workers excluded from the average, as far as the host has received it
    clipped_share: Number = 0.0  # fraction of the momentum's elements that step 6 clips
    step_seconds: Seconds = 0.0  # one local step, without the first of the round, which may follow an evaluation
    exposed_seconds: Seconds = 0.0  # communication that is not hidden: step() launches, polls and waits for so long
    boundary_seconds: Seconds = 0.0  # the whole boundary, including the wait
    merge_seconds: Seconds = 0.0  # a merge in the middle of the round, including the wait; 0 without one
    merged_after: int = 0  # local steps between the start of the all-reduce and the merge; of fragments, the most
    allreduce_seconds: Seconds = 0.0  # from launch to arrival, of the all-reduce that arrived in this round
    bytes_sent: int = 0

    def as_dict(self) -> dict[str, float]:
        """Returns all values as floats, with hidden_seconds and link_mbit (Mbit/s) computed from them.

        On a GPU this call may wait for the end of the round.
        """
        values = {name: float(value) for name, value in vars(self).items()}
        busy = values["allreduce_seconds"]
        values["hidden_seconds"] = max(0.0, busy - values["exposed_seconds"])
        values["link_mbit"] = values["bytes_sent"] * 8e-6 / busy if busy else 0.0
        return values


class RoundClock:
    """Measures the times of rounds.

    Attributes:
        stats: The round that closed last, or is closing. After a merge in the middle of a round, the current round.
        before: The round before `stats`.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.stats = self.before = RoundStats()
        self._merged: RoundStats | None = None  # the current round, if its average was merged before its end
        self.steps_begin()

    def steps_begin(self, after: int = 0) -> None:
        """Starts to time local steps, after so many of the round."""
        self._steps_began, self._untimed = mark(self._device), after
        self._in_merge: Seconds = 0.0  # seconds in a merge since then, to be subtracted

    @contextlib.contextmanager
    def boundary(self, tau: int, local_steps: int) -> Iterator[None]:
        """Times a boundary, and the local steps of the round that ends, without the first one unless tau is 1."""
        began = mark(self._device)
        timed = local_steps - self._untimed
        self.before = self.stats if self._merged is None else self.before
        self.stats, self._merged = self._merged or RoundStats(merged_after=local_steps), None
        self.stats.tau, self.stats.local_steps = tau, local_steps
        if timed > 0:
            self.stats.step_seconds = between(self._steps_began, began, timed, self._in_merge)
        yield
        vars(self.stats).update(defer(vars(self.stats)))
        self.steps_begin()
        self.stats.boundary_seconds = between(began, self._steps_began)

    @contextlib.contextmanager
    def early_merge(self, local_steps: int) -> Iterator[None]:
        """Times a merge in the middle of a round, and excludes it from the local steps' time."""
        began = mark(self._device)
        if self._merged is None:
            self.before = self.stats
            self.stats = self._merged = RoundStats()
        merged = self._merged
        merged.merged_after = max(merged.merged_after, local_steps)
        yield
        took = between(began, mark(self._device))
        merged.merge_seconds, self._in_merge = plus(merged.merge_seconds, took), plus(self._in_merge, took)
