"""Who is gone: workers ask each other, over a socket that each of them answers for as long as its process lives.

A collective's own error does not tell. gloo names the address of a neighbour, which may have failed only because its
own neighbour had; NCCL names nobody; the store ends with rank 0, unless torchrun serves it. What can be known:

- a process that has ended: its machine refuses the connection at once. It is named.
- a process that is stopped, or whose machine is gone: no answer comes, while others give theirs. It is named.
- a process whose main thread hangs: it answers, but has not failed where all others of the group have, although those
  have left it. It is named where it is known who takes part (see Flight), elsewhere nobody is.
- a worker that has failed tells all others before it ends, with what it has found: they neither take it for the one
  that died, nor look for themselves.

A process that was stopped itself, and asked meanwhile, goes by what the others must have found: that it is the one.

Where no other machine can be reached, the fault may be this one's own: then, and where an address is of no use to the
others, nobody is named.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import CollectiveError
from ..flight import UNKNOWN
from ..groups import of_all

ANSWERS_WITHIN = 2.0  # seconds in which a process answers, and in which the others notice that a group was left
ASKED_AT_ONCE = 32
TURN = 1.0  # seconds after which the answering thread looks at the clock


@dataclass(frozen=True)
class Address:
    """Where a worker answers. machine: its name, for a loopback address is of use on that machine alone."""

    host: str
    port: int
    machine: str
    token: str


class Peers:
    """This process's socket, and what it knows of the others. Thread-safe where it matters: news may come at any time.

    Attributes: verdict, the ranks that are gone as far as a worker has found out, None before that; stopped, for how
    many seconds this process did not run while another one asked, 0 where none did.
    """

    def __init__(self) -> None:
        host = _own_host()
        self._server = socket.create_server((host, 0), backlog=256)  # where it is told, and nowhere else
        self._server.settimeout(TURN)
        self.address = Address(host, self._server.getsockname()[1], socket.gethostname(), secrets.token_hex(8))
        self._known: dict[int, Address] = {}
        self.rank = 0
        self.verdict: list[int] | None = None
        self._has_failed = False
        self._left: set[int] = set()  # those who have told that they failed
        self.stopped = 0.0
        os.register_at_fork(after_in_child=self._server.close)  # a data loader's process must not keep the port open
        threading.Thread(target=self._answer, daemon=True).start()

    def meet(self, group: dist.ProcessGroup | None) -> None:
        """Learns the addresses of a group's members; every member must call it."""
        ranks, addresses = dist.get_process_group_ranks(group or dist.group.WORLD), of_all(self.address, group)
        self.rank = dist.get_rank()
        self._known |= {r: a for r, a in zip(ranks, addresses, strict=True) if r != self.rank}

    def find(self, in_it: Sequence[int] = ()) -> list[int]:
        """The ranks because of which a collective has failed; nothing where that cannot be known. Tells the others.

        in_it: ranks that must have noticed by now, or within ANSWERS_WITHIN seconds of each other, unless they hang.
        """
        self._has_failed = True
        until = time.monotonic() + ANSWERS_WITHIN
        asked, states = set(self._known), {}
        while self.verdict is None and asked and time.monotonic() < until:
            fresh = self._ask(sorted(asked))
            states |= fresh
            failed = {rank for rank, state in fresh.items() if state == "failed"}
            until = time.monotonic() + ANSWERS_WITHIN if failed else until
            asked -= failed
            if any(state == "gone" and rank not in self._left for rank, state in fresh.items()):
                break
            time.sleep(0.05)
        if self.verdict is None:
            self.verdict = self._judge(states, in_it)
            self._tell(rank for rank, state in states.items() if state in ("running", "failed"))
        return [rank for rank in self.verdict if rank != self.rank]

    def _judge(self, states: dict[int, str], in_it: Sequence[int]) -> list[int]:
        def of(state: str) -> list[int]:
            return sorted(rank for rank in states if states[rank] == state and rank not in self._left)

        if of("gone"):
            return of("gone")
        elsewhere = [rank for rank in states if self._known[rank].host != self.address.host]
        if of("silent"):
            cut_off = elsewhere and all(states[rank] == "silent" for rank in elsewhere)
            return [] if cut_off else of("silent")
        return [rank for rank in of("running") if rank in in_it]

    def _ask(self, ranks: Sequence[int], say: str = "?") -> dict[int, str]:
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return dict(zip(ranks, pool.map(lambda rank: self._ask_one(self._known[rank], say), ranks), strict=True))

    def _ask_one(self, address: Address, say: str) -> str:
        """running or failed, as it answers; gone, silent; unknown where the address is of no use here."""
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
        return answer if answer in ("running", "failed") else "unknown"

    def _tell(self, ranks: Iterable[int]) -> None:
        found = ",".join(map(str, self.verdict or [])) or "-"
        self._ask(list(ranks), f"{self.rank} {found}")

    def _answer(self) -> None:
        """The thread: one line for one line."""
        waited = 0.0  # for the last question
        while True:
            began, before = _now(), waited
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                waited = _now() - began
                continue
            except OSError:  # closed
                return
            waited = _now() - began
            if (stopped := max(waited, before)) > TURN + ANSWERS_WITHIN:
                self.stopped = stopped
            with contextlib.suppress(OSError, ValueError), connection:
                connection.settimeout(ANSWERS_WITHIN)
                token, *news = connection.makefile().readline(256).split()
                if token != self.address.token:
                    continue
                if len(news) == 2:
                    self._hear(int(news[0]), news[1])
                connection.sendall(b"failed\n" if self._has_failed else b"running\n")

    def _hear(self, rank: int, found: str) -> None:
        self._left.add(rank)
        if self.verdict is None and found != "-":
            self.verdict = [int(r) for r in found.split(",")]


_peers: Peers | None = None


def meet(group: dist.ProcessGroup | None = None) -> None:
    """Learns where the members of a group (None: all) answer; every member must call it."""
    global _peers
    _peers = _peers or Peers()
    _peers.meet(group)


def gone(in_it: Sequence[int] = ()) -> str:
    """For a message: because of whom a collective has failed."""
    return who(find(in_it))


def find(in_it: Sequence[int] = ()) -> list[int]:
    """See Peers.find; nothing before anybody was met."""
    return _peers.find(in_it) if _peers is not None else []


def explain(error: BaseException) -> CollectiveError | None:
    """What has become of a collective that is no method's own, such as a barrier, a gradient's mean, or a gathering of
    shards: in one line. None: the error is no collective's."""
    text = str(error)
    known = isinstance(error, dist.DistError) or any(name in text for name in ("gloo", "NCCL", "Connection closed by"))
    if isinstance(error, CollectiveError) or not (isinstance(error, RuntimeError) and known) or _peers is None:
        return None
    reason = text.strip().partition("\n")[0].partition(". This is")[0]
    return CollectiveError(f"rank {_peers.rank}: a collective failed; {who(find())}: {reason}")


def who(ranks: Sequence[int]) -> str:
    """For a message: what `find` has found."""
    if _peers is not None and _peers.stopped:
        return f"this worker was stopped for {_peers.stopped:.0f} s, and did not answer the others"
    if not ranks:
        return UNKNOWN
    return f"no answer from rank {', '.join(map(str, ranks))}"


def _now() -> float:
    """Seconds; a machine's sleep counts."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _own_host() -> str:
    """This machine's address on the way to the first one's; its loopback where there is none."""
    master = os.environ.get("MASTER_ADDR")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if master:
            probe.connect((master, 9))  # sends nothing
            return probe.getsockname()[0]
    return "127.0.0.1"
