"""Who is gone: workers ask each other, over a socket that each of them answers for as long as its process lives.

A collective's own error does not tell. gloo names the address of a neighbour, which may have failed only because its
own neighbour had; NCCL names nobody; the store ends with rank 0, unless torchrun serves it. What can be known:

- a process that has ended: its machine refuses the connection at once. It is named.
- a process that is stopped, or whose machine is gone: no answer comes, while others give theirs. It is named.
- a process whose main thread hangs: it answers, but has not failed where all others of the group have, although those
  have left it. It is named where it is known who takes part (see AsyncAllReduce), elsewhere nobody is.
- a worker that asks has failed itself, and may end before others ask it: they do not take it for the one that died.

Where no other machine can be reached, the fault may be this one's own: then, and where an address is of no use to the
others, nobody is named.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .comm import UNKNOWN, AsyncAllReduce, of_all
from .errors import CollectiveError, UserError

ANSWERS_WITHIN = 2.0  # seconds in which a process answers, and in which the others notice that a group was left
ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class Address:
    """Where a worker answers. machine: its name, for a loopback address is of use on that machine alone."""

    host: str
    port: int
    machine: str
    token: str


class Peers:
    """This process's socket, and what it knows of the others. A question may come at any time, to another thread."""

    def __init__(self) -> None:
        host = _own_host()
        self._server = socket.create_server((host, 0), backlog=256)  # where it is told, and nowhere else
        self.address = Address(host, self._server.getsockname()[1], socket.gethostname(), secrets.token_hex(8))
        self._known: dict[int, Address] = {}
        self.rank = 0
        self._has_failed = False
        self._asked_by: set[int] = set()  # who have failed
        self._found: list[int] | None = None
        os.register_at_fork(after_in_child=self._server.close)  # a data loader's process must not keep the port open
        threading.Thread(target=self._answer, daemon=True).start()

    def register(self, group: dist.ProcessGroup | None) -> None:
        """Learns the addresses of a group's members; every member must call it."""
        ranks, addresses = dist.get_process_group_ranks(group or dist.group.WORLD), of_all(self.address, group)
        self.rank = dist.get_rank()
        self._known |= {r: a for r, a in zip(ranks, addresses, strict=True) if r != self.rank}

    def find_failed(self, in_it: Sequence[int] = ()) -> list[int]:
        """The ranks because of which a collective has failed; nothing where that cannot be known.

        in_it: ranks that must have noticed by now, or within ANSWERS_WITHIN seconds of each other, unless they hang.
        """
        if self._found is not None:
            return self._found
        self._has_failed = True
        until = time.monotonic() + ANSWERS_WITHIN
        asked, states = set(self._known), {}
        while asked and time.monotonic() < until:
            fresh = self.ask(asked, str(self.rank))
            states |= fresh
            failed = {rank for rank, state in fresh.items() if state == "failed"}
            until = time.monotonic() + ANSWERS_WITHIN if failed else until
            asked -= failed
            if any(state == "gone" and rank not in self._asked_by for rank, state in fresh.items()):
                break
            time.sleep(0.05)
        of = {
            state: [rank for rank in sorted(states) if states[rank] == state and rank not in self._asked_by]
            for state in ("gone", "silent", "running")
        }
        elsewhere = [states[rank] for rank in states if self._known[rank].host != self.address.host]
        cut_off = elsewhere and set(elsewhere) == {"silent"}
        silent = [] if cut_off else of["silent"]
        hanging = [] if of["silent"] else [rank for rank in of["running"] if rank in in_it]
        self._found = of["gone"] or silent or hanging
        return self._found

    def ask(self, ranks: Iterable[int], say: str) -> dict[int, str]:
        """What each answers. say: this worker's rank, where it has failed, or "where"."""
        known = sorted(ranks)
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return dict(zip(known, pool.map(lambda rank: self._ask_one(self._known[rank], say), known), strict=True))

    def _ask_one(self, address: Address, say: str) -> str:
        """What it answers, running or failed; gone, silent; unknown where the address is of no use here."""
        if address.host.startswith("127.") and address.machine != self.address.machine:
            return "unknown"
        try:
            with socket.create_connection((address.host, address.port), timeout=ANSWERS_WITHIN) as connection:
                connection.sendall(f"{address.token} {say}\n".encode())
                answer = connection.makefile().readline().strip()
        except ConnectionRefusedError:
            return "gone"
        except OSError:  # also where it ended with the question in hand: asked again it is gone
            return "silent"
        return answer or "unknown"

    def _answer(self) -> None:
        """The thread: one line for one line."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError, ValueError), connection:
                connection.settimeout(ANSWERS_WITHIN)
                token, said = connection.makefile().readline(256).split()
                if token == self.address.token and said == "where":
                    connection.sendall(f"{_place()}\n".encode())
                elif token == self.address.token:
                    self._asked_by.add(int(said))
                    connection.sendall(b"failed\n" if self._has_failed else b"running\n")


_peers: Peers | None = None


def register(group: dist.ProcessGroup | None = None) -> None:
    """Learns where the members of a group (None: all) answer; every member must call it."""
    global _peers
    _peers = _peers or Peers()
    _peers.register(group)


def find_failed(in_it: Sequence[int] = ()) -> list[int]:
    """See Peers.find; nothing before anybody was met."""
    return _peers.find_failed(in_it) if _peers is not None else []


def describe_failed(in_it: Sequence[int] = ()) -> str:
    """For a message: because of whom a collective has failed."""
    ranks = find_failed(in_it)
    return f"no answer from rank {', '.join(map(str, ranks))}" if ranks else UNKNOWN


def explain(error: BaseException) -> CollectiveError | None:
    """What has become of a collective that is no method's own, such as a barrier, a gradient's mean, or a gathering of
    shards: in one line. None: the error is no collective's."""
    text = str(error)
    known = isinstance(error, dist.DistError) or any(name in text for name in ("gloo", "NCCL", "Connection closed by"))
    if isinstance(error, CollectiveError) or not (isinstance(error, RuntimeError) and known) or _peers is None:
        return None
    reason = text.strip().partition("\n")[0].partition(". This is")[0]
    return CollectiveError(f"rank {_peers.rank}: a collective failed; {describe_failed()}: {reason}")


# -- a call that every worker must make ---------------------------------------------------------------------------

LATE = 1800.0  # seconds that a worker may come after another
FIRST_LOOK = 2.0  # seconds after which a worker that waits asks where the others are
_calls = 0  # how many of them this process has begun


def come_together(what: str) -> None:
    """Waits until all workers have come to this call. They may come late, after slower steps or an evaluation.

    They meet at the store: a collective could meet another one that a worker has started elsewhere. A worker that was
    slower has launched no more reductions than this one, and one that has launched more has passed the call. Workers
    that wait in torch.distributed cannot come if all that are missing do so, and use no processor between two looks.

    Args:
        what: The call, for a message.

    Raises:
        UserError: Other workers cannot come any more.
        CollectiveError: A worker is gone.
    """
    global _calls
    if not dist.is_initialized() or (workers := dist.get_world_size()) == 1:
        return
    _calls += 1
    store, began, look = dist.distributed_c10d._get_default_store(), time.monotonic(), FIRST_LOOK
    came, all_came, before = f"co2/call{_calls}/came", f"co2/call{_calls}/all", dict[int, list[str]]()
    if store.add(came, 1) == workers:
        store.set(all_came, "")
    while not _is_set(store, all_came):
        waited = time.monotonic() - began
        time.sleep(min(0.5, 1e-3 + waited / 20))
        if waited < look:
            continue
        look = waited + min(waited, 30.0)
        answers = _peers.ask(_peers._known, "where") if _peers is not None else {}
        if waited > LATE or not {"gone", "failed"}.isdisjoint(answers.values()):
            raise CollectiveError(f"{what}: not all workers came within {waited:.0f} s; {describe_failed()}")
        places = {rank: answer.split() for rank, answer in answers.items() if answer.count(" ") == 2}
        missing = {rank: place for rank, place in places.items() if int(place[1]) < _calls}
        passed = [rank for rank, place in missing.items() if int(place[0]) > AsyncAllReduce.launches]
        stuck = [rank for rank, place in missing.items() if place[2] != "-" and before.get(rank) == place]
        if passed or (stuck and len(stuck) == len(missing)):
            ranks = ", ".join(map(str, passed or stuck))
            raise UserError(f"rank {ranks} went on without {what}: every worker must call {what}, at the same step")
        before = missing


def _is_set(store: Any, key: str) -> bool:
    with contextlib.suppress(RuntimeError):  # the store is gone with its process, which is asked then
        return store.check([key])
    return False


def _place() -> str:
    """How far this process is: how many reductions it has launched, how many calls it has begun in which workers come
    together, and the processor seconds of its main thread if that waits in torch.distributed, else "-"."""
    main, seconds = threading.main_thread().ident or 0, "-"
    frame = sys._current_frames().get(main)
    if frame is not None and frame.f_code.co_filename == dist.distributed_c10d.__file__:
        seconds = f"{time.clock_gettime(time.pthread_getcpuclockid(main)):.2f}"
    return f"{AsyncAllReduce.launches} {_calls} {seconds}"


def _own_host() -> str:
    """This machine's address on the way to the first one's; its loopback where there is none."""
    master = os.environ.get("MASTER_ADDR")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if master:
            probe.connect((master, 9))  # sends nothing
            return probe.getsockname()[0]
    return "127.0.0.1"
