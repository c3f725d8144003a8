"""Where a model's blocks lie: all in the host's memory, and of those that compute next, copies on the device.

Copies go beside the computation; the workers of a node may share each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.errors import CollectiveError
from core.flat import unique
from core.groups import gather_parts

from .replay import Update
from .weights import Weights

Hold = Callable[[int], None]
ALIGNED = 64  # bytes, where a tensor begins in a block


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
        source = own_part(source, share)
        self.bytes += source.nbytes
        if self._thread is not None:
            return self._thread.submit(self._copy, target, source, after, share)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            own_part(target, share).copy_(source, non_blocking=True)
            if share is not None:
                gather(target, share)
            return self._stream.record_event()

    def _copy(
        self, target: Tensor, source: Tensor, after: Future[None] | None, share: dist.ProcessGroup | None
    ) -> None:
        if after is not None:
            after.result()
        began = time.perf_counter()
        own_part(target, share).copy_(source)
        if self._hold is not None:
            self._hold(source.nbytes)
        self.seconds += time.perf_counter() - began
        if share is not None:
            gather(target, share)


def own_part(flat: Tensor, share: dist.ProcessGroup | None) -> Tensor:
    """The part that this worker copies, of those of the group; all without one."""
    return flat if share is None else flat.view(dist.get_world_size(share), -1)[dist.get_rank(share)]


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


def aligned(nbytes: int, to: int = ALIGNED) -> int:
    """As many bytes or a little more, a multiple of `to`."""
    return -(-nbytes // to) * to


class Block:
    """A module whose tensors lie one after the other in one piece of the host's memory, of which each of `parts`
    workers may upload an equal part. make_host: see BlockStream.

    Attributes: host, that piece, bytes [nbytes]; tensors, and numbers, which they have in Weights (None: not trained);
    behind, the updates that are not applied to it yet.
    """

    def __init__(self, module: nn.Module, weights: Weights, *, make_host: Callable[[int], Tensor], parts: int):
        self.tensors = unique([*module.parameters(), *module.buffers()])
        self.numbers = [weights.numbers.get(id(t)) for t in self.tensors]
        self._places, self.nbytes = [], 0
        for t in self.tensors:
            self._places.append(self.nbytes)
            self.nbytes += aligned(t.nbytes)
        self.nbytes = aligned(self.nbytes, ALIGNED * parts)
        self.host = make_host(self.nbytes)
        for t, view in zip(self.tensors, self.views(self.host), strict=True):
            view.copy_(t.data)
            t.data = view
        self.behind: list[Update] = []

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


class _Ahead(NamedTuple):
    """A block whose upload has begun. copy: as Lane.copy returns it; versions: the block's, of what is uploaded."""

    number: int
    copy: Any
    versions: list[int]


class Window:
    """Memory on the device for three blocks: the one that computes, the one after it, which is uploaded meanwhile, and
    a perturbed copy of the first.

    hold, share: see BlockStream. Attributes: at, the number of the block that computes, -1 before the first; slot, its
    bytes; scratch, room for the copy, free while no block computes; nbytes, of all; shares, whether uploads are shared
    now; upload, offload, the Lanes; waited, seconds (on a CPU) that the computation waited for uploads.
    """

    def __init__(
        self, blocks: Sequence[Block], device: torch.device, hold: Hold | None, share: dist.ProcessGroup | None
    ):
        self._blocks, self._device, self._share = blocks, device, share
        self.upload, self.offload = Lane(device, hold), Lane(device, hold)
        self.waited = 0.0
        self.shares = True
        size = max(block.nbytes for block in blocks)
        *self._slots, self.scratch = torch.empty(3, size, dtype=torch.uint8, device=device)
        self.nbytes = 3 * size
        self.at = -1
        self._slot = 1  # which of the two it is in; the next block comes into the other
        self._ahead: _Ahead | None = None
        self._offloaded: Any = None  # the newest copy to the host

    @property
    def slot(self) -> Tensor:
        """Bytes [nbytes of the block]."""
        return self._slots[self._slot][: self._blocks[self.at].nbytes]

    def move_on(self) -> None:
        """The next block is here, uploaded, and the upload of the one after it begins; after the last comes the first.

        A lone block is not uploaded anew before it is offloaded.
        """
        number, count = (self.at + 1) % len(self._blocks), len(self._blocks)
        if self._ahead is None:
            self._begin(number)
        assert self._ahead is not None and self._ahead.number == number
        began = time.perf_counter()
        wait(self._ahead.copy, self._device)
        self.waited += time.perf_counter() - began
        self._ahead, self._slot, self.at = None, 1 - self._slot, number
        if count > 1:
            self._begin((number + 1) % count)

    def begin_first(self) -> None:
        """Begins to upload the first block, unless it is on its way, and nobody has changed it since."""
        if self._ahead is not None and self._ahead.versions != self._blocks[0].versions():
            self.forget_ahead()
        if self._ahead is None:
            self._begin(0)

    def _begin(self, number: int) -> None:
        """Into the slot that is free once the last block there is offloaded, as are all that were before it."""
        block = self._blocks[number]
        slot = self._slots[1 - self._slot][: block.nbytes]
        copy = self.upload.copy(slot, block.host, self._offloaded, self._share if self.shares else None)
        self._ahead = _Ahead(number, copy, block.versions())

    def forget_ahead(self) -> None:
        """Ends the upload that is under way, of no use now."""
        if self._ahead is not None:
            wait(self._ahead.copy, self._device)
        self._ahead = None

    def keep(self) -> None:
        """Begins to offload the block that computes."""
        self._offloaded = self.offload.copy(self._blocks[self.at].host, self.slot)

    def close(self) -> None:
        """After the last block, or a pass that failed: all are on the host, and no other than the first is uploaded."""
        wait(self._offloaded, self._device, host=True)
        self._offloaded = None
        if self._ahead is not None and self._ahead.number != 0:
            self.forget_ahead()
        self.at = -1
