"""The loading processes of a DataLoader. They ignore stop signals, and end with their worker."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def shield(loader: Any) -> Any:
    """Makes a DataLoader's processes ignore stop signals, which Slurm sends to all processes of a node.

    They end with their worker, which decides when to stop. Returns the loader.
    """
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's loaders hold torch's
    before = getattr(inner, "worker_init_fn", None)
    if getattr(inner, "num_workers", 0) and getattr(before, "func", None) is not begin_loading:
        inner.worker_init_fn = functools.partial(begin_loading, before)
    return loader


def begin_loading(then: Callable[[int], Any] | None, number: int) -> None:
    """Makes this process, a loading process, ignore stop signals. Then calls `then` with its number."""
    for stop in STOPS:
        signal.signal(stop, _ignore)  # not SIG_IGN, which programs that a data set starts would inherit
    if then is not None:
        then(number)


def _ignore(*_: Any) -> None:
    """Handles a signal by doing nothing."""


@atexit.register  # runs before multiprocessing's own handler, which would wait for processes that ignore its SIGTERM
def end_loading() -> None:
    """Ends this process's loading processes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would report their end as a failure
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
