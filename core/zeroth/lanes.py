"""Copies between the host and the device beside the computation, of which the workers of a node may share each."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.stages import gather_parts
from ..errors import CollectiveError

Hold = Callable[[int], None]


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


def wait(copy: Any, device: torch.device, *, host: bool = False) -> None:
    """Until a copy is through: the host on a CPU, or where it asks for that; else the GPU's current stream."""
    if isinstance(copy, Future):
        copy.result()
    elif copy is not None and host:
        copy.synchronize()
    elif copy is not None:
        torch.cuda.current_stream(device).wait_event(copy)
