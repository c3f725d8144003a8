"""Runs a function on the ranks of an emulated cluster, forked from a process that has imported torch once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from bench.cluster.nodes import Cluster, die_with, require_namespaces
from core.errors import UserError

POLL = 0.2  # seconds between two looks at the ranks
GRACE = 2.0  # seconds that the others have to say why, once one has failed


def prepare_to_fork(*, namespaces: bool = False) -> None:
    """Before any work of a process whose ranks are forked: threads do not survive that, imports need not be repeated.

    namespaces: whether the ranks sit on a Cluster; see require_namespaces.
    """
    if namespaces:
        require_namespaces()
    import torch
    import torch._dynamo  # the first optimiser imports it

    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_ranks(
    fn: Callable[..., Any],
    cluster: Cluster | None,
    ranks_per_node: int,
    nodes: int,
    *args: Any,
    timeout: float,
    until: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Runs fn(*args) on `nodes` * `ranks_per_node` forked processes; returns their results in rank order.

    Each rank sits in its node (cluster None: all on loopback) and finds RANK, WORLD_SIZE, MASTER_ADDR and so on in its
    environment; fn calls init_process_group itself. The caller has imported torch and started no threads. The
    first error of any rank is raised here, a UserError as it is, any other as RuntimeError with its traceback;
    TimeoutError after `timeout` seconds. Once until(), which is asked again and again, is true, what the ranks would
    still do is not needed, and nothing is returned. Either way all ranks are killed.
    """
    if cluster is not None and nodes > cluster.nodes:
        raise UserError(f"nodes={nodes}: the cluster has {cluster.nodes}")
    context = multiprocessing.get_context("fork")
    held = cluster.inside(0, hold_port) if cluster else hold_port()
    with held, tempfile.TemporaryDirectory() as folder:
        environment = _environment(cluster, ranks_per_node, nodes, held.getsockname()[1])
        jobs = [(rank, fn, args, cluster, environment, Path(folder)) for rank in range(nodes * ranks_per_node)]
        workers = [context.Process(target=_rank, args=(os.getpid(), *job), daemon=True) for job in jobs]
        try:
            for worker in workers:
                worker.start()
            late = _wait(workers, time.monotonic() + timeout, until)
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.kill()
                    worker.join()
        if late is None:
            return []
        _raise_first_error(Path(folder))
        if late:
            raise TimeoutError(f"rank {', '.join(map(str, late))} still running after {timeout:g} s")
        return [_result(Path(folder), rank, worker.exitcode) for rank, worker in enumerate(workers)]


def hold_port() -> socket.socket:
    """A socket bound to a free TCP port, for a server that another process will start there.

    While it is open, the system gives the port to nobody who asks for any free one, nor to an outgoing connection;
    a server that asks for it by its number gets it, if it sets SO_REUSEADDR (TCPStore does).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _environment(cluster: Cluster | None, ranks_per_node: int, nodes: int, port: int) -> dict[str, str]:
    """What all ranks have in common, as torchrun would set it."""
    address, interface = (cluster.address(0), cluster.interface) if cluster else ("127.0.0.1", "lo")
    return {
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }


def _rank(
    parent: int,
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    cluster: Cluster | None,
    environment: dict[str, str],
    folder: Path,
) -> None:
    try:
        die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the caller's handler
        local_world_size = int(environment["LOCAL_WORLD_SIZE"])
        if cluster is not None:
            cluster.enter(rank // local_world_size)
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank % local_world_size))
        if cluster is not None and cluster.nics > 1:  # a link of its own, as a GPU has the NIC beside it
            os.environ["GLOO_SOCKET_IFNAME"] = cluster.interfaces[rank % local_world_size % cluster.nics]
        _write(folder / f"result{rank}", pickle.dumps(fn(*args)))
    except BaseException as error:
        message = error if isinstance(error, UserError) else RuntimeError(f"rank {rank}:\n{traceback.format_exc()}")
        _write(folder / f"error{rank}", pickle.dumps((time.time(), message)))
        os._exit(1)


def _write(path: Path, data: bytes) -> None:
    path.with_suffix(".tmp").write_bytes(data)
    path.with_suffix(".tmp").rename(path)


def _wait(workers: list[Any], deadline: float, until: Callable[[], bool]) -> list[int] | None:
    """Waits for all; returns the ranks that still run at the deadline, or a while after one has failed.

    None: until() has ended the waiting.
    """
    failed = False
    while running := [w for w in workers if w.exitcode is None]:
        if time.monotonic() > deadline:
            break
        if until():
            return None
        wait([w.sentinel for w in running], timeout=POLL)
        if not failed and any(w.exitcode for w in workers):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
    return [] if failed else [rank for rank, w in enumerate(workers) if w.exitcode is None]


def _raise_first_error(folder: Path) -> None:
    errors = []
    for path in folder.glob("error*"):
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # a .tmp, cut short by the kill
            errors.append(pickle.loads(path.read_bytes()))
    if errors:
        raise min(errors, key=lambda error: error[0])[1]


def _result(folder: Path, rank: int, status: int | None) -> Any:
    path = folder / f"result{rank}"
    if not path.exists():
        raise RuntimeError(f"rank {rank} died without a result or an error, exit status {status}")
    return pickle.loads(path.read_bytes())
