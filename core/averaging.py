"""What workers average: parameters, buffers and scalars of each go out in one reduction, and their means come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .adaptive.pace import Pace
from .adaptive.tau import TauTuner
from .checks import check_group, check_inputs, check_run, check_saved, of_rank, tensors_of, under_rank
from .flat import (
    Scalars,
    State,
    copy,
    copy_where,
    local_shard,
    make_buckets,
    on_host,
    read_blocks,
    rescale,
    resized,
    unique,
)
from .flight import AllReduce, Flight, Link, Reducer, Stage
from .robust.agreement import Agreement
from .robust.guard import Guard, LeftOut, size_of
from .stats import RoundClock, RoundStats


class Landing(NamedTuple):
    """What has landed. Only finish() reads it from the device."""

    last: bool
    """Every worker sent it from finish(): no round follows."""
    empty: bool
    """Besides, nobody had taken a step: it must move nothing."""


class Averaging(ABC):
    """Sends what a method has written into the payloads, and receives the means; when, it does not know.

    The arguments that are named like LocalMethod's: see there. tuner: of tau, wire and delay auto, pace: of
    steps by speed, or None; their numbers travel along.

    Attributes: params, those that are trained, DTensors' shards among them; buffers, those that are averaged; buckets,
    the flat tensors in which they travel; local_steps, how many what is sent next is of; state, what a method keeps
    from round to round, and replicas, what of it is equal on all workers, bit for bit; scale, see receive. on_left_out,
    called with a 0-d truth value after a round: whether this worker was left out of its mean (see guard.py), for what
    the inner optimiser has gathered, as guard.forget does; on a CPU only where it was.
    """

    differences = False  # whether payloads are differences: zero where nothing has moved
    member = "rank"  # what a worker is called
    more_scalars: ClassVar[Mapping[str, int]] = {}  # of a class, as `scalars`

    def __init__(
        self,
        params: Iterable[Tensor],
        buffers: Iterable[Tensor],
        model_params: Iterable[Tensor],
        *,
        group: dist.ProcessGroup | None,
        timeout: float,
        link: Link | None,
        backend: str | None,
        tuner: TauTuner | None,
        pace: Pace | None,
        scalars: Mapping[str, int],
        parts: int,
        on_host: bool,
    ):
        self._sort(tensors_of(params, "parameters"), tensors_of(buffers, "buffers"), model_params)
        self.local_steps = 0  # since the last round closed
        self.tuner, self.pace = tuner, pace
        slot, slots = self.slot(group)
        known = dict(self.more_scalars) | Agreement.sizes(slots, tuner, pace is not None)
        self.scalars = Scalars(dict(scalars) | known)  # those of each worker last, where `resized` cuts
        self.buckets = make_buckets(self.params, self.buffers, self.scalars.numel, parts, on_host)
        self.scalars.attach(self.buckets[0].scalars)
        device = self.buckets[0].flat.device
        self.flight = self.make_flight(
            device, group=group, timeout=timeout, link=link, backend=backend, hidden=self.hides
        )
        self.reducer: Reducer = AllReduce([b.flat for b in self.buckets], self.flight.world_size)
        self.scale: float | Tensor = self.reducer.scale
        self.state = State(self.buckets)
        self.replicas: list[Tensor] = []  # flat
        ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else range(slots)
        self.guard = Guard(self.scalars, device, slot, [f"{self.member} {rank}" for rank in ranks])
        self.on_left_out: LeftOut | None = None
        self._agreement = Agreement(self.scalars, self.flight, self.everybody, tuner, pace, self.guard)
        self._wanted: tuple[Callable[[dict[str, Any]], None], dict[str, Any]] | None = None  # who waits for a snapshot
        self._begin_alike()
        self._refresh_model()
        self._own_buffers = [[b.clone() for b in bucket.buffers] for bucket in self.buckets]
        self._clock = RoundClock(device)

    def _sort(self, params: list[Tensor], buffers: list[Tensor], model_params: Iterable[Tensor]) -> None:
        """Sorts the model's tensors."""
        given, fixed = unique(params), [local_shard(b) for b in unique(buffers)]
        everything = [local_shard(p) for p in given]
        self.params = [shard for p, shard in zip(given, everything, strict=True) if p.requires_grad]
        self.buffers = [b for b in fixed if b.is_floating_point()]
        self._trained = [p for p in given if p.requires_grad]
        self._frozen = [p for p in given if not p.requires_grad]
        self._model_params = [local_shard(p) for p in tensors_of(model_params, "parameters")]
        self._shared_from_start = [*everything, *fixed]
        check_inputs(given, self.params, self.buffers, self._model_params)

    @property
    def stats(self) -> RoundStats:
        """Of the round that closed last; from a merge in mid-round on, of the one that runs."""
        return self._clock.stats

    @property
    def rounds(self) -> int:
        """Rounds closed so far, those of finish() included."""
        return self.flight.launched

    # -- what a subclass says --------------------------------------------------------------------------------

    def make_flight(self, device: torch.device, **options: Any) -> Flight:
        """What the reductions run in."""
        check_group()
        return Flight(device, **options)

    def slot(self, group: dist.ProcessGroup | None) -> tuple[int, int]:
        """This worker's place among the scalars that each worker has one of, and how many places there are."""
        return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)

    @property
    def hides(self) -> bool:
        """Whether local steps run while a reduction is in flight."""
        return True

    @property
    def everybody(self) -> int:
        """The number of all processes over which scalars are averaged."""
        return self.flight.world_size

    @abstractmethod
    def signature(self) -> Any:
        """What must be equal on all workers, compared at construction."""

    @abstractmethod
    def settings(self) -> Any:
        """What must be equal on all workers in every round, compared when the round's reduction lands."""

    def turn(self) -> int | None:
        """Which comparison of this worker's replicas it is, from 0; None where others' are compared in this round. Of
        workers with the same replicas all or none have a turn."""
        return self.rounds

    def stages(self) -> Iterator[Stage]:
        """What is launched."""
        yield from self._agreement.repair(self.state.shared())
        yield from self.reducer.stages(self.flight.group, self.flight.launched)

    def agreed_size(self, size: Tensor) -> Tensor:
        """Not finite where that of any worker is not that has to judge alike. size: of what this worker sends, 0-d."""
        return size

    @property
    def weight(self) -> float:
        """Of what this worker is about to send: 1, or its local steps where workers take different numbers of them."""
        return float(self.local_steps) if self.pace else 1.0

    def weigh(self) -> None:
        """Leaves out what is not sound, and then starts anew."""
        self.guard.judge(size_of(self.buckets), self.local_steps if self.differences else 0)
        self.guard.weigh(self.buckets, self.weight)
        self.was_left_out(self.guard.left_out)

    def was_left_out(self, where: Tensor) -> None:
        """Where that holds, 0-d, this worker has to start anew; a method does so where a landing does not."""
        if self.on_left_out is not None and (read_blocks(where) or where):
            self.on_left_out(where)

    # -- a reduction -----------------------------------------------------------------------------------------

    def keep_buffers(self) -> None:
        """What this worker sends of its buffers, whatever lands in the meantime."""
        for own, bucket in zip(self._own_buffers, self.buckets, strict=True):
            copy(own, bucket.buffers)

    def send_buffers(self) -> None:
        """What was kept of the buffers travels."""
        for bucket, own in zip(self.buckets, self._own_buffers, strict=True):
            copy(bucket.buffer_views, own)

    def send(self, *, finished: bool) -> None:
        """Launches the reduction of what the payloads hold, of the buffers' values, and of the scalars."""
        self.send_buffers()
        self.scalars.set("finished", float(finished))
        self.scalars.set("steps", float(self.local_steps))
        self.weigh()
        turn, clock = self.turn(), self._clock
        self._agreement.tell(self.settings(), self.replicas, turn, clock.stats, clock.before)
        self.flight.launch(self.stages())
        self.local_steps = 0

    def receive(self, *, finished: bool) -> Landing:
        """Waits for what is in flight and notes what that cost. The model's buffers become their means.

        The payloads hold what landed; `scale` turns it into means, in a pass that their owner makes anyway.
        """
        self.flight.wait(self.hand_over)
        self.stats.round = self.flight.launched
        self.stats.exposed_seconds = self.flight.exposed
        self.stats.allreduce_seconds = self.flight.seconds
        self.stats.bytes_sent = self.flight.bytes_sent
        self.scale = self.guard.land(1.0 if self.differences else float("nan"))
        for bucket in self.buckets:
            rescale(bucket.values, self.scale)
        self.scalars.place.mul_(self.reducer.scale)
        self.stats.drifted = float(not self._agreement.hear(self.settings()))
        self.stats.left_out = self.guard.count
        last = finished and self.scalars["finished"].item() > 1 - 1e-6  # one over the workers may be rounded
        empty = last and self.scalars["steps"].item() == 0.0
        for bucket in self.buckets if not empty else []:  # an empty round carries older values
            copy_where(self.scalars["weight"] > 0, bucket.buffers, bucket.buffer_views)
        return Landing(last, empty)

    def average_now(self, *, finished: bool) -> bool:
        """Parameters and buffers become their means over the workers, who all wait for them. Whether all are in
        finish(), where it was no step."""
        for bucket in self.buckets:
            bucket.flatten(bucket.payload)
            copy(bucket.buffer_views, bucket.buffers)
            bucket.scalars.zero_()
        self.scalars.set("finished", float(finished))
        self.guard.judge(self.agreed_size(size_of(self.buckets)), 0)
        self.guard.weigh(self.buckets)
        left_out = self.guard.left_out.clone()
        self.flight.sum([bucket.flat for bucket in self.buckets])
        self.guard.hear(self.scalars["left_out"].view(-1).tolist(), self.rounds)
        scale = self.guard.land(1.0)
        for bucket in self.buckets:
            rescale(bucket.flat[: bucket.padded + len(bucket.values)], scale)
            copy([*bucket.params, *bucket.buffers], [*bucket.payload_views, *bucket.buffer_views])
        self.was_left_out(left_out)
        return finished and self.scalars["finished"].item() > self.flight.world_size - 0.5

    def _begin_alike(self) -> None:
        """All workers take the first one's tensors."""
        self.flight.agree((type(self).__name__, self.signature()), self._shared_from_start)

    def _start_from_params(self) -> None:
        """Everything is as it was made, the parameters being the start."""
        self._refresh_model()
        self._agreement.forget_landed()
        self.guard.state.zero_()
        for bucket in self.buckets:
            bucket.flat.zero_()
        self.state.restart()
        for flat in (flat for flats in self.reducer.state.values() for flat in flats):
            flat.zero_()

    @torch.no_grad()
    def _refresh_model(self) -> None:
        """The model follows its masters."""
        copy(self._model_params, self.params)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides parameters and optimiser; waits for the all-reduce in flight, so every
        worker must come to it, or go on stepping.

        Take it at a round boundary and the run goes on from there bit for bit. Tensors are copies in the host's memory,
        and all is under one key, "rank" and this worker's number: each worker saves its own, with its model
        (BatchNorm's buffers, too) and optimiser. Of all objects with the same settings it has the same keys and shapes,
        so that torch.distributed.checkpoint can load into that of a new one.
        """
        return under_rank(self.own_state())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned, on every worker; parameters and optimiser are the caller's.

        state: may hold several workers' parts. A worker whose own is missing, as where fewer wrote it, takes that of
        its rank modulo their number. Load the model after this object was made, not before: making it broadcasts rank
        0's parameters and buffers. Another number of workers may go on with what any of those that wrote it held, but
        for outer state that is unlike on all workers (UserError); what a narrow wire format held back is lost then.
        """
        self.load_own_state(of_rank(state))

    def own_state(self) -> dict[str, Any]:
        """This worker's part of state_dict; a subclass adds what it keeps."""
        self.flight.check_alive()
        self.flight.settle()
        return {
            "method": type(self).__name__,
            "state": {name: on_host(flats) for name, flats in (self.state | self.reducer.state).items()},
            "flats": on_host([b.flat for b in self.buckets]),
            "in_flight": self.flight.in_flight,
            "workers": self.flight.world_size,
            "local_steps": self.local_steps,
            "rounds": self.rounds,
            "tuner": self.tuner.state_dict() if self.tuner else None,
            "guard": on_host(self.guard.state),
            "pace": self.pace.state_dict() if self.pace else None,
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restores what own_state returned."""
        flats, workers = [b.flat for b in self.buckets], self.flight.world_size
        check_run(state, type(self).__name__, workers, equal=bool(self.replicas) or not self.state)
        here, saved = self.state | self.reducer.state, state.get("state", {})  # DCP's tools drop an empty one
        others, landed = state["workers"] != workers, state["flats"]
        if others:
            here, saved = self.state, {name: f for name, f in saved.items() if name not in self.reducer.state}
            landed = resized(landed, flats)  # a sum or a mean: its weight says over how much
        here, saved = here | {"all-reduce": flats}, saved | {"all-reduce": landed}
        check_saved(saved, here)
        self._wanted = None
        self.flight.restore(state["rounds"], state["in_flight"])
        for name, held in here.items():
            copy(held, saved[name])
        self._agreement.loaded(of_others=others)
        self.local_steps = state["local_steps"]
        if self.tuner and state["tuner"]:
            self.tuner.load_state_dict(state["tuner"])
        self.guard.state.copy_(state["guard"])
        if self.pace and state["pace"] and not others:
            self.pace.load_state_dict(state["pace"])

    def snapshot(self, then: Callable[[dict[str, Any]], None]) -> None:
        """Calls `then` with what state_dict would return here, without waiting: when what is in flight is received, at
        the next boundary at the latest; at once where nothing is. Parameters and optimiser are to be copied here.

        Where one was asked for before, that is given first, for which this waits.
        """
        self.hand_over()
        self._wanted = then, self.of_now()
        if not self.flight.in_flight:
            self.hand_over()

    def hand_over(self) -> None:
        """Waits for what is in flight and gives a snapshot that was asked for, where one was."""
        if self._wanted is not None:
            (then, of_then), self._wanted = self._wanted, None
            then(under_rank(self.own_state() | {name: on_host(value) for name, value in of_then.items()}))

    def of_now(self) -> dict[str, Any]:
        """What in state_dict the local steps of the next round change."""
        return {"local_steps": self.local_steps}

    def close(self) -> None:
        """Leaves the process group. Only after finish()."""
        self.flight.close()
