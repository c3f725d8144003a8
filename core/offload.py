"""Copies between a GPU and the host that neither of them waits for: the way to outer state in the host's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Arrival:
    """Copies between a GPU and the host in a stream of their own; to wait for like a collective. No-op on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
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
