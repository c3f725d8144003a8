"""Forked workers, and the harm that is planned for some of them."""

from __future__ import annotations

import hashlib
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cluster import hold_port
from core.elastic.launch import Agent

if TYPE_CHECKING:
    from bench.cluster.nodes import Cluster

Action = Callable[..., None]
PHASES = ("local", "boundary", "flight", "checkpoint", "evaluation")  # in which a worker may be killed
STREAMS = ("reader gone", "full", "closed")  # what may happen to standard output and error


def work(module: str, arguments: Sequence[str], harm: dict[str, Any], log: str) -> None:
    """Runs `python -m module arguments`.

    Args:
        module: The module to run.
        arguments: Its command line.
        harm: `ranks` are the ranks of the victims, in their first life. `phase` is one of PHASES or STREAMS, a signal's
            name, "disk" or "nan". `step` is the step after which the harm happens. `run` is the number of this start.
            `lives` is whether rounds are repeated after the loss of all workers. The victim waits until the run has
            `least` checkpoints.
        log: The file for the worker's output.
    """
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    rank, first = os.environ.get("RANK", "0"), os.environ.get("CO2_WORKER", ".0").endswith(".0")
    if first and int(rank) in harm.get("ranks", ()):
        arm(harm["phase"], harm["step"], Path(f"{log}.harm{rank}"), harm["least"])
    if (name := os.environ.get("CO2_WORKER")) and "run" in harm:
        life = name.partition(".")[2] if harm["lives"] else ""
        write_rounds(Path(log).parent, f"{harm['run']}{life}", f"{name}.{rank}")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def write_rounds(folder: Path, run: str, name: str) -> None:
    """Lets the worker of this name write a checksum of the outer iterate of every round of a run into the folder."""
    from core.local_update import LocalUpdateMethod

    written = 0

    def closed(method: Any, *_: Any) -> None:
        nonlocal written
        if method.rounds == written:  # finish() waits for what the round before it has sent
            return
        written, state = method.rounds, method.state["outer_iterate"]
        digest = hashlib.sha1(b"".join(flat.detach().cpu().numpy().tobytes() for flat in state)).hexdigest()
        with open(folder / f"rounds{run}.{name}", "a") as file:
            file.write(f"{run} {method.rounds} {digest} {time.monotonic()}\n")

    wrap(LocalUpdateMethod, "_boundary", behind=closed)


def different_rounds(folder: Path) -> list[str]:
    """Returns the rounds in which workers' outer iterates differ, as RUN.ROUND. A run may be stopped and resumed."""
    digests: dict[str, set[str]] = {}
    for file in folder.glob("rounds*"):
        for line in file.read_text().splitlines():
            run, number, digest, _ = line.split()
            digests.setdefault(f"{run}.{number}", set()).add(digest)
    return sorted(number for number, found in digests.items() if len(found) > 1)


def arm(phase: str, after: int, trace: Path, least: int = 0) -> None:
    """Lets the harm happen in this process, once, in the first `phase` after step `after`, with `least` checkpoints.

    The file `trace` exists once it has happened. A stream is full or closed from the start.
    """
    import torch

    from core.comm import AsyncAllReduce
    from training.loop.run import Run

    step, reads, me = 0, lose(phase), os.getpid()

    def due(*phases: str) -> bool:
        found = phase in phases and step > after and not trace.exists()
        found = found and len([*trace.parent.glob("run/checkpoints/step?????????")]) >= least
        if found:
            trace.write_text(f"{phase} {step}")
        return found

    def die_in(where: str) -> None:
        if due(where):
            os.kill(me, signal.SIGKILL)

    def stepped(run: Run, closed: bool, *_: Any) -> None:
        nonlocal step
        step = run.step + 1
        if closed:
            die_in("boundary")
        if due("SIGSTOP"):
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {me}"])
            os.kill(me, signal.SIGSTOP)
        elif due("reader gone"):
            os.close(reads)
        elif due("SIGTERM", "SIGINT", "SIGUSR1"):
            os.kill(me, signal.Signals[phase])

    def saves(*_: Any) -> None:
        if due("disk"):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))

    def learns(loss: torch.Tensor, *_: Any) -> None:
        die_in("local")
        if due("nan"):
            loss.register_hook(lambda gradient: gradient * float("nan"))

    wrap(Run, "after_step", stepped)
    wrap(torch.Tensor, "backward", learns)
    wrap(Run, "save", saves)
    wrap(os, "fsync", lambda *_: die_in("checkpoint"))  # the file is whole, but does not have its name yet
    wrap(Run, "sum_tensor", lambda *_: die_in("evaluation"))
    wrap(AsyncAllReduce, "_begin", behind=lambda *_: die_in("flight"))


def lose(phase: str) -> int:
    """Closes the standard streams, or makes them full, or a pipe whose reading end it returns."""
    reads, writes = os.pipe() if phase == "reader gone" else (-1, os.open("/dev/full", os.O_WRONLY))
    if phase == "closed":
        sys.stdin = sys.stdout = sys.stderr = None
        os.closerange(0, 3)
    elif phase in STREAMS:
        for stream in (1, 2):
            os.dup2(writes, stream)
    return reads


def wrap(owner: Any, name: str, before: Action = lambda *_: None, behind: Action = lambda *_: None) -> None:
    """Makes owner.name call `before` and `behind` as well, with its own arguments."""
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = inner(*args, **kwargs)
        behind(*args)
        return result

    setattr(owner, name, outer)


# -- crews and groups -------------------------------------------------------------------------------------------------


Target = Callable[..., None]


class Forked:
    """A worker's process with the methods of subprocess.Popen."""

    def __init__(self, process: Any):
        self.process = process
        process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.process.pid, sig)


class Crew(Agent):
    """Elastic workers that each run target(*args), under a launcher in this process.

    Args:
        context: A context of multiprocessing.
        target: The function that each worker runs.
        args: Its arguments.
        workers: Their number.
        restarts: How often each worker may be restarted.
        cluster: If given, each worker has its own node, and the launcher has one more.
        late: Seconds after which all are killed and timed_out is set.
        watch: Called again and again.
        island: Ranks of each worker, of which `workers` counts each.
        etcd: URL of an EtcdStore, which then keeps the store.
    """

    def __init__(
        self,
        context: Any,
        target: Target,
        args: Sequence[Any],
        workers: int,
        restarts: int = 0,
        *,
        cluster: Cluster | None = None,
        late: float = 120.0,
        watch: Callable[[], None] = lambda: None,
        island: int = 1,
        etcd: str = "",
    ):
        def spawn(env: dict[str, str]) -> Forked:
            return Forked(context.Process(target=_worker, args=(env, place(cluster, int(env["RANK"])), target, args)))

        host = cluster.address(workers) if cluster else "127.0.0.1"
        super().__init__(spawn, workers, restarts, host=host, island=island, etcd=etcd)
        self.watch, self.end, self.timed_out = watch, time.monotonic() + late, False

    def look(self) -> None:
        """See Agent."""
        super().look()
        self.watch()
        if time.monotonic() > self.end and self.processes:
            self.timed_out, self.restarts = True, 0
            for process in self.processes.values():
                process.kill()


def group(
    context: Any,
    target: Target,
    args: Sequence[Any],
    workers: int,
    *,
    cluster: Cluster | None = None,
    late: float = 120.0,
    patience: float = 60.0,
    watch: Callable[[], None] = lambda: None,
) -> tuple[int, bool]:
    """Runs one group of workers, as torchrun starts it, until all have ended.

    Workers are killed after `late` seconds, or `patience` seconds after one has failed.

    Returns:
        The first failure's status, and whether workers had to be killed.
    """
    held = hold_port()
    port = 29500 if cluster else held.getsockname()[1]
    host = cluster.address(0) if cluster else "127.0.0.1"
    shared = {"WORLD_SIZE": str(workers), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    started = []
    for rank in range(workers):
        env = shared | {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        started.append(Forked(context.Process(target=_worker, args=(env, place(cluster, rank), target, args))))
    status, hung, end = 0, True, time.monotonic() + late
    try:
        while time.monotonic() < end and (hung := any(p.poll() is None for p in started)):
            watch()
            failed = [p.returncode for p in started if p.returncode]
            if failed and not status:
                status, end = int(failed[0]), min(end, time.monotonic() + patience)
            time.sleep(0.02)
    finally:
        for process in started:
            process.kill()
        held.close()
    return status or next((p.returncode for p in started if p.returncode), 0), hung


def place(cluster: Cluster | None, node: int) -> str:
    """The path of a node's network namespace, or an empty string without a cluster."""
    return cluster.path(node) if cluster else ""


def _worker(env: dict[str, str], network: str, target: Target, args: Sequence[Any]) -> None:
    os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"} | env)
    if network:
        from bench.cluster.nodes import enter

        enter(os.open(network, os.O_RDONLY))
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "e0"
    import torch

    torch.set_num_threads(1)
    target(*args)
