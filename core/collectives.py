"""What runs in the background: stages of collectives, one after the other, and what happens when one fails.

The communication knows no mathematics: it moves what its owner wrote into flat tensors. It runs on a process group of
its own, so it never queues behind the model's own collectives, and needs no thread of ours: gloo and NCCL move the
data by themselves.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import CollectiveError, UserError
from .groups import Pending, Stage, agree, all_reduce, backend_for, leave_group, new_group
from .stats import Mark, Seconds, between, mark, plus


class Link(Protocol):
    """An emulated slow link, for measurements on one machine."""

    def reserve(self, nbytes: float) -> float:
        """Queues `nbytes` on the link and returns the time.perf_counter() at which they have crossed it."""
        ...


class Reducer(Protocol):
    """Turns what the workers wrote into flat tensors into its sum or mean over them, in stages."""

    scale: float
    """Turns what has landed into means: 1 over the number of workers where sums land."""
    state: dict[str, list[Tensor]]
    """What a checkpoint holds of it."""

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        """One reduction, the `number`-th; group None: there is one worker. Keeps no reference to the group."""
        ...


class AllReduce:
    """The plain reducer: one all-reduce of each flat tensor, in its own precision; sums land in it."""

    def __init__(self, flats: Sequence[Tensor], world_size: int):
        self.flats = flats
        self.scale = 1 / world_size
        self.state: dict[str, list[Tensor]] = {}

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        if group is not None:
            yield all_reduce(self.flats, group)


class Background:
    """Runs the stages of one reduction at a time while the caller computes.

    device: where the reduced tensors lie. group: the workers (None: all). timeout: seconds until a missing peer is an
    error. backend: None for the group's own.

        background.launch(reducer.stages(background.group, number))    # returns at once, whether or not peers are there
        background.done()                                              # True once all is through; never blocks
        background.wait()                                              # blocks; the tensors now hold the result

    Stages are a generator that yields the collectives it has started. Where NCCL moves the tensors, all of it is queued
    at once in a stream of its own; elsewhere it goes on in done() and wait(). What the calling thread spends in
    launch(), done() and wait() is exposed time, as is what the current stream waits in wait().
    """

    def __init__(
        self,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        link: Link | None = None,
        backend: str | None = None,
    ):
        self.device, self.timeout, self.link = device, timeout, link
        self.group = new_group(group, timeout, device, backend)
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.launched = 0  # how many reductions so far
        self.bytes_sent = 0  # by this worker, for the last one
        self.seconds: Seconds = 0.0  # from the last launch to its landing
        self.exposed: Seconds = 0.0  # of the last one that was waited for
        self.in_flight = False  # whether what was launched has not been waited for
        self._side = SideStream(device) if self.group is not None and moved_by_nccl(self.group, device) else None
        self._stages: Iterator[Stage] | None = None
        self._works: list[Pending] = []
        self._failed = ""
        self._ready_at = 0.0
        self._launched_at: Mark = 0.0
        self._host_seconds = 0.0  # that the calling thread has spent here since the last launch
        self._landed_at: list[float] = []  # when the works of the last stage ended

    def agree(self, settings: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Checks that all workers hold the same settings and shapes, then gives them rank 0's tensors."""
        if self.group is not None:
            agree(settings, tensors, self.group, self.device)

    def check_alive(self) -> None:
        """Raises again what has failed."""
        if self._failed:
            raise CollectiveError(self._failed)

    def launch(self, stages: Iterator[Stage]) -> None:
        """Starts the stages; returns at once."""
        assert not self.in_flight, "wait() for what is in flight before the next launch"
        self.check_alive()
        self.launched += 1
        self.bytes_sent = 0
        self.in_flight = True
        self._host_seconds = 0.0
        with self._counted():
            self._stages = stages
            if self._side is None:
                self._launched_at = time.perf_counter()
                self._next_stage()
            else:
                self._queue_all(self._side)

    def done(self) -> bool:
        """Whether all is through; where NCCL moves the tensors, whether all is queued. Never blocks."""
        self.check_alive()
        with self._counted():
            return self._advance(block=False)

    def wait(self) -> None:
        """Blocks until the result is there, for the owner to use.

        Raises CollectiveError when a worker died or stayed away for `timeout` seconds. The tensors then hold partial
        sums and must not be used.
        """
        assert self.in_flight, "nothing was launched"
        start = mark(self.device)
        with self._counted():
            self.settle()
        in_stream = between(start, mark(self.device)) if self._side is not None else 0.0
        self.exposed = plus(in_stream, self._host_seconds)
        self.in_flight = False

    def settle(self) -> bool:
        """Blocks until what is in flight has landed, and leaves it there for `wait`. False: nothing is."""
        if not self.in_flight:
            return False
        self.check_alive()
        self._advance(block=True)
        if self._side is not None:
            self._side.join()
        return True

    def discard(self) -> None:
        """Waits for what is in flight, if anything is, and forgets it."""
        self.settle()
        self.in_flight = False

    def sum(self, flats: Sequence[Tensor]) -> None:
        """Blocks until each of `flats`, equally shaped on all workers, holds its sum over them; not throttled.

        For a rare moment when nothing is in flight; a CollectiveError leaves partial sums.
        """
        assert not self.in_flight, "wait() for what is in flight first"
        if self.group is not None:
            self._ready_at = 0.0
            self._works = list(all_reduce(flats, self.group)[0])
            self._wait_for_works()
            self._works.clear()

    def restore(self, launched: int, in_flight: bool) -> None:
        """Continues from a checkpoint. in_flight: a result is in the owner's tensors that was not waited for."""
        self.settle()
        self.launched, self.in_flight = launched, in_flight

    def close(self) -> None:
        """Leaves the process group; call it after the last `wait`."""
        assert not self.in_flight, "wait() for what is in flight first"
        if self.group is not None:
            leave_group(self.group, self.timeout)
            self.group = None

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """What the calling thread does in here is exposed."""
        began = time.perf_counter()
        yield
        self._host_seconds += time.perf_counter() - began

    def _queue_all(self, side: SideStream) -> None:
        """Queues all stages in the stream. A wait without a timeout makes that stream wait for the collective, and the
        host goes on; with one, torch documents that the host waits, too."""
        with side:
            self._launched_at = mark(self.device)
            while self._stages is not None:
                self._next_stage()
                for work in self._works:
                    work.wait()
            self.seconds = between(self._launched_at, mark(self.device))

    def _next_stage(self) -> None:
        """Starts the next collectives; after the last ones there are none."""
        assert self._stages is not None
        self._works.clear()
        reason, sent = "", 0
        try:
            works, sent = next(self._stages, ([], -1))
            self._works = list(works)
        except RuntimeError as error:
            reason = str(error)
        if reason:
            raise self._failure(reason)
        if sent < 0:
            self._stages = None
            return
        self.bytes_sent += sent
        self._ready_at = self.link.reserve(sent) if self.link else 0.0
        self._landed_at = []
        for work in self._works if self._side is None else []:
            if isinstance(work, dist.Work):
                _note_time(work, self._landed_at)

    def _advance(self, *, block: bool) -> bool:
        """Goes along the stages as far as they have got, or to their end; True at the end."""
        while self._stages is not None:
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

    def _failure(self, reason: str) -> CollectiveError:
        """Leaves the group, so that the workers which still wait see it broken too, and names the silent ranks.

        gloo tells only the dead worker's neighbours; the others notice when these close their connections, and
        connections close once nothing refers to the work any more.
        """
        self._works.clear()
        self._stages = None
        self.in_flight = False
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


class SideStream:
    """A stream beside that of the computation, in which NCCL's collectives are queued one after the other."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __enter__(self) -> None:
        """What is queued from here on follows what the computation has queued so far, and runs beside what follows."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def join(self) -> None:
        """The computation waits for all that is queued here; the host does not."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def moved_by_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL moves the group's tensors: then a wait orders streams. gloo moves a GPU's tensors through the host,
    in threads of its own, and a wait for it blocks. UserError where the environment makes NCCL's waits block, too."""
    if device.type != "cuda" or backend_for(group, device) != "nccl":
        return False
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0"):
        raise UserError(
            f"TORCH_NCCL_BLOCKING_WAIT={os.environ['TORCH_NCCL_BLOCKING_WAIT']}: the host would wait for every "
            "all-reduce, and nothing would be hidden; unset it"
        )
    return True


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
