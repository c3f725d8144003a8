"""Trains stand-ins, their workers forked from one process that has imported what they need: importing takes longer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

LATER = ("torch._dynamo", "torch.utils.tensorboard", "matplotlib.pyplot", "sklearn.datasets")  # imported when needed
GRACE = 15.0  # seconds in which the others may end where one worker has failed


def preload(modules: Iterable[str]) -> None:
    """Names the train scripts that the process that forks imports; before the first call of train."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", *LATER, *modules])


def train(module: str, arguments: Sequence[str], workers: int) -> None:
    """As `torchrun --standalone --nproc-per-node WORKERS -m MODULE ARGUMENTS` in the repository's root."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    given = (workers, port, module, *arguments)
    started: list[Any] = [context.Process(target=_worker, args=(rank, *given)) for rank in range(workers)]
    for worker in started:
        worker.start()
    try:
        _wait_for(started)
    except KeyboardInterrupt:  # from a terminal the workers have got it, too: they take the second one for the same
        for worker in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        for worker in started:
            worker.join()
        raise


def _wait_for(workers: Sequence[Any]) -> None:
    """Until all have ended; kills those that outlive one that has failed."""
    while running := [worker.sentinel for worker in workers if worker.exitcode is None]:
        failed = any(worker.exitcode for worker in workers)
        if not wait(running, timeout=GRACE if failed else None):
            for worker in workers:
                worker.kill()


def _worker(rank: int, workers: int, port: int, module: str, *arguments: str) -> None:
    os.chdir(Path(__file__).parents[1])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(workers), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.argv = [module, *arguments]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
