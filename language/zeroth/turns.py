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
        self._turn, self._going, self._failed = 0, set[int](), False  # whose turn it is; the passes that have not ended

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
        self._turn, self._going, self._failed = 0, set(range(count)), False
        kind = self._device.type
        stream = torch.cuda.current_stream(self._device) if kind == "cuda" else None
        cast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}

        def go(number: int) -> T:
            # a thread has a grad mode, an autocast and a stream of its own; a cache would mix up the passes' weights
            passing = torch.autocast(kind, **cast, cache_enabled=False)
            try:
                with self.under_way(number), torch.no_grad(), passing, torch.cuda.stream(stream):
                    self._await(number)
                    return work()
            except BaseException:
                self._failed = True
                raise
            finally:
                self._going.discard(number)
                self._give(1 - number)

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
        if 1 - me in self._going:
            self._give(1 - me)
            self._await(me)

    def _give(self, turn: int) -> None:
        with self._condition:
            self._turn = turn
            self._condition.notify_all()

    def _await(self, me: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == me or self._failed)
        if self._failed:
            raise _OtherFailed


class _OtherFailed(Exception):
    """The pass beside this one has failed, and says why."""
