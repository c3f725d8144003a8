"""What is trained and averaged: a model's tensors, the flat tensors in which they travel, and what is kept of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import check_group, check_inputs, tensors_of
from .errors import UserError
from .flat import Bucket, Scalars, State, is_dtensor, local_shard, make_buckets, unique
from .flight import Flight
from .groups import Stage
from .reducer import Reducer
from .stats import RoundClock, RoundStats

OWN = {"finished": 1, "steps": 1, "weight": 1}  # the scalars of every reduction


class Held(ABC):
    """params: trained together, all beginning as on the first worker; frozen ones are broadcast once. buffers: those of
    floating point are averaged along, as BatchNorm's statistics; others are broadcast once. Convert a model (dtype,
    device, memory format) before: what puts new tensors in their place is not seen. flight: makes what carries the
    reductions. reducer: makes what says how they travel. shared, of_each: scalars that travel along, name -> how many
    numbers; of those in of_each every worker has a place of its own.

    Attributes: trained, the parameters that require a gradient, DTensors as they are; params, buffers, DTensors' shards
    among them; buckets, the flat tensors that travel; state, the tensors that are kept from round to round, and
    replicas, those of them that are equal on all workers; starts, the point at which rounds begin, a flat tensor a
    bucket, empty where it is not kept; scale, by which sums that have landed become means; clock, which takes the
    times; local_steps, the number taken since the last boundary.

    Here each worker holds the whole model. A method whose workers hold parts of it overrides the properties below.
    """

    name = ""
    title = "rank"  # what messages call a worker, before its number
    differences = False  # whether payloads are differences: zero where nothing has moved
    starts_roughly = False  # whether workers begin a round near `starts` only, not exactly there
    needs_whole_norms = False  # whether norms of all parameters are taken, which none has of DTensors
    sends_later = False  # whether payloads are complete only in the background, before the riders' stages

    def __init__(
        self,
        params: Iterable[Tensor],
        buffers: Iterable[Tensor],
        flight: Callable[[torch.device], Flight],
        reducer: Callable[[Sequence[Bucket], Scalars, Flight], Reducer],
        shared: Mapping[str, int],
        of_each: Mapping[str, int],
    ):
        given, others = unique(tensors_of(params, "parameters")), unique(tensors_of(buffers, "buffers"))
        if self.needs_whole_norms and any(map(is_dtensor, given)):
            raise UserError("DTensors as parameters need ShardedCO2 with mesh=: their norms are of the whole model")
        self.trained = [p for p in given if p.requires_grad]
        self._frozen = [p for p in given if not p.requires_grad]
        self.params = [local_shard(p) for p in self.trained]
        self.buffers = [local_shard(b) for b in others if b.is_floating_point()]
        self._alike = [local_shard(t) for t in (*given, *others)]
        check_inputs(given, self.params, self.buffers)
        self.flight = flight(self.device)
        if self.flight.places == 1:
            check_group()
        self.scalars = Scalars({**OWN, **shared, **{name: n * self.flight.places for name, n in of_each.items()}})
        self.buckets = self.make_buckets()
        self.scalars.attach(self.buckets[0].scalars)
        self.reducer = reducer(self.buckets, self.scalars, self.flight)
        self.scale: float | Tensor = self.reducer.scale
        self.state, self.replicas, self.starts = State(self.buckets), list[Tensor](), list[Tensor]()
        self._own_buffers = [[b.clone() for b in bucket.buffers] for bucket in self.buckets]
        self.clock, self.local_steps = RoundClock(self.flight.device), 0

    @property
    def rounds(self) -> int:
        """Rounds closed so far, those of finish() included."""
        return self.flight.launched

    @property
    def stats(self) -> RoundStats:
        """Statistics of the round that closed last; once a mean was merged in mid-round, of the round that runs."""
        return self.clock.stats

    @abstractmethod
    def settings(self) -> Any:
        """What must be equal on all workers in every round."""

    @abstractmethod
    def left_out(self, where: Tensor) -> None:
        """where: 0-d truth value. Where it is true, what this worker sends has weight 0, and it starts anew."""

    def make_buckets(self) -> list[Bucket]:
        return make_buckets(self.params, self.buffers, self.scalars.numel)

    @property
    def device(self) -> torch.device:
        """Where the flat tensors lie."""
        return self.params[0].device

    @property
    def everybody(self) -> int:
        """The number of all processes over which scalars are summed."""
        return self.flight.world_size

    @property
    def tells(self) -> bool:
        """Whether this process tells the user what concerns all."""
        return self.flight.rank == 0

    @property
    def turn(self) -> int | None:
        """Which comparison of replicas this round makes, counted from 0; None where this worker's replicas are not
        compared in it. Workers that hold the same replicas are compared in the same rounds."""
        return self.rounds

    def sum_parts(self, numbers: Tensor) -> Iterator[Stage]:
        """numbers: of the part of a payload that this process holds; they become their sums over all its parts."""
        yield from ()
