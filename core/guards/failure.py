"""Finds the workers that have failed. Each worker runs a small server, and the workers ask each other.

A collective's own error does not say who has failed. gloo names the address of a neighbor, which may have failed only
because its own neighbor did. NCCL names nobody. The store ends with rank 0, unless torchrun serves it. The answers
mean:

- The machine refuses the connection: the process has ended, and is named.
- No answer, while other workers answer: the process is stopped or its machine is down, and it is named.
- An answer, but no failure, although all other members have left the group: its main thread hangs. It is named if the
  members of the group are known (see AsyncAllReduce).
- A worker that asks has itself failed, and may end soon. Workers that it has asked do not name it.
- A worker whose script ends before close(), without an uncaught exception, says so before, and is named with that.

If no other machine can be reached, this machine may be at fault, and nobody is named.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..comm import FINISH, RESUME, UNKNOWN, AsyncAllReduce
from ..errors import CollectiveError, UserError
from ..groups import of_all
from ..hooks import HookedMethod

ANSWERS_WITHIN = 2.0  # seconds to answer, and for peers to notice that a worker has left the group
ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class Address:
    """Address of a worker's server. A loopback host works only on the machine of that name."""

    host: str
    port: int
    machine: str
    token: str


class Peers:
    """This worker's server and the addresses of its peers. A thread answers questions at any time."""

    def __init__(self) -> None:
        host = _own_host()
        self._server = socket.create_server((host, 0), backlog=256)  # listens only on the address that peers get
        self.address = Address(host, self._server.getsockname()[1], socket.gethostname(), secrets.token_hex(8))
        self.known: dict[int, Address] = {}
        self.rank = 0
        self._has_failed = False
        self._failed_peers: set[int] = set()  # ranks that have asked because they have failed
        self.ended: set[int] = set()  # ranks whose scripts have ended, and which have not called close()
        self._found: list[int] | None = None
        os.register_at_fork(after_in_child=self._server.close)  # a data loader's process must not keep the port open
        threading.Thread(target=self._answer, daemon=True).start()

    def register(self, group: dist.ProcessGroup | None) -> None:
        """Exchanges addresses with a group's members. Every member must call it."""
        ranks, addresses = dist.get_process_group_ranks(group or dist.group.WORLD), of_all(vars(self.address), group)
        self.rank = dist.get_rank()
        self.known |= {r: Address(**a) for r, a in zip(ranks, addresses, strict=True) if r != self.rank}

    def find_failed(self, members: Sequence[int] = ()) -> list[int]:
        """Returns the ranks that made a collective fail, or an empty list if they cannot be known.

        Args:
            members: Ranks that should notice the failure within ANSWERS_WITHIN seconds of each other, unless they hang.
        """
        if self._found is not None:
            return self._found
        self._has_failed = True
        until = time.monotonic() + ANSWERS_WITHIN
        unknown, states = set(self.known), {}
        while unknown and time.monotonic() < until:  # peers notice a failure one after the other
            answers = self.ask(unknown, str(self.rank))
            states |= answers
            failed = {rank for rank, state in answers.items() if state == "failed"}
            until = time.monotonic() + ANSWERS_WITHIN if failed else until
            unknown -= failed
            if any(state == "gone" and rank not in self._failed_peers for rank, state in answers.items()):
                break
            time.sleep(0.05)
        gone, silent, running = (
            [rank for rank in sorted(states) if states[rank] == state and rank not in self._failed_peers]
            for state in ("gone", "silent", "running")
        )
        on_other_machines = {states[rank] for rank in states if self.known[rank].host != self.address.host}
        hanging = [] if silent else [rank for rank in running if rank in members]
        self._found = gone or ([] if on_other_machines == {"silent"} else silent) or hanging
        return self._found

    def ask(self, ranks: Iterable[int], say: str) -> dict[int, str]:
        """Asks peers in parallel, and returns each one's answer (see ask_one).

        It says this worker's rank if it has failed, or "where" to ask how far they are.
        """
        asked = sorted(ranks)
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return dict(zip(asked, pool.map(lambda rank: self.ask_one(self.known[rank], say), asked), strict=True))

    def ask_one(self, address: Address, say: str, *, waits: bool = True) -> str:
        """Returns the answer, "gone", "silent", or "unknown" for an address that is of no use here.

        `waits`: whether to wait for the answer.
        """
        if address.host.startswith("127.") and address.machine != self.address.machine:
            return "unknown"
        try:
            with socket.create_connection((address.host, address.port), timeout=ANSWERS_WITHIN) as connection:
                connection.sendall(f"{address.token} {say}\n".encode())
                answer = read_line(connection, ANSWERS_WITHIN) if waits else ""
        except ConnectionRefusedError:
            return "gone"
        except OSError:  # also if it ended while it was asked; the next question finds it gone
            return "silent"
        return answer or "unknown"

    def _answer(self) -> None:
        """Runs in the thread: answers one line with one line."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            # in a thread of its own: a stranger that sends slowly delays no peer
            threading.Thread(target=self._answer_one, args=(connection,), daemon=True).start()

    def _answer_one(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection:
            token, said, *ended = read_line(connection, ANSWERS_WITHIN).split()
            if not hmac.compare_digest(token.encode(), self.address.token.encode()):
                return
            if said == "where":
                connection.sendall(f"{_progress()}\n".encode())
            elif ended:
                self.ended.add(int(said))
            else:
                self._failed_peers.add(int(said))
                connection.sendall(b"failed\n" if self._has_failed else b"running\n")


def read_line(connection: socket.socket, within: float, most: int = 256) -> str:
    """Returns a line of at most `most` bytes without blanks at its ends, or what came of it before the peer left.

    Raises:
        OSError: If it does not arrive within these seconds, also if the peer sends a byte now and then.
    """
    line, until = b"", time.monotonic() + within
    while not line.endswith(b"\n") and len(line) < most:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (part := connection.recv(most - len(line))):
            break
        line += part
    return line.decode(errors="replace").strip()


_peers: Peers | None = None


def register(group: dist.ProcessGroup | None = None) -> None:
    """Exchanges addresses with a group's members. None means all workers. Every member must call it."""
    global _peers
    _peers = _peers or Peers()
    _peers.register(group)


def describe_failed(members: Sequence[int] = (), remedy: str = RESUME) -> str:
    """Describes for a message which ranks have failed, and what to do. members: see Peers.find_failed."""
    if _peers is None or not (ranks := _peers.find_failed(members)):
        return f"{UNKNOWN}: {remedy}"
    if ended := [rank for rank in ranks if rank in _peers.ended]:
        return f"the script of {_named(dict.fromkeys(ended, ''))} has ended: {FINISH}"
    return f"no answer from {_named(_peers.ask(ranks, 'where'))}: {remedy}"


def tell_end() -> None:
    """Lets the peers know, at the end of this process, that they may wait for it in vain."""
    if (peers := _peers) is None:
        return
    until = time.monotonic() + ANSWERS_WITHIN
    for address in peers.known.values():
        if time.monotonic() < until:  # Python starts no threads any more
            peers.ask_one(address, f"{peers.rank} ended", waits=False)  # the peer may be ending, too


def explain(error: BaseException) -> CollectiveError | None:
    """Turns the error of a collective that no method has started into a CollectiveError of one line.

    Such a collective is a barrier, DDP's all-reduce of gradients, or FSDP's all-gather. None if no collective has
    failed.
    """
    text = str(error)
    is_dist = isinstance(error, dist.DistError) or any(
        name in text for name in ("gloo", "NCCL", "Connection closed by")
    )
    if isinstance(error, CollectiveError) or not (isinstance(error, RuntimeError) and is_dist) or _peers is None:
        return None
    reason = text.strip().partition("\n")[0].partition(". This is")[0]
    return CollectiveError(f"rank {_peers.rank}: a collective failed; {describe_failed()} ({reason})")


# -- a call that every worker must make ---------------------------------------------------------------------------

MAX_WAIT = 1800.0  # seconds that a worker may come after the first one, if no method has a timeout
FIRST_QUESTION = 2.0  # seconds after which a waiting worker asks where its peers are
PACKAGE, TORCHS = __file__.removesuffix("guards/failure.py"), dist.distributed_c10d.__file__
_calls = 0  # calls of come_together() in this process


def come_together(kind: str, method: HookedMethod | None = None) -> None:
    """Waits until all workers have made this call. They may come late, after slower steps or an evaluation.

    They meet at the store, because a collective could match another one that a worker has started elsewhere. Three
    cases are errors. A worker makes another such call. A worker that has launched more all-reduces than this one has
    passed the call. If all missing workers wait in torch.distributed, and use no CPU time between two questions, they
    cannot come.

    Args:
        kind: The call, without blanks.
        method: The method whose call it is. If it is elastic, or has not all workers, this function does not wait.

    Raises:
        UserError: Other workers can no longer come.
        CollectiveError: A worker is gone, or too late.
    """
    global _calls
    if not dist.is_initialized() or (workers := dist.get_world_size()) == 1:
        return
    if method is not None:
        method.allreduce.check_alive()
        if method.allreduce.is_elastic or method.total_world_size < workers:
            return
    _calls, limit = _calls + 1, MAX_WAIT if method is None else method.allreduce.timeout
    store, began, next_question = dist.distributed_c10d._get_default_store(), time.monotonic(), FIRST_QUESTION
    what, rank, before = _call_of(threading.get_ident())[0], dist.get_rank(), dict[int, list[str]]()
    place, complete = f"co2/call{_calls}", f"co2/call{_calls}/all"
    its_kind, its_rank, theirs = store.compare_set(place, "", f"{kind} {rank} {what}").decode().split()
    if its_kind != kind:
        differ = f"rank {its_rank} calls {theirs} where rank {rank} calls {what}"
        store.set(complete, f"{differ}: every worker must make the same calls")
    elif store.add(f"{place}/came", 1) == workers:
        store.set(complete, "")
    while not _is_set(store, complete):
        waited = time.monotonic() - began
        time.sleep(min(0.5, 1e-3 + waited / 20))
        if waited < next_question:
            continue
        next_question = waited + min(waited, 30.0)
        answers = _peers.ask(_peers.known, "where") if _peers is not None else {}
        if _is_set(store, complete):  # then a peer may have passed the call before it answered
            break
        if waited > limit or not {"gone", "failed"}.isdisjoint(answers.values()):
            raise CollectiveError(f"{what}: not all workers came within {waited:.0f} s; {describe_failed()}")
        progress = {rank: answer.split() for rank, answer in answers.items() if answer.count(" ") == 3}
        missing = {rank: fields for rank, fields in progress.items() if int(fields[1]) < _calls}
        passed = [rank for rank, fields in missing.items() if int(fields[0]) > AsyncAllReduce.launches]
        stuck = [rank for rank, fields in missing.items() if fields[2] != "-" and before.get(rank) == fields]
        if passed or (stuck and len(stuck) == len(missing)):
            others = _named({rank: answers[rank] for rank in passed or stuck})
            raise UserError(f"{others} went on without {what}: every worker must call {what}, at the same step")
        before = missing
    if differ := store.get(complete).decode():
        raise UserError(differ)


def _is_set(store: Any, key: str) -> bool:
    """Whether the store has this key."""
    with contextlib.suppress(RuntimeError):  # the store's process has ended; the next question finds that out
        return store.check([key])
    return False


def _progress() -> str:
    """Returns this process's answer to "where": four fields that come_together() compares.

    They are the number of all-reduces launched, the number of calls of come_together(), the CPU seconds of the main
    thread if it waits in torch.distributed, otherwise "-", and the main thread's call, see _call_of.
    """
    main = threading.main_thread().ident or 0
    call, waits = _call_of(main)
    seconds = f"{time.clock_gettime(time.pthread_getcpuclockid(main)):.2f}" if waits else "-"
    return f"{AsyncAllReduce.launches} {_calls} {seconds} {call}"


def _call_of(thread: int) -> tuple[str, bool]:
    """Returns which call of this package or of torch.distributed the script has made in a thread, "-" for none.

    Also whether the thread waits in torch.distributed.
    """
    frame = top = sys._current_frames().get(thread)
    call = "-"
    while frame is not None:  # the outermost call counts
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not name.startswith("_") and file.startswith((PACKAGE, TORCHS)):
            call = f"{'torch.distributed.' * (file == TORCHS)}{name}()"
        frame = frame.f_back
    return call, top is not None and top.f_code.co_filename == TORCHS


def _named(answers: Mapping[int, str]) -> str:
    """Returns the ranks that have answered, for a message, with their calls if the answers to "where" name any."""
    calls = {answer.split()[3] for answer in answers.values() if answer.count(" ") == 3} - {"-"}
    return f"rank {', '.join(map(str, answers))}" + f" (in {' or '.join(sorted(calls))})" * bool(calls)


def _own_host() -> str:
    """Returns this machine's address on its route to MASTER_ADDR, or the loopback address."""
    master = os.environ.get("MASTER_ADDR")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if master:
            probe.connect((master, 9))  # sends nothing
            return probe.getsockname()[0]
    return "127.0.0.1"
