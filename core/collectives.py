"""The asynchronous mean over a process group: flat buffers, launch, done, wait, and what happens on failure.

The communication knows no mathematics: it averages whatever its owner wrote into `flats`. It runs on a process
group of its own, so it never queues behind the model's own collectives, and needs no thread of ours: gloo and
NCCL move the data by themselves after `launch`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from core.errors import CollectiveError
from core.groups import Pending, Stage, leave_group, new_group, ring_bytes
from core.overlap import Mark, Seconds, between, mark


class Link(Protocol):
    """An emulated network link, which holds every collective back until its bytes would have crossed."""

    def reserve(self, nbytes: float) -> float:
        """Queues `nbytes` and returns the time.perf_counter() at which they have crossed."""
        ...


class Bucket:
    """One flat buffer for all tensors of one dtype on one device.

    flat: [numel + tail], in the dtype of the sums: float64 for float64 tensors, else float32, so that 16-bit
    parameters lose nothing in transit. views: `flat` seen in the shape of each tensor, in order. shared, parts: the
    first `shared` tensors are followed by zeros up to a multiple of `parts` elements, to be cut into equal parts.
    host: in the host's memory, pinned where there is a GPU.
    """

    def __init__(self, tensors: Sequence[Tensor], tail: int, shared: int = 0, parts: int = 1, host: bool = False):
        self.dtype = tensors[0].dtype
        front, rest = tensors[:shared], tensors[shared:]
        self.shared_numel = -(-sum(t.numel() for t in front) // parts) * parts
        self.numel = self.shared_numel + sum(t.numel() for t in rest)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        device, pinned = ("cpu", torch.cuda.is_available()) if host else (tensors[0].device, False)
        self.flat = torch.zeros(self.numel + tail, dtype=wide, device=device, pin_memory=pinned)
        self.views = view_as(self.flat, front) + view_as(self.flat[self.shared_numel :], rest)


def view_as(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of a 1-d tensor, viewed in the shapes of `tensors`."""
    pieces = flat[: sum(t.numel() for t in tensors)].split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


class AsyncMean:
    """The mean over all workers of a set of tensors, computed in the background.

    tensors: templates; grouped by dtype and device into one flat buffer each. The buffers belong to this object:
    the tensors themselves are never read or written here, so a collective cannot touch live parameters.
    tail: how many scalars travel behind the first buffer. timeout: seconds until a missing peer is an error.

        mean.buckets[0].views[0].copy_(...)    # the owner writes its snapshot
        mean.launch([1.0])                     # returns at once, whether or not the peers are there
        mean.done()                            # True once the result is in; never blocks
        tail = mean.wait()                     # blocks; the buffers and `tail` now hold means

    What runs in the background is a chain of stages, a generator that yields the collectives it has started; it goes on
    in done() and wait() on a CPU, and by itself in a stream of its own on a GPU.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        group: dist.ProcessGroup | None = None,
        tail: int = 0,
        timeout: float = 600.0,
        link: Link | None = None,
        backend: str | None = None,
    ):
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for t in tensors:
            kinds.setdefault((t.dtype, t.device), []).append(t)
        self.members = list(kinds.values())  # the tensors of each bucket, in order
        self.buckets = [self._bucket(ts, tail if i == 0 else 0) for i, ts in enumerate(self.members)]
        self.tail = tail
        self.timeout = timeout
        self.link = link
        self.group = new_group(group, timeout, backend)
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.scale = 1 / self.world_size  # turns what lands in the buffers into means
        self.launched = 0  # how many means so far
        self.bytes_sent = 0  # by this worker, for the last mean
        self.seconds: Seconds = 0.0  # from the last launch to its landing
        self.waited: Seconds = 0.0  # how long the last wait() blocked: the host on a CPU, the current stream on a GPU
        self.device = self.buckets[0].flat.device
        self.state: dict[str, list[Tensor]] = {}  # what a checkpoint holds of it, beside the buffers in flight
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._chain: Iterator[Stage] | None = None
        self._works: list[Pending] = []
        self._in_flight = False
        self._failed = ""
        self._ready_at = 0.0
        self._launched_at: Mark = 0.0
        self._landed_at: list[float] = []  # when the works of the last stage ended

    def _bucket(self, tensors: list[Tensor], tail: int) -> Bucket:
        return Bucket(tensors, tail)

    @property
    def in_flight(self) -> bool:
        """Whether a launched mean has not been waited for."""
        return self._in_flight

    @property
    def tail_view(self) -> Tensor:
        """The scalars behind the first buffer, [tail], for the owner to write before launch."""
        first = self.buckets[0].flat
        return first[len(first) - self.tail :]

    def launch(self, tail: Sequence[float | Tensor] = ()) -> None:
        """Starts averaging what the buffers hold, `tail` written to the tail's first places; returns at once."""
        assert not self._in_flight, "wait() for the mean in flight before the next launch"
        assert len(tail) <= self.tail, f"{len(tail)} tail scalars, built for {self.tail}"
        if self._failed:
            raise CollectiveError(self._failed)
        for place, scalar in enumerate(tail):  # one by one: writes on the device without a synchronising copy
            self.tail_view[place] = scalar
        self.launched += 1
        self.bytes_sent = 0
        self._in_flight = True
        self._launched_at = mark(self.device)
        self._chain = self._stages()
        if self._side is None:
            self._next_stage()
        else:  # everything is queued at once: in this stream a wait does not block the host
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side):
                self._next_stage()
                self._advance(block=True)
                self.seconds = between(self._launched_at, mark(self.device, self._side))

    def _stages(self) -> Iterator[Stage]:
        """All that happens in the background, in order."""
        if self.group is not None:
            sizes = [b.flat.numel() * b.flat.element_size() for b in self.buckets]
            yield [self.all_reduce(b.flat) for b in self.buckets], sum(ring_bytes(s, self.world_size) for s in sizes)

    def all_reduce(self, flat: Tensor) -> dist.Work:
        """Starts the sum over the workers, in place."""
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        return work

    def average(self, flats: Sequence[Tensor]) -> None:
        """Blocks until each of `flats`, equally shaped on all workers, holds its mean; exact, whatever launch() sends.

        For a rare moment when nothing is in flight; a CollectiveError leaves partial sums.
        """
        assert not self._in_flight, "wait() for the mean in flight first"
        if self.group is not None:
            self._ready_at = 0.0
            self._works = [self.all_reduce(flat) for flat in flats if flat.numel()]
            self._wait_for_works()
            self._works.clear()
            for flat in flats:
                flat.div_(self.world_size)

    def _next_stage(self) -> None:
        """Starts the next collectives; at the chain's end there are none."""
        assert self._chain is not None
        self._works.clear()
        reason, sent = "", 0
        try:
            works, sent = next(self._chain, ([], -1))
            self._works = list(works)
        except RuntimeError as error:
            reason = str(error)
        if reason:
            raise self._failure(reason)
        if sent < 0:
            self._chain = None
            return
        self.bytes_sent += sent
        self._ready_at = self.link.reserve(sent) if self.link else 0.0
        self._landed_at = []
        for work in self._works if self._side is None else []:  # on a GPU a future's callback is early
            if isinstance(work, dist.Work):
                _note_time(work, self._landed_at)

    def _advance(self, *, block: bool) -> bool:
        """Goes along the chain as far as it has got, or to its end; True at the end."""
        while self._chain is not None:
            landed = all(work.is_completed() for work in self._works)
            if not block and not (landed and time.perf_counter() >= self._ready_at):
                return False
            self._wait_for_works()
            self._next_stage()
        return True

    def _wait_for_works(self) -> None:
        reason = ""
        try:
            for work in self._works:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            reason = str(error)
        work = None
        if reason:
            raise self._failure(reason)
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        if self._side is None and self._works:  # a callback may be late by a moment: then it lands now
            seen = len(self._landed_at) == len(self._works)
            landed = max([self._ready_at, *self._landed_at] if seen else [time.perf_counter()])
            self.seconds = between(self._launched_at, landed)

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks, and does not synchronise a GPU."""
        if self._failed:
            raise CollectiveError(self._failed)
        return self._advance(block=False)

    def wait(self, *, divide: bool = True) -> Tensor:
        """Blocks until the mean is in the buffers, for the owner to use; returns the mean of the tail, [tail].

        divide=False: the owner multiplies by `scale` itself, in a pass over the buffers that it makes anyway.
        Raises CollectiveError when a worker died or stayed away for `timeout` seconds. The buffers then hold
        partial sums and must not be used.
        """
        assert self._in_flight, "nothing was launched"
        start = mark(self.device)
        self.settle()
        self.waited = between(start, mark(self.device))
        self._in_flight = False
        tail = self.tail_view * self.scale
        for bucket in self.buckets if divide else []:
            bucket.flat.mul_(self.scale)
        return tail

    def settle(self) -> bool:
        """Blocks until what is in flight has landed, and leaves it there for `wait`. False: nothing is."""
        if not self._in_flight:
            return False
        if self._failed:
            raise CollectiveError(self._failed)
        self._advance(block=True)
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        return True

    def restore(self, flats: Sequence[Tensor] | None, launched: int) -> None:
        """Continues from a checkpoint: `flats` were in flight and have landed (None: nothing was)."""
        self.settle()
        for bucket, flat in zip(self.buckets, flats or [], strict=flats is not None):
            bucket.flat.copy_(flat)
        self._in_flight = flats is not None
        self.launched = launched

    def _failure(self, reason: str) -> CollectiveError:
        """Leaves the group, so that the workers which still wait see it broken too, and names the silent ranks.

        gloo tells only the dead worker's neighbours; the others notice when these close their connections, and
        connections close once nothing refers to the work any more.
        """
        self._works.clear()
        self._chain = None
        self._in_flight = False
        assert self.group is not None
        ranks, name = dist.get_process_group_ranks(self.group), self.group.group_name
        group, self.group = self.group, None
        dist.destroy_process_group(group)
        del group
        silent = [ranks[i] for i in _silent(f"co2/failed/{name}", self.rank, self.world_size)]
        who = f"no answer from rank {', '.join(map(str, silent))}" if silent else "all ranks still answer"
        self._failed = (
            f"rank {ranks[self.rank]}: the all-reduce of round {self.launched - 1} failed; {who} "
            f"(timeout {self.timeout:g} s): {reason.partition('. This is')[0].splitlines()[0]}"
        )
        return CollectiveError(self._failed)

    def close(self) -> None:
        """Leaves the process group; call it after the last `wait`."""
        assert not self._in_flight, "wait() for the mean in flight first"
        if self.group is not None:
            leave_group(self.group, self.timeout)
            self.group = None


def _note_time(work: dist.Work, times: list[float]) -> None:
    """Appends to `times` when the collective ends."""
    work.get_future().add_done_callback(lambda _: times.append(time.perf_counter()))


def _silent(key: str, rank: int, world_size: int, patience: float = 2.0) -> list[int]:
    """The group ranks that do not report the same failure within `patience` seconds of the last one that did."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{rank}", "failed")
        silent = list(range(world_size))
        until = time.perf_counter() + patience
        while silent and time.perf_counter() < until:
            heard = [r for r in silent if store.check([f"{key}/{r}"])]
            if heard:
                silent = [r for r in silent if r not in heard]
                until = time.perf_counter() + patience
            time.sleep(0.05)
        return silent
    except RuntimeError:  # the store died with the worker that served it: rank 0, unless torchrun serves it
        return [0]
