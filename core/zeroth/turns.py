"""Two passes through a model, side by side in two threads, of which one computes at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Passes:
    """One or two passes at a time; of two, one computes until it passes its turn on."""

    def __init__(self, device: torch.device):
        self._device = device
        self._local = threading.local()
        self._condition = threading.Condition()
        self._turn, self._over = 0, {0, 1}  # whose turn it is; the passes that have ended
        self._failed = False

    @property
    def number(self) -> int | None:
        """Of this thread's pass, from 0; None where it makes none: somebody else calls the model."""
        return getattr(self._local, "number", None)

    @contextlib.contextmanager
    def under_way(self, number: int) -> Iterator[None]:
        """Inside, this thread makes the pass of that number."""
        self._local.number = number
        try:
            yield
        finally:
            self._local.number = None

    def run(self, work: Callable[[], T], count: int) -> list[T]:
        """What `work` returns in each of `count` passes, one or two. Raises what the first of them to fail raised."""
        self._turn, self._over, self._failed = 0, set(range(count, 2)), False
        kind = self._device.type
        stream = torch.cuda.current_stream(self._device) if kind == "cuda" else None
        cast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}

        def go(number: int) -> T:
            # a thread has a grad mode, an autocast and a stream of its own; a cache would mix up the passes' weights
            passing = torch.autocast(kind, **cast, cache_enabled=False)
            with self._until_its_end(number), torch.no_grad(), passing, torch.cuda.stream(stream):
                self._await(number)
                return work()

        with ThreadPoolExecutor(1) as pool:
            beside = [pool.submit(go, number) for number in range(1, count)]
            try:
                found = [go(0)]
            except _OtherFailed:
                found = []
            return found + [other.result() for other in beside]

    def pass_on(self) -> None:
        """The other pass's turn, if there is one, and then again this thread's."""
        me = self.number
        assert me is not None
        with self._condition:
            if 1 - me in self._over:
                return
            self._turn = 1 - me
            self._condition.notify_all()
        self._await(me)

    def _await(self, me: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == me or self._failed)
        if self._failed:
            raise _OtherFailed

    @contextlib.contextmanager
    def _until_its_end(self, me: int) -> Iterator[None]:
        failed = True
        try:
            with self.under_way(me):
                yield
            failed = False
        finally:
            with self._condition:
                self._over.add(me)
                self._turn, self._failed = 1 - me, self._failed or failed
                self._condition.notify_all()


class _OtherFailed(Exception):
    """The pass beside this one has failed, and says why."""
