"""The live parameters and g, the copy in which the next outer iterate is gathered: they swap where they lie, or between
a GPU and the host's pinned memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import outer
from ..checkpoints.checkpoint import all_finite
from ..errors import UserError
from ..flat import Bucket, copy, group_pieces, views
from ..groups import Stage


class Live:
    """Both on one device. g lies in the payloads."""

    def __init__(self, buckets: list[Bucket]):
        self._buckets = buckets

    def swap(self, *, snapshot: bool) -> Tensor:
        """p <- g, and g <- g - p where a snapshot is wanted, a cache-sized segment at a time. Whether that is not
        finite, 0-d."""
        finite = torch.ones((), dtype=torch.bool, device=self._buckets[0].flat.device)
        for p, g in self._pieces():
            difference = [a - b for a, b in zip(g, p, strict=True)] if snapshot else g
            if snapshot:
                finite &= outer.norm(difference).isfinite()
            copy(p, g)
            copy(g, difference)
        return ~finite

    def own_stream(self) -> contextlib.AbstractContextManager[None]:
        """That of copies between a GPU and the host, of which there are none."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Nothing that is queued still reads g: it may be written to anew."""

    def differences(self) -> Iterator[Stage]:
        """g holds them already."""
        yield from ()

    def _pieces(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The parameters and g, in the same shapes, as much at a time as a cache holds."""
        for bucket in self._buckets:
            start = 0
            for pieces in group_pieces(bucket.params, outer.segment_size(bucket.flat)):
                n = sum(p.numel() for p in pieces)
                yield pieces, views(bucket.flat[start : start + n], pieces)
                start += n


class HostCopies:
    """As Live, g being in the host's memory: a GPU and the host exchange through copies of the parameters there; on a
    CPU plain copies.

    The copying is queued in a stream of its own: the compute stream waits for it, the host does not. It is waited for
    in the background, like a collective.
    """

    def __init__(self, buckets: list[Bucket], device: torch.device):
        self._buckets, self._device = buckets, device
        self._copies = [views(pinned(b.numel, b.dtype), b.params) for b in buckets]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    def swap(self, *, snapshot: bool) -> Tensor:
        """Queues p -> the host's copy, if that is wanted, and g -> p; whether p was not finite then, 0-d."""
        spoilt = torch.zeros((), dtype=torch.bool, device=self._device)
        if snapshot:
            spoilt = ~all_finite(p for b in self._buckets for p in b.params)
        with self.own_stream():
            for bucket, copies in zip(self._buckets, self._copies, strict=True):
                for p, g, on_host in zip(bucket.params, bucket.payload_views, copies, strict=True):
                    if snapshot:
                        on_host.copy_(p, non_blocking=True)
                    p.copy_(g, non_blocking=True)
        return spoilt

    def settle(self) -> None:
        """Waits until nothing that is queued still reads or writes the host's memory."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()  # which waits for its own

    def differences(self) -> Iterator[Stage]:
        """g <- g - p from the host's copies, once both are through."""
        yield [self], 0
        for bucket, copies in zip(self._buckets, self._copies, strict=True):
            for g, on_host in zip(bucket.payload_views, copies, strict=True):
                g.sub_(on_host)

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """What is queued in here follows the compute stream, which then waits for it."""
        if self._stream is None:
            yield
            return
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            yield
            self._event = torch.cuda.Event()
            self._event.record(self._stream)
        compute.wait_stream(self._stream)

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, timeout: Any = None) -> None:
        if self._event is not None:
            self._event.synchronize()


def beside(flag: Tensor, device: torch.device) -> Tensor:
    """A 0-d truth value on `device`; one of the host's goes along with a kernel, for a copy would make it wait."""
    return flag if flag.device == device else torch.full((), bool(flag), device=device)


PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros in the host's memory, [numel], pinned where there is a GPU: copies to and from it are queued, and no host
    waits. Of exactly that size: torch would round it up to a power of two, and keep it.

    UserError where the memory cannot be pinned.
    """
    nbytes = numel * dtype.itemsize
    if not nbytes or not torch.cuda.is_available():
        return torch.zeros(numel, dtype=dtype)
    # lives as long as what lies in it; not mmap itself, which lets go of its memory before it tells so
    memory = (ctypes.c_byte * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    held = torch.frombuffer(memory, dtype=dtype)
    cudart: Any = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(held.data_ptr(), nbytes, PORTABLE)):
        raise UserError(f"{nbytes} bytes of the host's memory cannot be pinned (CUDA error {code}): leave out offload")
    weakref.finalize(memory, _unpin, held.data_ptr(), torch.cuda.current_device()).atexit = False
    return held


def _unpin(address: int, device: int) -> None:
    """Once no copy that is queued uses the memory."""
    torch.cuda.synchronize(device)
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)
