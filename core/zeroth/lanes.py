"""What BlockStream is made of: a block's tensors in one piece, copies beside the computation, and two passes' turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CollectiveError
from ..flat import pinned, unique
from ..groups import gather_parts
from .replay import Update
from .weights import Weights

ALIGNED = 64  # bytes, where a tensor begins in a block
Hold = Callable[[int], None]


def aligned(nbytes: int, to: int = ALIGNED) -> int:
    """As many bytes or a little more, a multiple of `to`."""
    return -(-nbytes // to) * to


class Block:
    """A module whose tensors lie one after the other in one piece of the host's memory, of which each of `parts`
    workers may upload an equal part."""

    def __init__(self, module: nn.Module, weights: Weights, *, pin: bool, parts: int):
        numbers = {id(p): i for i, p in enumerate(weights.params)}
        self.tensors = unique([*module.parameters(), *module.buffers()])
        self.numbers = [numbers.get(id(t)) for t in self.tensors]  # in weights; None: not trained
        self._places, self.nbytes = [], 0
        for t in self.tensors:
            self._places.append(self.nbytes)
            self.nbytes += aligned(t.nbytes)
        self.nbytes = aligned(self.nbytes, ALIGNED * parts)
        self.host = pinned(self.nbytes, torch.uint8) if pin else torch.empty(self.nbytes, dtype=torch.uint8)
        for t, view in zip(self.tensors, self.views(self.host), strict=True):
            view.copy_(t.data)
            t.data = view
        self.behind: list[Update] = []  # not applied yet

    def views(self, flat: Tensor) -> list[Tensor]:
        """The block's tensors in a flat one of bytes."""
        places = zip(self.tensors, self._places, strict=True)
        return [flat[at : at + t.nbytes].view(t.dtype).view(t.shape) for t, at in places]

    def show(self, views: Sequence[Tensor]) -> None:
        """From here on the module computes with these."""
        for t, view in zip(self.tensors, views, strict=True):
            t.data = view

    def versions(self) -> list[int]:
        """They change where somebody writes into the parameters, as load_state_dict does."""
        return [t._version for t in self.tensors]


class Lane:
    """Copies beside the computation, one after the other: a thread on a CPU, a stream on a GPU.

    hold: called with a copy's bytes when it is done, to emulate a slow bus on a CPU. Attributes: bytes, seconds (on a
    CPU), of this worker's part of all copies.
    """

    def __init__(self, device: torch.device, hold: Hold | None):
        self._device, self._hold = device, hold
        self.bytes, self.seconds = 0, 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1)

    def copy(self, target: Tensor, source: Tensor, after: Any = None, share: dist.ProcessGroup | None = None) -> Any:
        """Begins a copy, after another lane's and what the device computes so far; returns what `wait` takes.

        share: each worker of this group copies its part of `source`, of which all have the same, and sends it to the
        others.
        """
        part = own_part(target, share)
        source = source[part]
        self.bytes += source.nbytes
        if self._thread is not None:
            return self._thread.submit(self._copy, target, part, source, after, share)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target[part].copy_(source, non_blocking=True)
            if share is not None:
                gather(target, share)
            return self._stream.record_event()

    def _copy(
        self, target: Tensor, part: slice, source: Tensor, after: Future[None] | None, share: dist.ProcessGroup | None
    ) -> None:
        if after is not None:
            after.result()
        began = time.perf_counter()
        target[part].copy_(source)
        if self._hold is not None:
            self._hold(source.nbytes)
        self.seconds += time.perf_counter() - began
        if share is not None:
            gather(target, share)


def own_part(flat: Tensor, share: dist.ProcessGroup | None) -> slice:
    """Which of its bytes this worker copies, of those of the group; all without one."""
    if share is None:
        return slice(None)
    size = flat.nbytes // dist.get_world_size(share)
    return slice(dist.get_rank(share) * size, (dist.get_rank(share) + 1) * size)


def gather(flat: Tensor, share: dist.ProcessGroup) -> None:
    """Fills in the other workers' parts of a flat tensor."""
    try:
        for work in gather_parts(flat, share)[0]:
            work.wait()
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {dist.get_rank()}: another worker's part of a block did not come: "
            f"{str(error).strip().partition(chr(10))[0]}"
        ) from None


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The caller's on a GPU; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def wait(copy: Any, device: torch.device, *, host: bool = False) -> None:
    """Until a copy is through: the host on a CPU, or where it asks for that; else the GPU's current stream."""
    if isinstance(copy, Future):
        copy.result()
    elif copy is not None and host:
        copy.synchronize()
    elif copy is not None:
        torch.cuda.current_stream(device).wait_event(copy)


class Turns:
    """Two passes through a model take turns: only one of them runs at a time."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._left: set[int] = set()
        self._failed = False

    def begin(self, me: int) -> None:
        """Waits for this pass's first turn."""
        with self._condition:
            self._await(me)

    def pass_on(self, me: int) -> None:
        """The other's turn, and then again this one's."""
        with self._condition:
            if 1 - me not in self._left:
                self._turn = 1 - me
                self._condition.notify_all()
                self._await(me)

    def leave(self, me: int, *, failed: bool) -> None:
        with self._condition:
            self._left.add(me)
            self._failed |= failed
            self._turn = 1 - me
            self._condition.notify_all()

    def _await(self, me: int) -> None:
        self._condition.wait_for(lambda: self._turn == me or self._failed)
        if self._failed:
            raise OtherFailed


class OtherFailed(Exception):
    """The pass beside this one has failed, and says why."""
