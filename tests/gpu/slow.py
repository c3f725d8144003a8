"""A collective that takes long, and a process group of one: what the GPU's measurements and tests share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Slow:
    """A reducer that first calls `before`, in the stream or thread of the all-reduces, and waits for its result."""

    def __init__(self, reducer: Any, before: Callable[[], list[Any]]):
        self.reducer, self.before = reducer, before

    @property
    def scale(self) -> float:
        return self.reducer.scale

    @property
    def state(self) -> dict[str, list[Tensor]]:
        return self.reducer.state

    def stages(self, group: Any, number: int) -> Iterator[Any]:
        yield self.before(), 0
        yield from self.reducer.stages(group, number)


class Nap:
    """Imitates a collective on a host that takes this many seconds."""

    def __init__(self, seconds: float):
        self.until = time.perf_counter() + seconds

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.until

    def wait(self, timeout: Any = None) -> None:
        time.sleep(max(0.0, self.until - time.perf_counter()))


def asleep(device: str, cycles: int, seconds: float) -> list[Any]:
    """A slow collective: on a GPU a kernel that sleeps for `cycles`, elsewhere a nap of `seconds`."""
    if device == "cpu":
        return [Nap(seconds)]
    torch.cuda._sleep(cycles)
    return []


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of one process. On a GPU it is NCCL's, which queues everything as with many ranks."""
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
