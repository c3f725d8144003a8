"""Groups of workers: making and leaving them, what their members must agree on, and collectives over one of them.

A collective over a group is a stage: what has been started, and the bytes that this worker sends for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 - whose arguments' defaults else hold a default group past its end
from torch import Tensor

from .buckets import Bucket, Scalars, as_bits, kind_of, parts_of
from .errors import CollectiveError, UserError
from .stats import Mark, Seconds, between, mark, plus


class Pending(Protocol):
    """What is under way in the background: a dist.Work, or a copy between a GPU and the host."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta = ...) -> Any: ...


Stage = tuple[Sequence[Pending], int]  # collectives under way, and the bytes that this worker sends for them
# Thread blocks, each on a multiprocessor of its own, that one of NCCL's collectives may hold (results/gpu.md). Over
# sockets NCCL takes two; a matrix product beside eight that wait is 12 % slower, beside two 7 %.
MAX_CTAS = 8
BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")  # torch honors both
DUMP = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
CONNECT_SIZES = (4, 1 << 20, 1 << 26)  # bytes: NCCL chooses among its algorithms by size
LONGEST = 1e8  # seconds of a timeout, three years
MIXED = 6364136223846793005  # odd, as Knuth's generator multiplies by


def ring_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that each of `world_size` workers sends in a ring all-reduce of a buffer of `nbytes` bytes."""
    return round(2 * (world_size - 1) / world_size * nbytes)


# Weakly held: gloo's threads end with the last reference, and one that outlives the interpreter aborts the process.
_spare: dict[tuple[object, ...], list[weakref.ref[dist.ProcessGroup]]] = {}  # of new_group's arguments: left
_hosts = weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]()  # of ranks: those that host_group has made


def backend_for(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that moves tensors of this device: dist.get_backend says "undefined" where a group has one for each
    kind of device, as after init_process_group() without a backend."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "no")


def moved_by_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL moves the group's tensors: then a wait orders streams. gloo moves a GPU's tensors through the host,
    in threads of its own, and a wait for it blocks. UserError where the environment makes NCCL's waits block, too."""
    if device.type != "cuda" or backend_for(group, device) != "nccl":
        return False
    for name in BLOCKING:
        if os.environ.get(name, "0") not in ("", "0"):
            raise UserError(
                f"{name}={os.environ[name]}: the host would wait for every all-reduce, and nothing would be hidden; "
                "unset it"
            )
    return True


@torch.no_grad()
def connect(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
    """Makes NCCL's connections for all-reduces up to `nbytes` bytes, and for the collectives of compressed ones.

    NCCL connects when an algorithm is first used, and the host then waits inside the call for the latest peer. All
    members call this function together, before training. A first compressed all-reduce still waits (results/gpu.md).
    """
    for size in sorted({min(size, max(4, nbytes)) for size in CONNECT_SIZES}):
        dist.all_reduce(torch.zeros(size // 4, device=device), group=group)
    rows = torch.zeros(dist.get_world_size(group), 16, dtype=torch.uint8, device=device)
    dist.all_to_all_single(torch.empty_like(rows), rows, group=group)
    dist.all_gather([*rows.unbind()], rows[0].clone(), group=group)


def new_group(
    group: dist.ProcessGroup | None,
    timeout: float,
    device: torch.device,
    backend: str | None = None,
    *,
    overlap: bool = False,
) -> dist.ProcessGroup | None:
    """A process group with the ranks of `group` (None: all) and `timeout` seconds, used by nobody else.

    device: Where the moved tensors are. backend: gloo or nccl; None for what `group` uses there. overlap: whether its
    collectives run underneath local steps; somebody waits for the others, which nothing may slow down. Returns None
    when torch.distributed is not initialised: then there is one worker.
    """
    if not isinstance(timeout, int | float) or not 0 < timeout < LONGEST:
        raise UserError(f"timeout={timeout!r}: give seconds, above 0 and below {LONGEST:g}")
    if not dist.is_initialized():
        return None
    everyone = group is None or dist.get_world_size(group) == dist.get_world_size()
    ranks = None if everyone else dist.get_process_group_ranks(group)
    backend = backend or backend_for(group, device)
    if backend == "no":
        raise UserError(
            f"the process group ({dist.get_backend_config(group)}) moves no {device.type} tensors: start it with "
            "backend 'cpu:gloo,cuda:nccl'"
        )
    left = _spare.get((tuple(ranks), timeout, backend, overlap), []) if ranks else []
    if left and is_alive(left[-1]()):
        return left.pop()()
    within = timedelta(seconds=timeout)
    if backend == "nccl":
        # after a failure torch's watchdog sleeps four times as long before it ends the process: a minute by default
        os.environ.setdefault(*DUMP)
    made = dist.new_group(
        ranks,
        timeout=within,
        backend=backend,
        pg_options=_nccl_options(within, overlap) if backend == "nccl" else None,
        use_local_synchronization=not everyone,  # only the members need to call
    )
    assert isinstance(made, dist.ProcessGroup), "only its ranks may use the group"
    return made


def _nccl_options(timeout: timedelta, overlap: bool) -> Any:
    """High priority, so that a collective's blocks get their turn beside a full device. Overlapped ones get few blocks,
    because these spin until the slowest peer has arrived."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # torch takes its own argument, and warns where the two differ
    options.is_high_priority_stream = True
    if overlap:
        options.config.max_ctas = MAX_CTAS
    return options


def host_group(group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> dist.ProcessGroup | None:
    """Those workers in a group over gloo, for what is said beside training: objects and tensors of the host's memory.

    Such control may come between unlike rounds of the workers, while torch and NCCL demand one order over all groups
    of a device. `group` (None: the default one) serves where gloo moves its CPU tensors, else a default group that has
    gloo and the same ranks, else one with `timeout` that is made here, once: all members must come to the first call.
    None: there is one worker.
    """
    if not dist.is_initialized():
        return None
    group, cpu = group or dist.group.WORLD, torch.device("cpu")
    ranks = tuple(dist.get_process_group_ranks(group))
    everyone = [dist.group.WORLD] if len(ranks) == dist.get_world_size() else []
    for known in (group, *everyone):
        if backend_for(known, cpu) == "gloo":
            return known
    if not is_alive(known := _hosts.get(ranks)) and (known := new_group(group, timeout, cpu, "gloo")):
        _hosts[ranks] = known
    return known


def of_all(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each member gives, by rank; nobody goes on before all have come here."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=host_group(group))
    return found


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """How long collectives that start from now on may take; with NCCL its watchdog ends the process after that. Over
    gloo older torch (2.6, 2.7; mended by pytorch's #158128) keeps the timeout that the group was made with."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def leave_group(group: dist.ProcessGroup, timeout: float, *, overlap: bool = False) -> None:
    """Destroys a group of new_group, made with this timeout and overlap, or keeps it for the next one with its ranks.

    torch names a subgroup after its ranks, so that a second one would find the first one's addresses in the store.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        _spare.setdefault((tuple(ranks), timeout, dist.get_backend(group), overlap), []).append(weakref.ref(group))
    else:
        dist.destroy_process_group(group)


def drop_groups(groups: list[dist.ProcessGroup], after: threading.Thread | None) -> None:
    """Destroys them, so that who waits for this worker in one sees it broken, once a thread that uses them has ended;
    nobody waits for that here. Empties the list: connections close when nothing refers to them."""
    if after is not None:
        threading.Thread(target=lambda: (after.join(), drop_groups(groups, None)), daemon=True).start()
        return
    while groups:
        with contextlib.suppress(ValueError):  # the caller has destroyed all meanwhile
            dist.destroy_process_group(groups.pop())


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether torch.distributed still knows the group; not after destroy_process_group() and a new start."""
    return group in dist.distributed_c10d._world.pg_map


def compare(settings: tuple[Any, ...], tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """UserError on all workers unless all of them hold the same settings, shapes and dtypes."""
    kinds = [f"{len(tensors)} tensors", *map(kind_of, tensors)]
    theirs = of_all([*settings, *kinds], group)
    for rank, other in enumerate(theirs):
        for ours, its in zip(theirs[0], other, strict=False):  # in unlike numbers of tensors this is what differs first
            if ours != its:
                raise UserError(f"workers differ: rank 0 has {ours}, against {its} of rank {rank}")


@torch.no_grad()
def alike(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all members hold the same bits in tensors that `compare` has passed; the same answer for all. device:
    where tensors lie that the group moves.

    Each member sums up its bits with random weights: sums of unlike bits are equal once in 2^32 times, at most.
    """
    many = 1 << (22 if device.type == "cuda" else 17)  # at a time: what fills a GPU, or fits a cache
    odd = torch.empty(many, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0)) | 1
    weights, found = functools.cache(odd.to), torch.zeros((), dtype=torch.int64, device=device)
    for dense in (part for t in tensors for part in parts_of(t)):
        bits = as_bits(dense).contiguous().view(-1)
        bits = bits.view(torch.int32) if bits.element_size() == 8 else bits  # two signs of 64 bits would cancel out
        for part in bits.split(many):
            found = MIXED * found + (part * weights(dense.device)[: len(part)]).sum().to(device)
    ends = torch.stack([found, ~found])  # ~ turns the order of integers around
    dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=group)
    return bool(ends[0] == ~ends[1])


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """The first member's values for all. Where all hold them, as after one seed, 16 bytes cross the link.

    They travel as bytes: gloo and NCCL know few dtypes.
    """
    if alike(tensors, group, device):
        return
    for bits in (as_bits(part) for t in tensors for part in parts_of(t)):
        flat = bits.to(device).contiguous().view(-1)
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=group)
        if flat.data_ptr() != bits.data_ptr():  # else it was written in place
            bits.copy_(flat.view(bits.shape))


def sum_flats(flats: Sequence[Tensor], group: dist.ProcessGroup) -> Stage:
    """Starts the sum over the workers of each tensor, in place."""
    works, n, sent = [], dist.get_world_size(group), 0
    for flat in flats:
        work = dist.all_reduce(flat, group=group, async_op=True) if flat.numel() else None
        works += [work] if work is not None else []
        sent += ring_bytes(flat.numel() * flat.element_size(), n)
    return works, sent


def send_first(flats: Sequence[Tensor], group: dist.ProcessGroup) -> Stage:
    """Starts sending the first member's values of each tensor to all; the bytes are the members' mean."""
    works = [dist.broadcast(flat, group_src=0, group=group, async_op=True) for flat in flats if flat.numel()]
    n = dist.get_world_size(group)
    sent = sum(round((n - 1) / n * flat.nbytes) for flat in flats)
    return [work for work in works if work is not None], sent


def all_gather(to: Tensor, own: Tensor, group: dist.ProcessGroup) -> Stage:
    """Part i of `to`, which is contiguous, becomes `own` of worker i."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name, torch < 2.13
    work = gather(to.view(-1), own, group=group, async_op=True)
    assert work is not None
    return [work], (dist.get_world_size(group) - 1) * own.nbytes


def gather_parts(flat: Tensor, group: dist.ProcessGroup) -> Stage:
    """All-gather in place: every worker gets part i of `flat` from worker i."""
    return all_gather(flat, flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)].clone(), group)


RECENT = 8  # times between launches that a timeout allows for: one slow compile counts for so many rounds
LEFT = "this worker has left the others after an exception: make a new object to train on"
UNKNOWN = "a worker has failed or cannot be reached, it is not known which"


class AsyncAllReduce:
    """Runs the stages of one reduction at a time while the caller computes.

    device: where the reduced tensors lie. group: the workers (None: all). timeout: seconds until a missing peer is an
    error, beyond the longest of the last times between two launches: so far a peer may be behind. backend: None for
    the group's own. overlap: whether the caller computes meanwhile, and does not wait at once. failures: `register`
    learns of a group's members, and `describe_failed` says which of them a collective has failed for.

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
        overlap: bool = True,
        failures: Any = None,
    ):
        self.device, self.timeout, self._overlap = device, timeout, overlap
        self._failures = failures
        self.group = new_group(group, timeout, device, backend, overlap=overlap)
        self.timed_groups = [self.group] if self.group is not None else []  # those whose timeout follows the rounds
        if self.group is not None:
            host_group(self.group, timeout)
            if failures:
                failures.register(self.group)
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
            compare(settings, tensors, self.group)
            broadcast(tensors, self.group, self.device)
            if self._by_nccl:
                connect(self.group, self.device, sum(t.numel() * t.element_size() for t in tensors))

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
        AsyncAllReduce.launches += 1
        self.in_flight = True
        self._host_seconds = 0.0
        began = time.perf_counter()
        self._between.append(began - self._launched_at)
        self._launched_at = began
        for group in self.timed_groups:
            set_timeout(group, self.timeout + max(self._between))
        self._begin(stages)
        self._host_seconds += time.perf_counter() - began

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
        start, before, began = mark(self.device), self._host_seconds, time.perf_counter()
        self.drain()  # while the host waits, as over gloo, a GPU's stream stands still, too
        self._host_seconds += time.perf_counter() - began
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

    def drain(self) -> bool:
        """Blocks until what is in flight has landed, and leaves it there for `wait`. False: nothing is."""
        if not self.in_flight:
            return False
        self.check_alive()
        self._end()
        return True

    def restore(self, launched: int, in_flight: bool) -> None:
        """Continues after so many reductions, as from a checkpoint, and forgets what is in flight, which it waits for.
        in_flight: a result is in the owner's tensors that was not waited for."""
        self.drain()
        self.launched, self.in_flight, self._launched_at = launched, in_flight, time.perf_counter()

    def close(self) -> None:
        """Leaves the process group; call it after the last `wait`."""
        if self.in_flight:
            raise UserError("close() with an all-reduce in flight, whose mean would be lost: call finish() before")
        if self.group is not None:
            leave_group(self.group, self.timeout, overlap=self._overlap)
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
        gone = (
            self._failures.describe_failed(ranks if alone else ()) if self._failures else UNKNOWN
        )  # a node's are not all in both groups
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
            yield sum_flats(self.flats, group)


def all_reduce(buckets: Sequence[Bucket], scalars: Scalars, flight: AsyncAllReduce) -> Reducer:
    """Each bucket's flat tensor is summed in its own precision."""
    return Reducer([b.flat for b in buckets], flight.world_size)
