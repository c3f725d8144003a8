"""What runs in the background: stages of collectives, one after the other, and what happens when one fails.

The communication knows no mathematics: it moves what its owner wrote into flat tensors. It runs on a process group of
its own, so it never queues behind the model's own collectives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from . import groups
from .errors import CollectiveError, UserError
from .flat import Bucket, Scalars
from .groups import Pending, Stage, drop_groups, host_group, leave_group, moved_by_nccl, new_group, set_timeout
from .stats import Mark, Seconds, between, mark, plus

RECENT = 8  # times between launches that a timeout allows for: one slow compile counts for so many rounds
LEFT = "this worker has left the others after an exception: make a new object to train on"
UNKNOWN = "a worker has failed or cannot be reached, it is not known which"


class Flight:
    """Runs the stages of one reduction at a time while the caller computes.

    device: where the reduced tensors lie. group: the workers (None: all). timeout: seconds until a missing peer is an
    error, beyond the longest of the last times between two launches: so far a peer may be behind. backend: None for
    the group's own. hidden: whether the caller computes meanwhile, and does not wait at once. roll: `meet` learns of a
    group's members, and `gone` says for a message because of which of them a collective has failed.

        flight.launch(reducer.stages(flight.group, number))    # returns at once, whether or not peers are there
        flight.done()                                              # True once all is through; never blocks
        flight.wait()                                              # blocks; the tensors now hold the result

    Stages are a generator that yields the collectives it has started. Where NCCL moves the tensors, all of it is queued
    at once in a stream of its own. Elsewhere a wait blocks, so a thread goes along them, one reduction long; what it
    does on a GPU lies in a stream of its own, too. Exposed is what the calling thread spends in launch() and done(),
    and in wait() on a CPU; on a GPU, in place of the last, how long the current stream stands still there.
    """

    launches = 0  # of all objects in this process

    def __init__(
        self,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        backend: str | None = None,
        hidden: bool = True,
        roll: Any = None,
    ):
        self.device, self.timeout, self._hidden = device, timeout, hidden
        self._roll = roll
        self.group = new_group(group, timeout, device, backend, hidden=hidden)
        self.timed_groups = [self.group] if self.group is not None else []  # those whose timeout follows the rounds
        if self.group is not None:
            host_group(self.group, timeout)
            if roll:
                roll.meet(self.group)
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        # numbers that each worker has a place of its own for; and how many workers there may ever be
        self.place, self.places, self.most = self.rank, self.world_size, self.world_size
        self.launched = 0  # how many reductions so far
        self.bytes_sent = 0  # by this worker, for the last one
        self.seconds: Seconds = 0.0  # from the last launch to its landing
        self.exposed: Seconds = 0.0  # of the last one that was waited for
        self.in_flight = False  # whether what was launched has not been waited for
        self._by_nccl = self.group is not None and moved_by_nccl(self.group, device)
        # whose collectives lie one after the other; their kernels are small, and others' collectives wait for them
        self._side = torch.cuda.Stream(device, priority=-1) if self._by_nccl or device.type == "cuda" else None
        self._end_mark: Mark = 0.0  # where NCCL moves the tensors: the end of what was queued
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()  # the calling thread waits for that one
        self._error: Exception | None = None  # of a stage
        self._failed, self._left = "", False
        self._launched_at = time.perf_counter()
        self._between = deque([0.0], RECENT)  # seconds between the last launches
        self._host_seconds = 0.0  # that the calling thread has spent here since the last launch

    def agree(self, settings: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Checks that all workers hold the same settings and shapes, then gives them rank 0's tensors."""
        self.check_alive()
        if self.group is not None:
            groups.compare(settings, tensors, self.group)
            groups.broadcast(tensors, self.group, self.device)
            if self._by_nccl:
                groups.connect(self.group, self.device, sum(t.numel() * t.element_size() for t in tensors))

    @property
    def failed(self) -> bool:
        """Whether a reduction has failed, or leave() was called."""
        return bool(self._failed)

    def check_alive(self) -> None:
        """Raises again what has failed."""
        if self._failed:
            raise CollectiveError(self._failed)

    def launch(self, stages: Iterator[Stage]) -> None:
        """Starts the stages; returns at once."""
        assert not self.in_flight, "wait() for what is in flight before the next launch"
        self.check_alive()
        if self.group is None and self.world_size > 1:
            raise UserError("close() has left the workers' group: make a new object to train on")
        self.launched += 1
        Flight.launches += 1
        self.in_flight = True
        self._host_seconds = 0.0
        with self.counted():
            now = time.perf_counter()
            self._between.append(now - self._launched_at)
            self._launched_at = now
            for group in self.timed_groups:
                set_timeout(group, self.timeout + max(self._between))
            self._begin(stages)

    def done(self) -> bool:
        """Whether all is through; where NCCL moves the tensors, whether all is queued. Never blocks."""
        if self._failed:
            raise CollectiveError(self._failed)
        if self._thread is None:
            return True
        began = time.perf_counter()
        if not self._thread.is_alive():
            self._end()
        self._host_seconds += time.perf_counter() - began
        return self._thread is None

    def landed(self) -> bool:
        """Whether wait() would not wait, nor make the current stream wait. Never blocks."""
        return self.done() and (not isinstance(self._end_mark, torch.cuda.Event) or self._end_mark.query())

    def wait(self, landed: Sequence[Callable[[], None]] = ()) -> None:
        """Blocks until the result is there, for the owner to use. landed: are called before it may be used.

        CollectiveError when a worker died or stayed away for too long: the tensors then hold partial sums, of no use.
        """
        assert self.in_flight, "nothing was launched"
        start, before = mark(self.device), self._host_seconds
        with self.counted():
            self.settle()  # while the host waits, as over gloo, a GPU's stream stands still, too
        in_stream = self._side is not None
        self.exposed = plus(between(start, mark(self.device)), before) if in_stream else self._host_seconds
        for call in landed:
            call()
        self.in_flight = False

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """What the calling thread does in here is exposed."""
        began = time.perf_counter()
        yield
        self._host_seconds += time.perf_counter() - began

    def settle(self) -> bool:
        """Blocks until what is in flight has landed, and leaves it there for `wait`. False: nothing is."""
        if not self.in_flight:
            return False
        self.check_alive()
        self._end()
        return True

    def restore(self, launched: int, in_flight: bool) -> None:
        """Continues after so many reductions, as from a checkpoint, and forgets what is in flight, which it waits for.
        in_flight: a result is in the owner's tensors that was not waited for."""
        self.settle()
        self.launched, self.in_flight, self._launched_at = launched, in_flight, time.perf_counter()

    def close(self) -> None:
        """Leaves the process group; call it after the last `wait`."""
        if self.in_flight:
            raise UserError("close() with an all-reduce in flight, whose mean would be lost: call finish() before")
        if self.group is not None:
            leave_group(self.group, self.timeout, hidden=self._hidden)
            self.group, self.timed_groups = None, []

    def leave(self) -> None:
        """Leaves the groups without waiting, what is in flight being lost: an exception has ended the training. Who
        waits for this worker then sees the groups broken; over gloo once the collective under way is through."""
        left, self.group, self.timed_groups = self.timed_groups, None, []
        if not left:
            return
        self._failed, self.in_flight, self._left = self._failed or LEFT, False, True
        for group in left if self._by_nccl else []:
            group.abort()  # else its kernels wait for the others'
        thread, self._thread = self._thread, None
        drop_groups(left, thread)

    def _begin(self, stages: Iterator[Stage]) -> None:
        """Queues everything, or starts the first collectives and a thread that goes on."""
        self.bytes_sent, self.seconds = 0, 0.0
        if self._side is not None:  # what is queued there runs beside what the computation queues from now on
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        with self._aside():
            if self._by_nccl:
                began = mark(self.device)
                while (stage := self._next(stages)) is not None:
                    for work in self._sent(stage):
                        work.wait()  # the stream waits; with a timeout the host would, too, as torch documents
                self._end_mark = mark(self.device)
                self.seconds = between(began, self._end_mark)
                return
            began = time.perf_counter()
            stage = self._next(stages)
        if stage is not None:
            self._thread = threading.Thread(target=self._go_along, args=(began, stage, stages), daemon=True)
            self._thread.start()

    def _next(self, stages: Iterator[Stage]) -> Stage | None:
        try:
            return next(stages, None)
        except Exception as error:
            self._error = _bare(error)
        self._raise()  # out here, where no traceback keeps the collectives, and so their connections

    def _go_along(self, began: float, stage: Stage | None, stages: Iterator[Stage]) -> None:
        """The thread: waits for each stage, and starts the next."""
        try:
            with self._aside():
                while stage is not None and not self._left:
                    for work in self._sent(stage):
                        self._pass(work)
                    stage = next(stages, None)
            self.seconds = time.perf_counter() - began
        except Exception as error:
            self._error = _bare(error)

    def _pass(self, work: Pending) -> None:
        """Waits in Python while the caller computes: a thread that the interpreter's end meets inside torch's own wait
        takes the process down with it, by std::terminate. Looks often enough to lose a twentieth of the time."""
        began = time.perf_counter()
        while not work.is_completed():
            if self._hurry.wait(min(5e-3, 5e-5 + (time.perf_counter() - began) / 20)):
                break
        work.wait()  # until the group's timeout

    def _sent(self, stage: Stage) -> Iterable[Pending]:
        """Counts what a stage sends; its collectives."""
        works, sent = stage
        self.bytes_sent += sent
        return works

    def _aside(self) -> contextlib.AbstractContextManager[Any]:
        """What this thread queues in the block goes into the stream of its own."""
        return torch.cuda.stream(self._side) if self._side is not None else contextlib.nullcontext()

    def _end(self) -> None:
        """Waits for what `_begin` has started; the current stream does, where it lies in one."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
            self._hurry.clear()
        if self._error is not None:
            self._raise()
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _raise(self) -> NoReturn:
        """The error of a stage: what was launched never lands."""
        error, self._error = self._error, None
        assert error is not None
        if isinstance(error, RuntimeError) and self.group is not None:
            raise self._failure(str(error))
        self.in_flight = False
        self._failed = f"a reduction failed before: {type(error).__name__}: {error}"
        raise error

    def _failure(self, reason: str, what: str = "") -> CollectiveError:
        """what: which collective has failed, if not the one in flight. Leaves the group, so that the
        workers which still wait see it broken too, and names those that are gone.

        gloo tells only the dead worker's neighbours; the others notice when these close their connections, and
        connections close once nothing refers to the work any more.
        """
        number, self.in_flight = self.launched - 1, False  # of the round, from 0
        assert self.group is not None
        ranks, alone = dist.get_process_group_ranks(self.group), len(self.timed_groups) == 1
        group, self.group, self.timed_groups = self.group, None, self.timed_groups[1:]
        if self._by_nccl:
            group.abort()  # else its kernels wait for the peers', and destroying it waits for them
        dist.destroy_process_group(group)
        del group
        gone = self._roll.gone(ranks if alone else ()) if self._roll else UNKNOWN  # a node's are not all in both groups
        self._failed = (
            f"rank {ranks[self.rank]}: {what or f'the all-reduce of round {number}'} failed; {gone} "
            f"(timeout {self.timeout:g} s): {reason.partition('. This is')[0].splitlines()[0]}"
        )
        return CollectiveError(self._failed)


def _bare(error: Exception) -> Exception:
    """A collective's without its traceback, which would keep the connections."""
    return RuntimeError(str(error)) if isinstance(error, RuntimeError) else error


class Reducer:
    """Turns what the workers wrote into flat tensors into its sum or mean over them, in stages. Here one all-reduce of
    each flat tensor, in its own precision: sums land in it. A room's reducer derives from it, and sets all attributes.

    Attributes: kind, its name in a checkpoint; changes, whether it is one of several, and `become` makes it another;
    scale, by which what lands becomes means: 1 over the workers where sums land; state, what a checkpoint holds of it.
    """

    kind, changes = "float32", False

    def __init__(self, flats: Sequence[Tensor], world_size: int):
        self.flats, self.scale = flats, 1 / world_size
        self.state: dict[str, list[Tensor]] = {}

    def become(self, kind: str) -> None:
        """A checkpoint of that kind is loaded next. Only a reducer that is one of several changes."""

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        """One reduction, the `number`-th; group None: there is one worker. Keeps no reference to the group."""
        if group is not None:
            yield groups.all_reduce(self.flats, group)


def all_reduce(buckets: Sequence[Bucket], scalars: Scalars, flight: Flight) -> Reducer:
    """Each bucket's flat tensor is summed in its own precision."""
    return Reducer([b.flat for b in buckets], flight.world_size)
