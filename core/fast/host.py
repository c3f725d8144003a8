"""The exchange of parameters between a GPU and outer state in the host's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import outer
from ..flat import Bucket
from ..guard import all_finite


class HostCopies:
    """The parameters' copies in the host's memory, through which a GPU and the host exchange; on a CPU plain copies.

    The copying is queued in a stream of its own: the compute stream waits for it, the host does not. It is waited for
    in the background, like a collective.
    """

    def __init__(self, buckets: list[Bucket], device: torch.device):
        pinned = torch.cuda.is_available()
        self._buckets, self._device = buckets, device
        self._copies = [
            [torch.empty(p.shape, dtype=p.dtype, device="cpu", pin_memory=pinned) for p in b.params] for b in buckets
        ]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    def swap(self, *, snapshot: bool) -> Tensor:
        """Queues p -> the host's copy, if that is wanted, and g -> p; whether p was not finite then, 0-d."""
        spoilt = torch.zeros((), dtype=torch.bool, device=self._device)
        if snapshot:
            spoilt = ~all_finite(p for b in self._buckets for p in b.params)
            self.snapshot()
        self.mix(1.0)
        return spoilt

    def snapshot(self) -> None:
        """Queues p -> the host's copy."""
        with self._own_stream():
            for bucket, copies in zip(self._buckets, self._copies, strict=True):
                for p, on_host in zip(bucket.params, copies, strict=True):
                    on_host.copy_(p, non_blocking=True)

    def mix(self, share: float) -> None:
        """Queues p <- share g + (1 - share) p."""
        with self._own_stream():
            for bucket in self._buckets:
                for p, g in zip(bucket.params, bucket.payload_views, strict=True):
                    if share == 1:
                        p.copy_(g, non_blocking=True)
                    else:
                        x = g.to(p.device, non_blocking=True)
                        p.copy_(outer.mix(x, p.to(x.dtype), share))

    def take_differences(self, *, rounded: bool) -> None:
        """g <- g - p from the host's copies, once both are through. rounded: g as the parameters' dtype holds it."""
        for bucket, copies in zip(self._buckets, self._copies, strict=True):
            for g, on_host in zip(bucket.payload_views, copies, strict=True):
                if rounded:
                    g.copy_(g.to(on_host.dtype))
                g.sub_(on_host)

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
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
