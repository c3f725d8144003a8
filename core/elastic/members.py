"""Membership of one worker: how it joins each generation of workers and gets its state.

The coordinator (launch.py) holds a store and lists the workers of each generation there. joining.py explains
generations.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..comm import set_timeout
from ..errors import CollectiveError, UserError, env_number
from ..groups import WORLD, is_alive
from ..guards.inputs import check_env
from .etcd import EtcdStore
from .sealed import SECRET, SealedStore

Came = Literal["planned", "failed", "empty"]  # why a worker leaves its generation; empty: it has no state yet
Report = dict[str, Any]  # a worker's report to the other workers of its next generation, as JSON

FORM_WITHIN = 0.5, 60.0  # seconds to connect to a listening worker before the next generation: at first, and at most
BEAT = 2.0  # seconds between a worker's signs of life
SENT, SUMMED, AGREED = range(3)  # phases of a sum over the workers


class Over(SystemExit):
    """The run ended before this worker could join it. The process ends with status 0."""


class WorkersChanged(Exception):
    """A worker was lost in a collective of the training script. All other workers must repeat the collective."""


class WatchedStore(Store):
    """The store while a generation connects. A wait ends once a worker is lost, however long gloo itself would wait.

    `waited_at` is when the last wait ended.
    """

    def __init__(self, store: Any, wait: Callable[[Callable[[], bool]], None]):
        super().__init__()
        self._store, self._wait, self.waited_at = store, wait, time.monotonic()

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        self._wait(lambda: self._store.check(keys))
        self.waited_at = time.monotonic()


class Members:
    """This worker's generation, and how it enters the next one.

    The environment's CO2_ISLAND and LOCAL_RANK give the number of ranks of this worker, and this rank's place there.

    Args:
        store: The store that the coordinator holds.
        name: This worker's name, which is never used again.
        timeout: Seconds until a silent worker is left out.

    Attributes:
        island: Number of ranks of this worker. If it has several, the default group connects them (island.py).
        island_rank: This rank's place among them.
        generation: Number of the generation, 0 before the first.
        names: Names of its workers, by rank.
        planned: Whether all workers came to this generation as agreed.
        group: Process group of its workers, over gloo. It is the default group, unless island is above 1.
        sending: Tensors and pending work for newcomers, kept until these have received the state.
    """

    def __init__(self, store: Any, name: str, *, timeout: float = 600.0):
        self._served = store  # c10d loses a store of Python's with its last reference
        self.store = SealedStore(PrefixStore("elastic", store), os.environ.get(SECRET, ""))
        self.name, self.timeout = name, timeout
        self.generation = 0
        self.names: list[str] = []
        self.planned = False
        self.group: dist.ProcessGroup | None = None
        self.sending: list[Any] = []
        self.island = env_number("CO2_ISLAND", 1, least=1)
        self.island_rank = (slot := env_number("LOCAL_RANK", 0)) % self.island  # 0: the leader, see island.py
        self._beats = f"beat/{name}.{slot}"
        self._form_within = FORM_WITHIN[0]
        self.store.set("patience", str(timeout))
        threading.Thread(target=self._beat).start()

    @classmethod
    def from_env(cls, timeout: float = 600.0) -> Members:
        """Connects to the store of the launcher that has started this process, or raises UserError."""
        if "CO2_WORKER" not in os.environ:
            launcher = f"python -m {__package__}.launch"
            raise UserError(f"elastic workers are started, and started again, by {launcher}: use it")
        check_env()
        url, within = os.environ.get("CO2_STORE"), timedelta(seconds=timeout)
        host, port = os.environ.get("MASTER_ADDR", ""), env_number("MASTER_PORT", 29500)
        store: Any = EtcdStore(url) if url else None
        try:
            if url:
                store.check([""])
            else:
                socket.create_connection((host, port), timeout).close()  # TCPStore would try for as long
                store = TCPStore(host, port, None, False, timeout=within, wait_for_workers=False)
        except (OSError, RuntimeError, ValueError) as error:
            where, why = url or f"{host}:{port}", str(error).partition("\n")[0]
            raise UserError(f"no store answers at {where} ({why}): start its launcher first") from None
        return cls(store, os.environ["CO2_WORKER"], timeout=timeout)

    @property
    def rank(self) -> int:
        return self.names.index(self.name)

    @property
    def size(self) -> int:
        return len(self.names)

    def meet(self, report: Report | None, came: Came) -> list[Report | None]:
        """Leaves the generation, waits for the next one with this worker, and connects it.

        Args:
            report: This worker's report, or None if it has no state.
            came: Why it leaves its generation.

        Returns:
            The reports of the new generation's workers, by rank, with None for a worker without state.

        Raises:
            Over: If the run has ended.
            CollectiveError: If this worker was left out.
        """
        again, may_wait = False, came == "empty"
        while True:
            self.leave()
            if may_wait:
                self.store.set(f"ready/{self.name}", "")
            if came != "planned" or again:
                self.store.set(f"broken/{self.generation}", "")
            again = True
            self.store.set(f"came/{self.generation}/{self.name}", came)
            while True:  # until a generation is listed; a worker without state waits for one that lists itself
                while not self.store.has(f"generation/{self.generation + 1}"):
                    if may_wait and self.store.has("over"):
                        print(f"worker {self.name}: the run has ended before it could join", file=sys.stderr)
                        raise Over
                    time.sleep(0.01)
                self.generation += 1
                listed = json.loads(self.store.get(f"generation/{self.generation}"))
                self.names, self.planned = listed["names"], listed["planned"]
                if self.name in self.names:
                    break
                if not may_wait:
                    raise CollectiveError(
                        f"worker {self.name} was left out of the run: it was silent for over {self.timeout:g} s"
                    )
            with contextlib.suppress(RuntimeError):  # one of its workers has died in the meantime
                return self._form(report)

    def leave(self, stuck: Sequence[threading.Thread] = ()) -> None:
        """Leaves the generation's process group, so that workers that wait for this one see a broken group.

        Args:
            stuck: Threads that wait for a collective of this group. Closing the group waits for the collective, so it
                is closed in the background after them.
        """
        held, self.group = [self.group], None  # gloo closes the connections once nothing refers to the group
        self.sending.clear()
        if is_alive(held[0]):
            dist.destroy_process_group(held[0])

        def close() -> None:
            for thread in stuck:
                thread.join()
            held.clear()

        if stuck:
            threading.Thread(target=close, daemon=True).start()

    def left(self) -> bool:
        """Returns whether a worker has left this generation, or has died. The leader tells the other ranks."""
        return self.island_rank == 0 and self.store.has(f"broken/{self.generation}")

    def wanted(self) -> bool:
        """Returns whether newcomers are waiting."""
        return self.store.has(f"waiting/{self.generation}")

    def send(self, state: dict[str, Any], ranks: Sequence[int]) -> None:
        """Starts to send `state`, tensors and plain values, to these ranks of this generation."""
        data = packed(state)
        with contextlib.suppress(RuntimeError):  # a newcomer has died, so the next reduction fails
            for t in (torch.tensor([len(data)], device="cpu"), data):
                self.sending += [t, *(dist.isend(t, group=self.group, group_dst=rank) for rank in ranks)]

    def receive(self, rank: int) -> dict[str, Any]:
        """Returns the state that `rank` sends. Raises RuntimeError if that worker is lost."""

        def received(t: torch.Tensor) -> torch.Tensor:
            work = dist.irecv(t, group=self.group, group_src=rank)
            assert work is not None
            work.wait(timedelta(seconds=self.timeout))  # by default as long as the group had to connect
            return t

        size = received(torch.zeros(1, dtype=torch.int64, device="cpu"))
        return unpacked(received(torch.empty(int(size), dtype=torch.uint8, device="cpu")))

    def end(self) -> None:
        """Ends the run, also for workers that wait to join it. The launcher takes no other end for the run's."""
        self.store.set("over", "")

    def _beat(self) -> None:
        """Writes signs of life for the launcher until the main thread ends. A stopped process writes none."""
        main, number = threading.main_thread(), 0
        with contextlib.suppress(CollectiveError):  # the store is gone
            while main.is_alive():
                self.store.set(self._beats, str(number))
                number += 1
                main.join(min(BEAT, self.timeout / 4))

    def _form(self, report: Report | None) -> list[Report | None]:
        """Connects the generation. Raises RuntimeError if a worker does not come."""
        keys = [f"report/{self.generation}/{name}" for name in self.names]
        self.store.set(keys[self.rank], json.dumps(report))
        self._await(lambda: self.store.has(*keys))
        reports = [json.loads(self.store.get(key)) for key in keys]
        # gloo waits up to five times as long for a worker that has died. If the time was too short, it doubles.
        seconds = min(self._form_within, self.timeout / 15)
        self._connects = store = WatchedStore(PrefixStore(f"group/{self.generation}", self.store.plain), self._await)
        try:
            within = timedelta(seconds=seconds)
            if self.island > 1:
                self.group = self._connect(within)
            else:
                # torch names a group's keys by this count, which also counts this process's groups that did not connect
                WORLD.group_count = 0
                dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=within)
                self.group = dist.group.WORLD
        finally:
            took = min(time.monotonic() - store.waited_at, seconds)
            self._form_within = min(max(FORM_WITHIN[0], 2 * took), FORM_WITHIN[1])
        assert self.group is not None
        set_timeout(self.group, self.timeout)
        return reports

    def _connect(self, within: timedelta) -> dist.ProcessGroup:
        """Returns a new process group of the generation's workers, which are not of the default group."""
        c10d: Any = dist.distributed_c10d
        name = f"generation {self.generation}"
        made, _ = c10d._new_process_group_helper(self.size, self.rank, [], "gloo", self._connects, name, timeout=within)
        # torch wants a number for each member among the default group's: this rank's is 0, and no other one has any
        numbers = [0 if rank == self.rank else self.island + rank for rank in range(self.size)]
        WORLD.pg_group_ranks[made] = {number: rank for rank, number in enumerate(numbers)}
        return made

    def _await(self, done: Callable[[], bool]) -> None:
        """Waits until it is `done`. Raises RuntimeError if a worker of the generation is lost."""
        since = time.monotonic()
        while not done():
            if self.left() or time.monotonic() - since > self.timeout:
                raise RuntimeError("a worker of the new generation was lost")
            time.sleep(0.005)


def packed(state: Any) -> torch.Tensor:
    """Returns a state, tensors and plain values, as bytes."""
    torch.save(state, buffer := io.BytesIO())
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpacked(data: torch.Tensor) -> dict[str, Any]:
    """Returns the state that `packed` got, and runs no code from it."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)


def agreed(reports: Sequence[Report | None], what: str, number: int) -> bool:
    """Returns whether a sum counts: one worker has gone on from it, or all hold its result.

    `reports` has all workers' reports, None for a worker without state. `what` is the kind of sum, a key of a report.
    """
    known = [r for r in reports if r is not None]
    if any(r[what] > number or (r[what] == number and r[f"{what}_phase"] == AGREED) for r in known):
        return True
    return all(r[what] == number and r[f"{what}_phase"] >= SUMMED for r in known)
