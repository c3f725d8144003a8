"""Runs a function on several real processes, for tests and measurements here and in your own project.

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
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Modules that the process which forks the ranks imports once, including the imports of the first optimizer step. You
# may add your own modules before the first call of run_distributed; each rank imports all other modules itself.
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
    """Runs fn(rank, world_size, *args) in `world_size` processes.

    The rendezvous is a file, so parallel tests share no port. With NCCL several ranks may share one GPU. Each process
    then counts as a machine of its own (NCCL_HOSTID), and the ranks communicate over loopback. They take turns on the
    GPU, so their times mean little.

    Args:
        fn: A function at a module's top level, so that it can be imported. Its result must pickle.
        world_size: Number of processes.
        *args: Further arguments of `fn`.
        timeout: Seconds after which all ranks are killed.
        expect_death: Ranks that may end without a result. Their result is None.
        backend: "gloo", or "cpu:gloo,cuda:nccl".

    Returns:
        The results, in rank order.

    Raises:
        RuntimeError: If a rank fails, with the traceback of the first that failed. Later errors, such as a peer's
            "connection reset", would hide the cause.
        TimeoutError: Names the ranks that were still running after `timeout` seconds.
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
    if late := [rank for rank in late if rank not in told]:  # the other ranks only waited for these
        raise TimeoutError(f"rank {', '.join(map(str, late))} still running after {timeout:g} s")
    if lost := [rank for rank in files if rank not in told and rank not in expect_death]:
        raise RuntimeError(f"rank {lost[0]} died without a result or an error")
    return [told[rank][2] if rank in told else None for rank in files]


def _context() -> Any:
    """Returns a forkserver that has imported the modules in PRELOAD."""
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
        # Without a barrier, a rank that calls destroy_process_group() at once closes connections that other ranks are
        # still making. gloo then fails there with "Connection closed by peer".
        os.environ[BARRIER] = "1"
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        del os.environ[BARRIER]
        _tell(Path(folder, f"rank{rank}"), "", fn(rank, world_size, *args))
        if stay:  # no rank leaves while another rank still needs it
            with contextlib.suppress(RuntimeError):  # a rank that failed reports its own error
                dist.barrier() if backend == "gloo" else dist.all_reduce(torch.zeros(1))  # NCCL's barrier needs a GPU
            dist.destroy_process_group()
    except BaseException:
        _tell(Path(folder, f"rank{rank}"), f"rank {rank}:\n{traceback.format_exc()}", None)
        os._exit(1)


def _tell(file: Path, error: str, result: Any) -> None:
    """Writes when and how a rank ended. The file appears whole or not at all, as the process may be killed here."""
    file.with_suffix(".tmp").write_bytes(pickle.dumps((time.time(), error, result)))
    file.with_suffix(".tmp").rename(file)


def _join(workers: list[Any], deadline: float) -> list[int]:
    """Waits for all processes. Returns the ranks that were still running at the deadline, and kills them."""
    while running := [w for w in workers if w.exitcode is None]:
        if time.monotonic() > deadline:
            break
        wait([w.sentinel for w in running], timeout=0.1)
        if any(w.exitcode for w in workers):  # one has failed: the other ranks get some time to report their errors
            deadline = min(deadline, time.monotonic() + 15.0)
    late = [rank for rank, w in enumerate(workers) if w.exitcode is None]
    for worker in workers:
        worker.kill()
        worker.join()
    return late
