"""Runs a function on several real processes, for tests and measurements here and in a user's own project.

link.py emulates slow links.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# What the server that forks the ranks imports, once, with what the first optimiser step would import. Modules of your
# own may be added before the first call of run_distributed: each rank imports the rest by itself.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", __package__]

BARRIER = "TORCH_DIST_INIT_BARRIER"


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    expect_death: tuple[int, ...] = (),
    backend: str = "gloo",
) -> list[Any]:
    """Runs fn(rank, world_size, *args) on `world_size` processes; returns their results in rank order.

    backend: "gloo", or "cpu:gloo,cuda:nccl". With NCCL several ranks may share one GPU: each process counts as a
    machine of its own (NCCL_HOSTID), and they talk over sockets on loopback. They take turns on the GPU, so times mean
    little.

    fn must be importable (defined at a module's top level) and return something that pickles. The rendezvous is a
    file, so parallel tests share no port. When a rank fails, RuntimeError shows the traceback of the first that did:
    its peers' "connection reset" hides the cause. TimeoutError names the ranks that still run after `timeout`
    seconds; all are killed. Ranks in `expect_death` may end without a result; theirs is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = _context()
        job = (fn, world_size, args, folder, timeout, not expect_death, backend)
        workers = [context.Process(target=_worker, args=(rank, *job), daemon=True) for rank in range(world_size)]
        for worker in workers:
            worker.start()
        late = _join(workers, time.monotonic() + timeout)
        files = {rank: Path(folder, f"rank{rank}") for rank in range(world_size)}
        told = {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}
    if errors := [(at, text) for at, text, _ in told.values() if text]:
        raise RuntimeError(min(errors)[1])
    if late := [rank for rank in late if rank not in told]:  # others only waited for them
        raise TimeoutError(f"rank {', '.join(map(str, late))} still running after {timeout:g} s")
    if lost := [rank for rank in files if rank not in told and rank not in expect_death]:
        raise RuntimeError(f"rank {lost[0]} died without a result or an error")
    return [told[rank][2] if rank in told else None for rank in files]


def _context() -> Any:
    """A forkserver that has imported what is in PRELOAD."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _worker(
    rank: int,
    fn: Callable[..., Any],
    world_size: int,
    args: Any,
    folder: str,
    timeout: float,
    stay: bool,
    backend: str,
) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "nccl" in backend:
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "=lo", "NCCL_MNNVL_ENABLE": "0"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        with _barrier_behind():
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        _tell(Path(folder, f"rank{rank}"), "", fn(rank, world_size, *args))
        if stay:  # nobody leaves while a peer still needs it
            with contextlib.suppress(RuntimeError):  # a peer that failed tells its own story
                dist.barrier() if backend == "gloo" else dist.all_reduce(torch.zeros(1))  # NCCL's would take a GPU
            dist.destroy_process_group()
    except BaseException:
        _tell(Path(folder, f"rank{rank}"), f"rank {rank}:\n{traceback.format_exc()}", None)
        os._exit(1)


@contextlib.contextmanager
def _barrier_behind() -> Iterator[None]:
    """No rank leaves init_process_group before all have reached each other: one that calls destroy_process_group() at
    once would close connections that others still make, which fails there with gloo's "Connection closed by peer"."""
    before = os.environ.get(BARRIER)
    os.environ[BARRIER] = "1"
    yield
    os.environ.pop(BARRIER)
    os.environ |= {BARRIER: before} if before is not None else {}


def _tell(file: Path, error: str, result: Any) -> None:
    """When and how it ended, whole or not at all: the process may be killed here."""
    file.with_suffix(".tmp").write_bytes(pickle.dumps((time.time(), error, result)))
    file.with_suffix(".tmp").rename(file)


def _join(workers: list[Any], deadline: float) -> list[int]:
    """Waits for all; returns the ranks that were still running at the deadline and kills them."""
    while running := [w for w in workers if w.exitcode is None]:
        if time.monotonic() > deadline:
            break
        wait([w.sentinel for w in running], timeout=0.1)
        if any(w.exitcode for w in workers):  # one has failed: the others get a moment to say why
            deadline = min(deadline, time.monotonic() + 15.0)
    late = [rank for rank, w in enumerate(workers) if w.exitcode is None]
    for worker in workers:
        worker.kill()
        worker.join()
    return late
