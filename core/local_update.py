"""The base class of all methods that take several local steps between two all-reduces.

Local-SGD, SlowMo, Overlap-Local-SGD, DiLoCo and CO2 differ only in how they end a round: each overrides `_close_round`.
This class counts local steps, owns the flat buckets, starts the all-reduce and waits for it, averages the model's
buffers and calls the hooks.
"""

from __future__ import annotations

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import (
    Bucket,
    BucketShare,
    Scalars,
    State,
    as_real,
    copy,
    copy_where,
    has_changed,
    has_mean,
    is_dtensor,
    keep_unchanged,
    local_shard,
    make_buckets,
    pinned,
    rescale,
    unique,
)
from .comm import AsyncAllReduce, Reducer, Stage, run, send_first
from .errors import CollectiveError, UserError
from .hooks import GUARDS, Hook, ReductionInfo
from .nodes import Node, sent_parts
from .shares import Share
from .state import SavedMethod
from .stats import AsyncReadback, RoundClock, RoundStats, plus, read_blocks
from .tau import SyncSchedule

OWN_SCALARS = {"finished": 1, "steps": 1, "weight": 1}  # in every all-reduce
CHANGED = "changed"  # scalars: per buffer that is not sent, how many workers have changed it


class Loop:
    """The calls of a training loop. The defaults suit a method whose workers are equal after every step, such as DDP.

    As a context manager, a method ends with its block:

        with CO2(model.parameters(), CO2Config(tau=48), buffers=model.buffers()) as co2:
            for batch in loader:
                ...
                co2.step()

    The end of the block calls finish() and close(), unless the block has closed the method. After an exception it calls
    leave(), which waits for no worker.
    """

    _is_closed = False  # whether close() or leave() has left the process group

    @property
    def at_boundary(self) -> bool:
        """Whether a round has just closed on this worker, or none has begun, and all workers take part.

        It is the same on all workers after the same number of steps. At a boundary they may evaluate, save and stop
        together. Once an average tells that a worker with fewer batches is in finish(), it is False on all others.
        """
        return True

    def sync_for_eval(self) -> bool:
        """Waits, at a boundary, for the all-reduce in flight if the workers differ until it arrives. Every worker must
        call it. It sends no buffers, so those such as BatchNorm's statistics stay each worker's own until the
        first average has arrived.

        Returns:
            True if all workers hold the same model now. The tensors of average= are then averaged, too. False in
            mid-round, while a worker is in finish(), or if each worker holds its own model, whose loss is higher.
        """
        return True

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[bool]:
        """Calls `sync_for_eval` for a block. A method that cannot continue from the common model restores its own."""
        yield self.sync_for_eval()

    def finish(self) -> Any:
        """Ends the round and the all-reduce, with equal parameters on all workers. Every worker must call it."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the process group. Call `finish()` first."""
        raise NotImplementedError

    def leave(self) -> None:
        """Replaces finish() and close() after an exception, and waits for no worker."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None and not self._is_closed:
                self.finish()
                self.close()
        except BaseException:
            self.leave()
            raise
        if kind is not None:
            lost = self._lost_worker(error)
            self.leave()
            if lost is not None:
                raise lost from None

    def _lost_worker(self, error: BaseException | None) -> CollectiveError | None:
        """Returns the error that names a lost worker, if another collective than the method's has failed in the block,
        such as DDP's inside a node."""


class ReduceResult(NamedTuple):
    """The result of an all-reduce. Both are False outside of finish() and step(last=True).

    Attributes:
        is_last: Whether every worker started it from one of the two, so that no round follows.
        is_empty: Whether also no worker had taken a step, so that it must change nothing.
    """

    is_last: bool
    is_empty: bool


class LocalUpdateMethod(Loop, SavedMethod, ABC):
    """Trains in rounds of local steps, with one all-reduce per round.

    Each process holds the whole model, or is a rank of a node that holds it.

    Args:
        params: The model's parameters. All workers start from rank 0's. Frozen ones are broadcast once. Convert a model
            (dtype, device, memory format) before, because the method keeps these tensor objects.
        sync_schedule: Decides when a round ends.
        buffers: Dense buffers of real or complex floating point, such as BatchNorm's statistics, are averaged in every
            round, uncompressed. Buffers that no worker has changed keep their exact values, and are not sent after the
            first rounds. A buffer that changes only later is averaged from the next rounds on, at the latest in
            finish(). Other buffers (integer, sparse) are broadcast once.
        allreduce: Makes the AsyncAllReduce from the device.
        reducer: Makes the Reducer, compressed or not.
        hooks: Called in this order.
        share: This rank's part of the outer state on a node. None means that this process is a worker by itself.

    Attributes:
        on_excluded: Called with a 0-d bool after this worker's update was judged, for the optimizer's state. See
            guards.workers.forget. On a CPU it is called only if this worker was excluded. The default zeroes the state
            of torch.optim's optimizers: other libraries' may hold what must not be zero.
        _changing: The averaged buffers that some worker has changed since construction, by their places over all
            buckets. Only they are sent. None until the workers know: then all are sent. `_sent` is the same for the
            last all-reduce that started.
        _scale: Factor that turns the reduced sums into averages.
        _sent_tau: tau of the round whose all-reduce started last.
    """

    share: Share | None
    sync_schedule: SyncSchedule
    _needs_global_norms = False  # whether the method needs norms of all parameters, which DTensors do not give
    _is_last = False  # whether every worker has started fragment 0's last all-reduce from finish()
    _number = 0  # of the round whose all-reduce started last, counted from 1

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        sync_schedule: SyncSchedule,
        buffers: Iterable[Tensor] = (),
        allreduce: Callable[[torch.device], AsyncAllReduce] = AsyncAllReduce,
        reducer: Callable[[Sequence[BucketShare], Scalars, int, int], Reducer] = Reducer,
        hooks: Sequence[Hook] = (),
        share: Share | None = None,
    ):
        self.share, self.node = share, Node() if share is None else share.node
        self.sync_schedule, self.hooks = sync_schedule, list(hooks)
        checked = GUARDS.inputs.tensors_of
        given, others = unique(checked(params, "parameters")), unique(checked(buffers, "buffers"))
        if self._needs_global_norms and any(map(is_dtensor, given)) and self.node.group is None:
            raise UserError("DTensors as parameters need CO2 with mesh=: their norms are of the whole model")
        self.trained = [p for p in given if p.requires_grad]
        self._frozen = [p for p in given if not p.requires_grad]
        self.params = [local_shard(p) for p in self.trained]
        averaged = {i: b for i, b in enumerate(others) if has_mean(b)}
        self._buffers = [as_real(local_shard(b)) for b in averaged.values()]
        self._broadcast_once = [*given, *others]
        GUARDS.inputs.check_inputs(given, self.params, self._buffers)
        on_host = share is not None and share.offload
        self.allreduce = allreduce(torch.device("cpu") if on_host else self.params[0].device)
        GUARDS.inputs.check_group(self.allreduce.places, is_elastic=self.allreduce.is_elastic)
        sizes = dict(OWN_SCALARS)
        if self._buffers and not self.node.separate:  # pipeline stages have different buffers, and send all
            sizes[CHANGED] = len(self._buffers)
        for hook in self.hooks:
            sizes |= hook.scalars
        for hook in self.hooks:
            sizes |= {name: n * self.allreduce.places for name, n in hook.per_worker_scalars.items()}
        self.scalars = Scalars(sizes)
        parts = 1 if share is None else share.parts(self.allreduce.world_size)
        zeros = pinned if on_host else None
        self.buckets = make_buckets(self.params, self._buffers, self.scalars.numel, parts, zeros)
        numbered = {id(b): pair for b, pair in zip(self._buffers, averaged.items(), strict=True)}
        self.numbered_buffers = [numbered[id(b)] for bucket in self.buckets for b in bucket.given]
        self.sent_payloads = [b.payload for b in self.buckets]  # of the next all-reduce at a boundary
        self.scalars.attach(self.buckets[0].scalars)
        # 0-d views into the first bucket, so the all-reduce sums what is written to them
        self._finished, self._steps, self._weight = (self.scalars[name] for name in OWN_SCALARS)
        sent = sent_parts(self.node, self.buckets, owned=share is not None and share.shard)
        self.reducer = reducer(sent, self.scalars, self.allreduce.rank, self.allreduce.world_size)
        self._scale: float | Tensor = self.reducer.scale
        self.state, self.replicated, self.anchors = State(self.buckets), list[Tensor](), list[Tensor]()
        # This worker's buffers at the boundary, because averages that arrive overwrite the live buffers.
        self._own_buffers = [(b, [t.clone() for t in b.given]) for b in self.buckets if b.given]
        self.clock = RoundClock(self.allreduce.device)
        self._first_step = 1  # of the round, or after a resume in mid-round
        self._sent_tau = self._arrived_tau = sync_schedule.tau
        self.on_excluded: Callable[[Tensor], None] | None = None
        self._readback = AsyncReadback()
        self._ended: bool | None = None  # after step(last=True): whether all workers have ended
        self._broadcast_params()
        if share is None:  # the steps of a share need its outer state, which CO2 makes later
            self._rehearse()
        for hook in self.hooks:
            hook.attach(self)
        self._before_allreduce, self._after_allreduce = self._calls("before_allreduce"), self._calls("after_allreduce")
        self._on_reduced_scalars, self._on_round_end = self._calls("on_reduced_scalars"), self._calls("on_round_end")
        self._after_param_update, self._before_step = self._calls("after_param_update"), self._calls("before_step")

    # -- the training loop calls these -------------------------------------------------------------------------

    def step(self, *, last: bool = False) -> bool:
        """Counts a local step, and closes the round after `tau` of them.

        Call it after every optimizer step, even if a GradScaler skipped it. Do not call it from the optimizer's
        register_step_post_hook, which torch does not call for a skipped step.

        Args:
            last: finish() follows. It then waits for one all-reduce; without `last` it may need a second one.

        Returns:
            True if a round closed.
        """
        for before_step in [*self._before_step]:
            if before_step():
                self._before_step.remove(before_step)
        if self._ended is not None:
            raise UserError("step() after step(last=True): call finish() between them")
        self.local_steps += 1
        tau = self.sync_schedule.tau
        if self.local_steps == self._first_step and tau > 1:  # with tau 1 the step is timed, from the last boundary
            self.clock.steps_begin(after=self.local_steps)
        if self.local_steps < tau:
            self.allreduce.done()  # raises here if the all-reduce has failed
            if self.allreduce.in_flight or self.is_cut:
                self._mid_round()
            return False
        if self._frozen and any(p.requires_grad for p in self._frozen):
            raise UserError(
                "a parameter that was frozen when this object was built now requires a gradient and would never be "
                "averaged: build it again after changing requires_grad"
            )
        ended = self._boundary(finished=last)
        self._ended = ended if last else None
        return True

    def finish(self) -> None:
        """Averages what is pending and leaves all workers with equal parameters. Every worker must call it.

        Workers may call it after different numbers of steps. An early worker joins further rounds with an update of
        zero, until all have called it. These all-reduces have the usual size, because no worker can tell whether
        another one still trains. Training may continue afterwards.
        """
        for before_finish in self._calls("before_finish"):
            uncounted = before_finish() or 0
            self.local_steps += uncounted if self._ended is None else 0
        while not self._ended:
            self._ended = self._boundary(finished=True)
        self._send_late_buffers()
        self._ended, self._leaves_at = None, math.inf
        self._finished.zero_()
        self._readback = AsyncReadback()  # discards the numbers of the last round
        self._at_common_model(True)

    @property
    def at_boundary(self) -> bool:
        return not self.local_steps and self.rounds < self._leaves_at

    def sync_for_eval(self) -> bool:
        meets = self.is_cut or self.node.size > 1 or self._calls("on_common_model")
        if meets and self.at_boundary:  # this boundary's own all-reduce tells who takes part
            self.allreduce.drain()
            scale = self.reducer.scale if self.allreduce.in_flight else 1.0  # see _wait_allreduce
            finished, steps, *_ = (scale * self.scalars.place).tolist()
            if finished > 0:
                self._note_finish(steps, self.rounds - 1)
        if meets and self.at_boundary:
            GUARDS.failure.come_together("sync_for_eval", self)
        equal = self._reach_common_model()
        if self.at_boundary:
            self._at_common_model(equal)
        return equal

    def _note_finish(self, steps: float, number: int) -> None:
        """Notes from which boundary on a worker is in finish(), by the workers' mean steps in round `number`.

        A worker with a whole round is still at the boundary that follows, where it has called step(last=True).
        """
        is_whole = steps > self.local_steps_sent - 0.5 / self.total_world_size
        self._leaves_at = min(self._leaves_at, number + 1 + is_whole)

    def _reach_common_model(self) -> bool:
        """Returns whether all workers hold the same model now. At a boundary a method may wait for it."""
        return self.at_boundary and not (self.allreduce.in_flight and self._starts_near_anchor)

    def _at_common_model(self, equal: bool) -> None:
        """Calls the hooks when all workers have come together."""
        for on_common_model in self._calls("on_common_model"):
            on_common_model(equal)

    def close(self) -> None:
        if sys.exc_info()[0] is not None:  # in a `finally` after an exception, which another error would hide
            return self.leave()
        self.allreduce.close()
        self.node.close()
        self._end()

    def leave(self) -> None:
        self.allreduce.leave()  # and the groups of a node
        self.node.forget()
        self._end()

    def _lost_worker(self, error: BaseException | None) -> CollectiveError | None:
        of_backend = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
        if of_backend and self.allreduce.group is not None and not self.allreduce.is_elastic:
            return self.allreduce.failure(str(error), "a collective in the with block")
        return None

    def _end(self) -> None:
        """The method has left the process group."""
        self._is_closed = True
        for on_close in self._calls("on_close"):
            on_close()

    @property
    def stats(self) -> RoundStats:
        """Statistics of the last closed round; after a merge in mid-round, of the current round."""
        return self.clock.stats

    @torch.inference_mode(False)
    @torch.no_grad()
    def resync(self) -> None:
        """Restarts from rank 0's current parameters. Every worker must call it.

        Call it after weights were loaded into a model that this object already trains. Otherwise the next boundaries
        pull the model back. The all-reduce in flight is discarded, and momenta are zeroed.
        """
        GUARDS.failure.come_together("resync", self)
        self._come_even()
        self.allreduce.restore(self.allreduce.launched, in_flight=False)  # a node's background uses its group, too
        self.node.agree(("resync",))
        self._broadcast_params()
        self.local_steps, self._ended = 0, None
        self._start_from_params()
        self._params_updated(at_boundary=True)

    # -- a method overrides these ------------------------------------------------------------------------------

    @abstractmethod
    def _close_round(self, *, finished: bool) -> bool:
        """Ends the round, with `_wait_allreduce` and `_start_allreduce` in the method's order.

        Args:
            finished: Whether this worker is in finish() or step(last=True).

        Returns:
            True once an all-reduce has arrived that every worker started from one of the two.
        """

    def _mid_round(self) -> None:  # noqa: B027
        """A local step has ended no round, and an all-reduce is in flight, or the next fragment's may be due."""

    def _restart_from_anchor(self, where: Tensor) -> None:  # noqa: B027
        """Resets this worker to the outer iterate if the 0-d bool `where` is True. No wait for a GPU."""

    def _begin_round(self) -> None:
        """A round begins, whose number is `rounds`. A method may change its settings."""
        self.sync_schedule.begin(self.rounds)

    def _signature(self) -> Any:
        """Settings that must be equal on all workers, compared at construction."""
        return f"tau={self.tau}"

    # -- a method calls these ----------------------------------------------------------------------------------

    def _start_allreduce(self, *, finished: bool) -> None:
        """Starts the all-reduce of the payloads, the buffers' values and the scalars, and returns at once. This ends
        the round: the local steps count from 0.
        """
        self._fill_buffers()
        self._launch(self._before_allreduce, self.local_steps, finished=finished)
        self.rounds, self.local_steps = self.rounds + 1, 0

    def _launch(self, calls: Sequence[Callable[[], Tensor | None]], steps: int, *, finished: bool) -> None:
        """Starts an all-reduce of `steps` local steps. The hooks' `calls` judge before, and write what travels."""
        self.local_steps_sent = steps
        self._finished.fill_(finished)
        self._steps.fill_(steps)
        self._weight.fill_(1.0)
        judged = [before_allreduce() for before_allreduce in calls]
        for excluded in judged:
            if excluded is not None and (read_blocks(excluded) or excluded):  # a GPU's is not read here
                self.exclude(excluded)
                self._restart_from_anchor(excluded)
                self._report_excluded(excluded)
        self._sent_tau = self.sync_schedule.tau
        self.growth = self._sent_tau / self._arrived_tau
        # the first fragment's all-reduce begins a round
        self._number = max(1, self.rounds + (self.fragment_index == 0))
        part = f" (fragment {self.fragment_index})" if self.is_cut else ""
        self.allreduce.label = f"the all-reduce of round {self._number - 1}{part}"
        self.allreduce.launch(self.stages())

    def stages(self) -> Iterator[Stage]:
        """The collectives of an all-reduce, one after the other. They run in the background."""
        reduction = self._reduction()
        yield from reduction if self.share is None else self.share.stages(reduction)

    def _reduction(self) -> Iterator[Stage]:
        """The collectives among the workers. The first ones send rank 0's state to all if a hook has asked for it."""
        if self.broadcasts_state and self.allreduce.group is not None:  # the group may have changed meanwhile
            for flat in self.state.shared():
                yield send_first([flat], self.allreduce.group)
        self.broadcasts_state = False
        yield from self.reducer.stages(self.allreduce.group, self._number)

    def _wait_allreduce(self, *, finished: bool) -> ReduceResult:
        """Waits for the all-reduce in flight. The model's buffers become their averages.

        The payloads then hold sums, which `_scale` turns into averages in a pass that the method makes anyway.
        """
        self.allreduce.wait(self._after_allreduce)
        self._note_times()
        weight = self._weight.double()  # how many workers count: a sum or an average, as the reducer delivers
        self._scale = torch.where(weight == 0, 1.0 if self.sends_differences else float("nan"), 1 / weight)
        if self.fragment_index:  # buffers and the hooks' scalars travel with the first fragment
            self.scalars.place[: len(OWN_SCALARS)].mul_(self.reducer.scale)
        else:
            self.scalars.place.mul_(self.reducer.scale)
            self._deliver_scalars()
            self._is_last = finished and self._finished.item() > 1 - 1e-6  # an average may be rounded
        # of a round that finish() has ended before, the other fragments are sent again
        is_empty = finished and (self._is_last or self.fragment_index > 0) and self._steps.item() == 0.0
        for bucket, _ in self._own_buffers if not self.fragment_index else ():
            self._average_buffers(bucket, is_empty=is_empty)
        if not is_empty:
            self._arrived_tau = self._sent_tau
        return ReduceResult(self._is_last, is_empty)

    def _note_times(self) -> None:
        """Adds an all-reduce that has arrived to the round's statistics."""
        stats, allreduce = self.clock.stats, self.allreduce
        stats.round, stats.bytes_sent = self.rounds, stats.bytes_sent + allreduce.bytes_sent
        times = allreduce.exposed, allreduce.seconds
        if self.is_cut:  # a round's statistics add its fragments
            times = plus(stats.exposed_seconds, times[0]), plus(stats.allreduce_seconds, times[1])
        stats.exposed_seconds, stats.allreduce_seconds = times

    def _average_buffers(self, bucket: Bucket, *, is_empty: bool) -> None:
        """Writes averages to the model's buffers. An empty round's are old, unless they travel for the first time."""
        if bucket.buffers:
            rescale(bucket.values, self._scale)
            keep_unchanged(bucket.values, bucket.first, self.total_world_size)
        written = range(len(bucket.buffers)) if not is_empty else bucket.fresh
        averages = [bucket.buffer_views[i] for i in written]
        copy_where(self._weight > 0, [bucket.buffers[i] for i in written], averages)

    def _report_excluded(self, where: Tensor) -> None:
        """Calls `on_excluded`, or by default zeroes the state of torch's own optimizers."""
        if not read_blocks(where) and not where:
            return
        for on_excluded in [self.on_excluded] if self.on_excluded else self._calls("on_excluded"):
            on_excluded(where)

    def _fill_buffers(self) -> None:
        """Writes the values at the boundary of the buffers that are sent to the buckets, and which others have changed
        to the scalars. The host waits for no copy.
        """
        self._sent = self._changing
        if self._own_buffers:
            self._choose_buffers()
        for bucket, own in self._own_buffers:
            copy(bucket.buffer_views, [own[i] for i in bucket.travelling], queued=True)
        if CHANGED in self.scalars.sizes:
            pairs = [pair for b, own in self._own_buffers for pair in zip(own, b.first_given, strict=True)]
            unknown = [i for i in range(len(pairs)) if i not in (self._sent or ())]
            flags = self.scalars[CHANGED].view(-1).zero_()
            found = [has_changed(*pairs[i]).to(flags.dtype) for i in unknown]
            copy([flags[i] for i in unknown], found, queued=True)

    def _note_changes(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Receives a round's scalars, and adds each buffer that some worker has changed to `_changing`.

        Rounds without steps do not count at the beginning: a BatchNorm must be sent from its first step on.
        """
        if self._changing is not None or sums["steps"][0] > 0:
            if self._changing is None:
                self.timed_from = self.rounds
            self._changing = {i for i, n in enumerate(sums[CHANGED]) if n > 0} | (self._changing or set())

    @torch.inference_mode(False)
    @torch.no_grad()
    def _send_late_buffers(self) -> None:
        """Averages, at the end of finish(), buffers whose first change the last all-reduce has reported."""
        if self._sent is None or CHANGED not in self.scalars.sizes:
            return
        late = {i for i, n in enumerate(self.scalars[CHANGED].view(-1).tolist()) if n > 0}
        if not late:
            return
        self._changing = self._sent | late
        for bucket in self.buckets:
            bucket.payload.zero_()  # no progress
        for bucket, own in self._own_buffers:
            copy(own, bucket.given)
        self._start_allreduce(finished=True)
        self._wait_allreduce(finished=True)
        self._begin_round()

    def _params_updated(self, *, at_boundary: bool) -> None:
        """Calls the hooks after the method has written the parameters."""
        for after_param_update in self._after_param_update:
            after_param_update(at_boundary=at_boundary)

    # -- internals ---------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # its tensors could not be written to later
    @torch.no_grad()
    def _boundary(self, *, finished: bool) -> bool:
        """Runs `_close_round` with its timing and its hooks."""
        self.allreduce.check_alive()  # before a method uses partial sums
        with self.clock.boundary(self.sync_schedule.tau, self.local_steps):
            for bucket, own in self._own_buffers:
                copy(own, bucket.given)
            has_finished = self._close_round(finished=finished)
            for on_round_end in self._on_round_end:
                on_round_end()
            self._begin_round()
            self._first_step = 1
            self._params_updated(at_boundary=True)
        return has_finished

    def _deliver_scalars(self) -> None:
        """Gives the sums to the hooks. On a GPU they arrive one round later, so the host does not wait.

        Elastic workers do wait: after a loss they would otherwise receive the sums of a round in different rounds.
        """
        if not self._on_reduced_scalars and CHANGED not in self.scalars.sizes:
            return
        allreduce, processes = self.allreduce, self.allreduce.world_size * self.node.size
        info = ReductionInfo(self.rounds - 1, processes, allreduce.world_size, allreduce.generation)
        numbers = self.scalars.place * processes
        if arrived := self._readback.exchange(numbers.cpu() if allreduce.is_elastic else numbers, info):
            sums = self.scalars.named(arrived[0])
            if sums["finished"][0] > 0:
                self._note_finish(sums["steps"][0] / arrived[1].total_world_size, arrived[1].round)
            if CHANGED in sums:
                self._note_changes(sums)
            for on_reduced_scalars in self._on_reduced_scalars:
                on_reduced_scalars(sums, arrived[1])

    def _broadcast_params(self) -> None:
        """Checks that workers agree, and gives all of them rank 0's tensors."""
        compared = (self.name, self._signature(), *(hook.compared for hook in self.hooks if hook.compared))
        given = [*self._broadcast_once, *(t for hook in self.hooks for t in hook.alike)]
        if self.allreduce.group is not None:
            GUARDS.inputs.check_order(given, self.allreduce.group)
        self.allreduce.agree(compared, [local_shard(t) for t in given])
        self._changing: set[int] | None = None
        self._sent: set[int] | None = None
        for bucket in self.buckets:
            bucket.begin()

    @torch.no_grad()
    def _rehearse(self) -> None:
        """Runs an empty round's all-reduce if NCCL moves the tensors, which changes nothing but the flat tensors.

        The first all-reduce connects peers and loads kernels. Both can make the host wait for a late peer.
        """
        if self.allreduce.by_nccl:
            run(self.stages())
            for tensor in (t for tensors in self._residual().values() for t in tensors):  # a run starts with zeros
                tensor.zero_()
