"""Collectives over a group, and all-reduces in the background.

A function that starts collectives returns a Stage: the pending work, and the bytes that this worker sends for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 - whose arguments' defaults else hold a default group past its end
from torch import Tensor

from .buckets import BucketShare, Scalars
from .errors import CollectiveError, UserError
from .groups import backend_for, broadcast, compare, drop_groups, host_group, leave_group, moved_by_nccl, new_group
from .stats import Mark, Seconds, between, mark, plus


class Pending(Protocol):
    """Work in the background: a dist.Work or OtherWork."""

    def is_completed(self) -> bool: ...
    def wait(self) -> Any: ...


@dataclass(frozen=True)
class OtherWork:
    """Work that is no dist.Work, such as a copy between a GPU and the host."""

    is_completed: Callable[[], bool]
    wait: Callable[[], Any]


class Link(Protocol):
    """An emulated slow link, for measurements on one machine. See testing/link.py."""

    def reserve(self, nbytes: float) -> float:
        """Queues `nbytes` on the link, and returns the time.perf_counter() at which they have crossed it."""
        ...


class Failures(Protocol):
    """Finds which ranks have failed. See guards/failure.py."""

    def register(self, group: dist.ProcessGroup) -> None: ...  # learns the group's members
    def come_together(self, kind: str, method: Any) -> None: ...  # waits until all workers make this call
    def describe_failed(self, members: Sequence[int]) -> str: ...  # names the failed ranks among them


Stage = tuple[Sequence[Pending], int]  # pending collectives, and the bytes that this worker sends for them
BACKGROUND: Stage = ([], 0)  # no work: the code after this `yield` runs in the background, not in launch()
PAUSE: Stage = ((), 0)  # the next stage needs something that the caller has yet to give: see AsyncAllReduce.resume
PIECES = 16  # pieces in which a sum over the workers is computed, so that its temporary is small


def ring_bytes(nbytes: int, world_size: int) -> int:
    """Returns the bytes that each of `world_size` workers sends in a ring all-reduce of `nbytes` bytes."""
    return round(2 * (world_size - 1) / world_size * nbytes)


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Sets the timeout in seconds for collectives that start from now on. NCCL's watchdog ends the process after it.

    Over gloo, torch 2.6 and 2.7 keep the timeout with which the group was made (fixed by pytorch's #158128).
    """
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def sum_flats(flats: Sequence[Tensor], group: dist.ProcessGroup) -> Stage:
    """Starts the in-place sum of each tensor over the workers."""
    works, n, sent = [], dist.get_world_size(group), 0
    for flat in flats:
        work = dist.all_reduce(flat, group=group, async_op=True) if flat.numel() else None
        works += [work] if work is not None else []
        sent += ring_bytes(flat.numel() * flat.element_size(), n)
    return works, sent


def send_first(flats: Sequence[Tensor], group: dist.ProcessGroup) -> Stage:
    """Starts to send the first member's values of each tensor to all. The bytes are an average per member."""
    works = [dist.broadcast(flat, group_src=0, group=group, async_op=True) for flat in flats if flat.numel()]
    n = dist.get_world_size(group)
    sent = sum(round((n - 1) / n * flat.nbytes) for flat in flats)
    return [work for work in works if work is not None], sent


def all_gather(to: Tensor, own: Tensor, group: dist.ProcessGroup) -> Stage:
    """Starts an all-gather: part i of the contiguous tensor `to` becomes `own` of worker i."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older name: torch < 2.13
    work = gather(to.view(-1), own, group=group, async_op=True)
    assert work is not None
    return [work], (dist.get_world_size(group) - 1) * own.nbytes


def gather_parts(parts: Tensor, group: dist.ProcessGroup) -> Iterator[Stage]:
    """All-gather in place: every worker gets row i of `parts`, [workers, n], from worker i."""
    to = parts if parts.is_contiguous() else parts.new_empty(parts.shape)
    yield all_gather(to, parts[dist.get_rank(group)].clone(), group)
    if to is not parts:
        parts.copy_(to)


def run(stages: Iterator[Stage]) -> None:
    """Runs stages one after the other. The caller waits for each of them."""
    for works, _ in stages:
        for work in works:
            work.wait()


RECENT = 8  # launch intervals that the timeout follows, so a slow compilation counts for so many rounds
RESUME = "look at what it printed, and resume from the newest checkpoint"
LEFT = "this worker has left the other workers after an exception: make a new object to train on"
UNKNOWN = "a worker has failed or cannot be reached, it is not known which"


class AsyncAllReduce:
    """Runs the stages of one all-reduce in the background while the caller computes.

        allreduce.launch(reducer.stages(allreduce.group, number))  # returns at once, even if peers are late
        allreduce.done()                                           # True when it is complete; never blocks
        allreduce.wait()                                           # blocks; the tensors then hold the result

    `stages` is a generator that yields the collectives it has started. If NCCL moves the tensors, all stages are queued
    at once in a side stream. With gloo a wait blocks, so a thread waits for each stage and starts the next. The thread
    lives as long as one all-reduce, and uses the side stream on a GPU.

    Args:
        device: Device of the reduced tensors.
        group: The workers. None means all.
        timeout: Seconds until a missing peer is an error. The longest of the last intervals between two launches is
            added, because a peer may be that late.
        backend: gloo or nccl. None means the group's backend.
        overlap: Whether the caller computes during an all-reduce.
        link: Delays every step until its bytes would have crossed this link. Not over NCCL, whose waits do not block
            the host.
        failures: Finds which ranks have failed.

    Attributes:
        launches: All-reduces started by all objects of this process.
        launched: All-reduces started by this object.
        bytes_sent: Bytes that this worker has sent for the last all-reduce.
        seconds: Time from the last launch to its arrival.
        exposed: Communication that was not hidden, in seconds, for the last result that was waited for. It is the
            calling thread's time in launch() and done(), plus its time in wait() on a CPU. On a GPU the last term is
            how long the current stream stalls.
        in_flight: Whether an all-reduce was launched and not waited for.
        failed: Why an all-reduce has failed, or that leave() was called. "" as long as neither has happened.
        place: This worker's index among the scalars with a place per worker. There are `places` of them.
        most: Largest number of workers that the group may ever have.
        is_elastic: Whether workers may leave and join.
        votes: Whether the ranks of a worker vote on an arrival, which takes a local step. They are the ranks of the
            group `voters`, which no other thread may use; None means all processes.
        generation: Rises whenever workers have left or joined.
        timed_groups: Groups whose timeout follows the intervals between launches.
        of_workers: The group that was given, which no all-reduce uses. None means all processes.
        by_nccl: Whether NCCL moves the tensors.
        label: Name of the last all-reduce in errors. Its owner may set it, because a round may have several.
    """

    launches = generation = 0
    label = ""
    is_elastic = votes = False
    voters: dist.ProcessGroup | None = None
    of_workers: dist.ProcessGroup | None = None

    def __init__(
        self,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        backend: str | None = None,
        overlap: bool = True,
        link: Link | None = None,
        failures: Failures | None = None,
    ):
        self.device, self.timeout, self._overlap = device, timeout, overlap
        self._failures, self.of_workers = failures, group
        self.group = new_group(group, timeout, device, backend, overlap=overlap)
        self.timed_groups = [self.group] if self.group is not None else []
        if self.group is not None:
            host_group(self.group, timeout)
            if failures:
                failures.register(self.group)
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.place, self.places, self.most = self.rank, self.world_size, self.world_size
        self.launched = 0
        self.bytes_sent = 0
        self.seconds: Seconds = 0.0
        self.exposed: Seconds = 0.0
        self.in_flight = False
        self.by_nccl = self.group is not None and moved_by_nccl(self.group, device)
        self._link = link if not self.by_nccl else None
        # Its kernels are small and peers wait for them, hence the high priority.
        self._side = torch.cuda.Stream(device, priority=-1) if self.by_nccl or device.type == "cuda" else None
        self._end_mark: Mark = 0.0  # with NCCL, the end of the queued stages
        self._queued: tuple[Mark, Iterator[Stage]] = 0.0, iter(())  # with NCCL, the begin of the stages, and the rest
        self._thread: threading.Thread | None = None
        self._vote: dist.Work | None = None  # the vote in progress
        self._caller_waits = threading.Event()  # tells the thread that the caller waits, so polling can stop
        self._error: Exception | None = None  # raised by a stage
        self._lock = threading.Lock()  # held while the thread starts a stage
        self.failed = ""
        self._launched_at = time.perf_counter()
        self._intervals = deque([0.0], RECENT)  # seconds between the last launches
        self._host_seconds = 0.0  # the calling thread's time in here since the last launch

    def agree(self, settings: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Gives all workers rank 0's tensors. UserError if settings, shapes or dtypes of the workers differ."""
        self.check_alive()
        if self.group is not None:
            compare(settings, tensors, self.group)
            broadcast(tensors, self.group, self.device)

    def check_alive(self) -> None:
        """Raises CollectiveError again if an all-reduce has failed."""
        if self.failed:
            raise CollectiveError(self.failed)

    def launch(self, stages: Iterator[Stage]) -> None:
        """Starts the stages, and returns at once. Step 3 of Algorithm 1."""
        assert not self.in_flight, "wait() for what is in flight before the next launch"
        self.check_alive()
        if self.group is None and self.world_size > 1:
            raise UserError("close() has left the workers' group: make a new object to train on")
        self.launched += 1
        AsyncAllReduce.launches += 1
        self.in_flight = True
        self._host_seconds = 0.0
        began = time.perf_counter()
        self._intervals.append(began - self._launched_at)
        self._launched_at = began
        for group in self.timed_groups:
            set_timeout(group, self.timeout + max(self._intervals))
        self._begin(stages)
        self._host_seconds += time.perf_counter() - began

    def done(self) -> bool:
        """Returns whether all stages are complete, or queued with NCCL. Never blocks."""
        self.check_alive()
        if self._thread is None:
            return True
        began = time.perf_counter()
        if not self._thread.is_alive():
            self._end()
        self._host_seconds += time.perf_counter() - began
        return self._thread is None

    def arrived(self) -> bool:
        """Returns whether the result is there, so that wait() stalls neither the host nor the stream. Never blocks.

        With votes, all ranks of the worker get the same answer in the same local step. A vote starts in one step and is
        read in the next. The ranks synchronize gradients in every step, so the read waits for no rank that is not
        waited for anyway.
        """
        is_here = self.done() and (not isinstance(self._end_mark, torch.cuda.Event) or self._end_mark.query())
        if not self.votes:
            return is_here
        if self._read_vote():
            return True
        self._all_here = torch.tensor(int(is_here), device="cpu")
        self._vote = dist.all_reduce(self._all_here, dist.ReduceOp.MIN, group=self.voters, async_op=True)
        return False

    def _read_vote(self) -> bool:
        """Ends the vote that has started, and returns its result. False if there is none."""
        vote, self._vote = self._vote, None
        if vote is None:
            return False
        try:
            vote.wait()
            return bool(self._all_here)
        except RuntimeError as error:
            self._error = _without_traceback(error)
        del vote
        self._raise()  # outside of except: a traceback would keep the connections open

    def wait(self, before_use: Sequence[Callable[[], None]] = ()) -> None:
        """Blocks until the result is in the tensors. Step 2 of Algorithm 1.

        Args:
            before_use: Functions to call before the result may be used.

        Raises:
            CollectiveError: If a worker has died or is missing for too long. The tensors then hold useless partial
                sums.
        """
        assert self.in_flight, "nothing was launched"
        start, before, began = mark(self.device), self._host_seconds, time.perf_counter()
        self.drain()  # with gloo the host waits, and no kernel is queued to the stream meanwhile
        self._read_vote()
        self._host_seconds += time.perf_counter() - began
        in_stream = self._side is not None
        self.exposed = plus(between(start, mark(self.device)), before) if in_stream else self._host_seconds
        for call in before_use:
            call()
        self.in_flight = False

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the block's time on the calling thread as exposed communication."""
        began = time.perf_counter()
        yield
        self._host_seconds += time.perf_counter() - began

    def drain(self) -> bool:
        """Blocks until the all-reduce in flight is complete, and leaves it for `wait`. False if there is none."""
        if not self.in_flight:
            return False
        self.check_alive()
        self._end()
        return True

    def in_foreground(self, act: Callable[[], None], what: str) -> None:
        """Runs the caller's own collectives over the group, after the all-reduce in flight is complete.

        Raises:
            CollectiveError: If one fails. The message says that `what` has failed.
        """
        try:
            with self.counted():
                self.drain()  # its thread may still use the group
            return act()
        except RuntimeError as error:
            if self.group is None:  # the all-reduce's own error
                raise
            reason = self.failure(str(error), what)
        raise reason  # outside of except: a traceback would keep the connections open

    def restore(self, launched: int, in_flight: bool) -> None:
        """Continues from a checkpoint after `launched` all-reduces.

        It waits for the all-reduce in flight, and discards it. `in_flight` says whether the tensors hold a result that
        was not waited for.
        """
        self.drain()
        self._read_vote()
        self.launched, self.in_flight, self._launched_at = launched, in_flight, time.perf_counter()

    def close(self) -> None:
        """Leaves the process group. Call it after the last `wait`."""
        if self.in_flight:
            raise UserError("close() with an all-reduce in flight, whose average would be lost: call finish() before")
        if self.group is not None:
            leave_group(self.group, self.timeout, overlap=self._overlap)
            self._forget()

    def leave(self) -> None:
        """Leaves the groups after an exception, without waiting, and discards the all-reduce in flight.

        Peers that wait for this worker then get an error, with gloo after the collective under way.
        """
        left = self._forget()
        if not left:
            return
        self.failed, self.in_flight = self.failed or LEFT, False
        for group in left if self.by_nccl else []:
            group.abort()  # otherwise its kernels wait for the peers
        thread, self._thread = self._thread, None
        drop_groups(left, thread)

    def _forget(self) -> list[dist.ProcessGroup]:
        """Drops the groups, and returns the groups with a timeout.

        A destroyed group keeps its connections while something refers to it or to its work.
        """
        groups, self.timed_groups = self.timed_groups, []
        self.group = self.of_workers = self.voters = self._vote = None
        return groups

    def _begin(self, stages: Iterator[Stage]) -> None:
        """Queues all stages with NCCL. With gloo starts the first stage, and a thread for the rest."""
        self.bytes_sent, self.seconds = 0, 0.0
        if self._side is not None:  # the stages follow the work queued so far, and overlap with later work
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_side_stream():
            if self.by_nccl:
                self._queued = mark(self.device), stages
            began = time.perf_counter()
            stage = None if self.by_nccl else self._next(stages)
        self.resume()
        if stage is not None:
            self._thread = threading.Thread(target=self._run_stages, args=(began, stage, stages), daemon=True)
            self._thread.start()

    def resume(self) -> None:
        """Queues the stages up to the next PAUSE with NCCL. With gloo, the thread waits inside a stage."""
        if not self.by_nccl:
            return
        began, stages = self._queued
        with self._on_side_stream():
            while (stage := self._next(stages)) not in (None, PAUSE):
                for work in self._count_bytes(stage):
                    work.wait()  # the stream waits, not the host, because no timeout is given
            self._end_mark = mark(self.device)
            self.seconds = between(began, self._end_mark)

    def _next(self, stages: Iterator[Stage]) -> Stage | None:
        """Starts the next stage, and returns it; None after the last."""
        try:
            return next(stages, None)
        except Exception as error:
            self._error = _without_traceback(error)
        self._raise()  # outside of except: a traceback would keep the connections open

    def _run_stages(self, began: float, stage: Stage | None, stages: Iterator[Stage]) -> None:
        """Runs in the thread: waits for each stage, and starts the next, unless the caller has left meanwhile."""
        me = threading.current_thread()
        try:
            with self._on_side_stream():
                while stage is not None:
                    for work in self._count_bytes(stage):
                        self._poll(work)
                    with self._lock:
                        if self._thread is not me:
                            return
                        stage = next(stages, None)
            self.seconds = time.perf_counter() - began
        except Exception as error:
            if self._thread is me:
                self._error = _without_traceback(error)

    def _poll(self, work: Pending) -> None:
        """Polls in Python until the work is complete or the caller waits, then waits in torch.

        If the interpreter exits while a thread is inside torch's wait, std::terminate ends the process. The intervals
        lose at most a twentieth of the time.
        """
        began = time.perf_counter()
        while not work.is_completed():
            if self._caller_waits.wait(min(5e-3, 5e-5 + (time.perf_counter() - began) / 20)):
                break
        work.wait()  # at most until the group's timeout

    def _count_bytes(self, stage: Stage) -> Iterator[Pending]:
        """Adds a stage's bytes to bytes_sent, and yields its pending work. Then it waits for the emulated link."""
        works, sent = stage
        self.bytes_sent += sent
        crossed_at = self._link.reserve(sent) if self._link else 0.0
        yield from works
        if self._link:
            time.sleep(max(0.0, crossed_at - time.perf_counter()))

    def _on_side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Queues the block's GPU work in the side stream."""
        return torch.cuda.stream(self._side) if self._side is not None else contextlib.nullcontext()

    def _end(self) -> None:
        """Joins the thread, raises the error of a stage, and lets the current stream wait for the side stream."""
        if self._thread is not None:
            self._caller_waits.set()
            self._thread.join()
            self._thread = None
            self._caller_waits.clear()
        if self._error is not None:
            self._raise()
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _raise(self) -> NoReturn:
        """Raises the error of a stage. The all-reduce never arrives."""
        error, self._error = self._error, None
        assert error is not None
        if isinstance(error, RuntimeError) and self.group is not None:
            raise self.failure(str(error))
        self.in_flight = False
        self.failed = f"a reduction failed before: {type(error).__name__}: {error}"
        raise error

    def failure(self, reason: str, what: str = "") -> CollectiveError:
        """Returns an error that names the failed ranks, and leaves the group so that waiting peers fail, too.

        gloo reports a dead worker only to its neighbors. The other workers notice when the neighbors close their
        connections. Connections close once nothing refers to the work any more. The message contains the backend's
        `reason`, and `what` has failed if not the all-reduce.
        """
        self.in_flight = False
        assert self.group is not None
        ranks, only_group = dist.get_process_group_ranks(self.group), len(self.timed_groups) == 1
        group, self.group, self.timed_groups = self.group, None, self.timed_groups[1:]
        if self.by_nccl:
            group.abort()  # otherwise its kernels wait for the peers, and destroying it waits for the kernels
        dist.destroy_process_group(group)
        del group
        # With a node's group, not all ranks take part in both groups.
        failed = self._failures.describe_failed(ranks if only_group else ()) if self._failures else UNKNOWN
        what = what or self.label or f"the all-reduce of round {self.launched - 1}"
        waited, limit = time.perf_counter() - self._launched_at, self.timeout + max(self._intervals)
        when, remedy = f"timeout {self.timeout:g} s", "if that worker is only slow, give a larger timeout"
        if waited < limit and "imed out" not in reason:
            when, remedy = f"before {self.timeout:g} s: a worker has died, or ended, or called something else", RESUME
        reason = reason.partition(". This is")[0].splitlines()[0]
        self.failed = f"rank {ranks[self.rank]}: {what} failed; {failed} ({when}): {reason}; {remedy}"
        return CollectiveError(self.failed)


def _without_traceback(error: Exception) -> Exception:
    """Returns the error of a collective without its traceback, which would keep connections open."""
    return RuntimeError(str(error)) if isinstance(error, RuntimeError) else error


class Reducer:
    """Reduces the buckets' flat tensors over the workers, in stages. This class sums them in their own precision.

    Compressed reducers derive from it.

    Args:
        buckets: The buckets or parts of them. The sums replace their values.
        scalars: The scalars that are summed with them, in the first bucket. Not used here.
        rank: This worker's rank. Not used here.
        world_size: Number of workers.
        owned: Whether each worker gets only the sums of the part of each payload that it owns.

    Attributes:
        kind: Its name in checkpoints.
        changes: Whether `become` can change its format.
        scale: Factor that turns the result into averages: 1 over the workers for sums.
        state: Its tensors in checkpoints, by name, such as error-feedback residuals.
    """

    kind, changes, owned = "float32", False, False
    buckets: Sequence[Any]

    def __init__(
        self,
        buckets: Sequence[BucketShare],
        scalars: Scalars,  # noqa: ARG002
        rank: int,  # noqa: ARG002
        world_size: int,
        *,
        owned: bool = False,
    ):
        self.buckets, self.owned, self.scale = buckets, owned, 1 / world_size
        self.state: dict[str, list[Tensor]] = {}

    def become(self, kind: str) -> None:
        """Changes the format to `kind`, before a checkpoint of that kind is loaded. Here it does nothing."""

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        """Yields the stages of the all-reduce of the `number`-th round, counted from 1.

        The generator keeps no reference to the group, which is None for one worker.
        """
        if self.owned and group is not None:
            yield sum_flats([bucket.rest for bucket in self.buckets], group)
            for bucket in self.buckets:
                yield from sum_parts(bucket.flat, group)
            return
        for i in range(len(self.buckets)):
            yield from self.of_bucket(i, group, number, i)

    def of_bucket(self, i: int, group: dist.ProcessGroup | None, number: int, turn: int) -> Iterator[Stage]:  # noqa: ARG002
        """Yields the stages of bucket `i` alone, after `turn` other buckets of this all-reduce."""
        if group is not None:
            yield sum_flats(self.buckets[i].sent(), group)


def sum_parts(flat: Tensor, group: dist.ProcessGroup) -> Iterator[Stage]:
    """Reduce-scatter in place: part `rank` of `flat` becomes its sum over the workers. Other parts are undefined.

    gloo implements reduce-scatter as an all-reduce. Here each worker sends every part to its owner, which adds the
    parts.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = flat.view(n, -1)
    if backend_for(group, flat.device) == "nccl":
        work = dist.reduce_scatter_tensor(parts[rank], flat, group=group, async_op=True)
        assert work is not None
        yield [work], round((n - 1) / n * flat.nbytes)
        return
    for columns in parts.split(max(1, -(-parts.shape[1] // PIECES)), dim=1):  # in pieces, so that `theirs` stays small
        theirs = torch.empty_like(mine := columns.contiguous())
        work = dist.all_to_all_single(theirs, mine, group=group, async_op=True)
        assert work is not None
        yield [work], round((n - 1) / n * mine.nbytes)
        columns[rank].copy_(theirs.sum(0))
