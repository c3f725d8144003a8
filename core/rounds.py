"""Round after round: local steps are counted, what was sent a round ago lands, and the next reduction is launched.

A method (CO2, the baselines) says in `close_round` what a round's end means, by `land` and `send`. Plugged in are: what
carries a reduction (Flight), how it travels (Reducer), when a round ends (Pacing), and what goes along (Riders). A
rider knows one thing, such as who is left out of a mean. Nothing here knows a rider by name: each is called at the same
points of a round, in the order in which they were given.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from .errors import UserError
from .flat import (
    Bucket,
    Scalars,
    State,
    as_real,
    check_group,
    check_inputs,
    copy,
    copy_where,
    has_mean,
    is_dtensor,
    keep_unchanged,
    local_shard,
    make_buckets,
    rescale,
    same_values,
    tensors_of,
    unique,
    views,
)
from .flight import Flight, Reducer, all_reduce
from .groups import Stage
from .stats import Late, RoundClock, RoundStats

OWN = {"finished": 1, "steps": 1, "weight": 1}  # the scalars of every reduction


class Loop:
    """As a context manager a method ends with its block, every worker's alike:

        with CO2(model.parameters(), CO2Config(tau=48), buffers=model.buffers()) as co2:
            for batch in loader:
                ...
                co2.step()

    calls finish() and close(). After an exception it calls leave() instead, and waits for nobody.

    What is said here holds where each step ends a round with equal parameters, as in DDP; Rounds says it for others.
    """

    @property
    def at_boundary(self) -> bool:
        """Whether a round has just closed on this worker (or none has begun), and all workers are at that boundary: the
        same on all after the same calls of step(). There they may evaluate, save and stop together."""
        return True

    def settle(self) -> bool:
        """At a boundary, for an evaluation or a checkpoint: waits for what was sent, where workers differ until it has
        come. Every worker must call it. True where all workers hold the same model now, False where each holds its own,
        whose loss is the greater: in mid-round, or while `at_boundary` is False. Where True, it averages the tensors
        of `average=`, with an all-reduce of their own. No reduction is launched for the model, so
        that buffers, such as BatchNorm's statistics, are each worker's own until the first mean has landed: where it is
        merged at the next boundary, not yet at the first."""
        return True

    @contextlib.contextmanager
    def shared_model(self) -> Iterator[bool]:
        """As `settle`, for the block: a method that cannot go on from the common model lends it to the block alone."""
        yield self.settle()

    def finish(self) -> Any:
        """Ends what is under way, with equal parameters on all workers; every worker must call it."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the process group. Only after finish()."""
        raise NotImplementedError

    def leave(self) -> None:
        """After an exception, in place of finish() and close(): waits for nobody. Here the process's end is noticed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            return self.leave()
        self.finish()
        self.close()


class Pacing:
    """tau: local steps a round, or a function of the round's number that gives them.

    Attributes: tau, of the round that runs.
    """

    def __init__(self, tau: int | Callable[[int], int]):
        self._tau_of = tau if callable(tau) else lambda number: tau
        self.begin(0)

    def begin(self, number: int) -> None:
        """Round `number` begins, counted from 0."""
        self.tau = self._tau_of(number)
        if not isinstance(self.tau, int) or self.tau < 1:
            raise UserError(f"tau={self.tau!r}: give a whole number of local steps, 1 or more")

    def closes(self, method: Rounds) -> bool:
        """After a local step: whether the round ends with it."""
        return method.local_steps >= self.tau

    def merges(self, method: Rounds) -> bool:  # noqa: ARG002
        """After a local step that ends no round: whether to merge the mean that is in flight."""
        return False


class Heard(NamedTuple):
    """What the sums of a reduction were taken over. round: that ended with their sending, from 0. everybody: the number
    of processes. workers: that of payloads, fewer where several processes hold parts of one payload."""

    round: int
    everybody: int
    workers: int


class Rider:
    """Every hook does nothing unless it is overridden. A reduction calls pack, stages, landed and hear, in this order;
    a round calls end and moved last. Where reductions are hidden, landed and hear are about the reduction
    that was launched a round ago, and come before pack.

    name: under which a checkpoint keeps its state; "" keeps none. shared, of_each: its scalars, name -> how many
    numbers; of those in of_each every worker has a place of its own. method: whose reductions it goes along with.
    """

    name = ""
    shared: Mapping[str, int] = {}
    of_each: Mapping[str, int] = {}
    alike: Sequence[Tensor] = ()  # begin as on the first worker
    compared = ""  # at construction: must be equal on all workers
    method: Rounds

    def attach(self, method: Rounds) -> None:
        """The method is made."""
        self.method = method

    def pack(self) -> None:
        """Before a launch: writes its scalars; may change what is sent, and its weight."""

    def stages(self) -> Iterator[Stage]:
        """What is sent ahead of the payload, in the background."""
        yield from ()

    def landed(self) -> None:
        """The sum has landed, and nothing has used it yet."""

    def hear(self, sums: Mapping[str, Sequence[float]], of: Heard) -> None:
        """The sums over all processes, as the host knows them: on a GPU those of the reduction before."""

    def end(self) -> None:
        """The round is over: what was heard takes effect, on all workers at once."""

    def moved(self, *, at_boundary: bool) -> None:
        """The method has written the parameters."""

    def finishing(self) -> None:
        """finish() begins."""

    def finished(self) -> None:
        """finish() is over."""

    def settled(self, *, equal: bool) -> None:
        """settle() at a boundary, on every worker. equal: whether this worker holds the common model now."""

    def restart(self) -> None:
        """Everything starts anew from the parameters."""

    def left_out(self, where: Tensor) -> None:
        """where: 0-d truth value. Where it is true, this worker starts anew from where the others are."""

    def others_came(self) -> None:
        """The method goes on among other workers, which have not heard what this one has heard."""

    def state_dict(self) -> Any:
        """A tensor, a list of tensors, or plain values; a checkpoint copies tensors to the host's memory."""

    @torch.no_grad()
    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        """state: None where the checkpoint holds none. of_others: another number of workers wrote it."""


def check_riders(riders: Sequence[Any]) -> None:
    """Refuses what is no rider, one that goes along with another method, and two whose numbers share a name."""
    names: set[str] = set()
    for rider in riders:
        if not isinstance(rider, Rider):
            raise UserError(f"riders: {rider!r} is among them: give objects of a Rider's classes")
        if hasattr(rider, "method"):
            raise UserError(f"riders: this {type(rider).__name__} goes along with another method: make one for each")
        if twice := names & (own := {*rider.shared, *rider.of_each, *([rider.name] if rider.name else [])}):
            raise UserError(f"riders: two have the name {min(twice)!r}, of a scalar or of a state: make them differ")
        names |= own


OneRider = TypeVar("OneRider", bound=Rider)


class Landing(NamedTuple):
    """What has landed; only finish() reads it from the device. last: every worker sent it from finish(), and no round
    follows. empty: besides, nobody had taken a step, and it must move nothing."""

    last: bool
    empty: bool


class Rounds(Loop, ABC):
    """A method that trains in rounds. What a loop calls besides step and finish: see Loop.

    params: trained together, all beginning as on the first worker; frozen ones are broadcast once. buffers: dense ones
    of floating point, complex ones too, are averaged along, as BatchNorm's statistics; those that no worker changes
    keep their values, finite or not; all others (integers, sparse and quantized ones) are broadcast once. Convert a
    model (dtype, device, memory format) before: what puts new tensors in their place is not seen. flight, reducer: make
    what carries the reductions, and what says how they travel. pacing, riders: see the top of this file.

    Attributes: trained, the parameters that require a gradient, DTensors as they are; params, buffers, DTensors' shards
    among them; given_buffers, the buffers that are averaged, by their number among those given; first_values, with
    which they began, a flat tensor a bucket; buckets, the flat tensors that travel; state, the tensors that are kept
    from round to round, and replicas, those of them that are equal on all workers; starts, the point at which rounds
    begin, a flat tensor a
    bucket, empty where it is not kept; scale, by which sums that have landed become means; clock, which takes the
    times; local_steps, the number taken since the last boundary; sent_tau, the tau of the round whose reduction is in
    flight, or landed last; growth, sent_tau over the tau of the round whose mean landed before (outer.carried).

    Here each worker holds the whole model. A method whose workers hold parts of it overrides the properties below.
    """

    name = ""
    title = "rank"  # what messages call a worker, before its number
    differences = False  # whether payloads are differences: zero where nothing has moved
    starts_roughly = False  # whether workers begin a round near `starts` only, not exactly there
    shards = False  # whether the processes that hold one payload hold unlike parts of the model
    needs_whole_norms = False  # whether norms of all parameters are taken, which none has of DTensors
    sends_later = False  # whether payloads are complete only in the background, before the riders' stages
    on_step: Callable[[], None] | None = None  # is called as step() begins; None after the first rounds
    saved_at: tuple[int, int] | None = None  # rounds and local steps at which state_dict() was last called
    numbers: Sequence[str] = ()  # attributes that belong into a checkpoint beside `state`: plain, or 0-d tensors

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        pacing: Pacing,
        buffers: Iterable[Tensor] = (),
        flight: Callable[[torch.device], Flight] = Flight,
        reducer: Callable[[Sequence[Bucket], Scalars, Flight], Reducer] = all_reduce,
        riders: Sequence[Rider] = (),
    ):
        self.pacing, self.riders = pacing, list(riders)
        check_riders(self.riders)
        shared = {name: n for rider in self.riders for name, n in rider.shared.items()}
        of_each = {name: n for rider in self.riders for name, n in rider.of_each.items()}
        given, others = unique(tensors_of(params, "parameters")), unique(tensors_of(buffers, "buffers"))
        if self.needs_whole_norms and any(map(is_dtensor, given)):
            raise UserError("DTensors as parameters need ShardedCO2 with mesh=: their norms are of the whole model")
        self.trained = [p for p in given if p.requires_grad]
        self._frozen = [p for p in given if not p.requires_grad]
        self.params = [local_shard(p) for p in self.trained]
        self.given_buffers = {i: b for i, b in enumerate(others) if has_mean(b)}
        self.buffers = [as_real(local_shard(b)) for b in self.given_buffers.values()]
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
        self.sent_tau = self._moved_tau = pacing.tau
        self.growth = 1.0
        self._late = Late()
        self._ended: bool | None = None  # after step(last=True): whether all workers have ended
        self.begin_alike()
        for rider in self.riders:
            rider.attach(self)

    def begin_alike(self) -> None:
        """All workers take the first one's tensors."""
        compared = [rider.compared for rider in self.riders if rider.compared]
        alike = [t for rider in self.riders for t in rider.alike]
        self.flight.agree((self.name, self.signature(), *compared), [*self._alike, *alike])
        self.first_values = [bucket.flat_buffers() for bucket in self.buckets]

    def spoilt_buffers(self) -> list[Tensor]:
        """The averaged buffers, as they were given, that hold numbers which are not finite and were not there first."""
        order = {id(b): given for b, given in zip(self.buffers, self.given_buffers.values(), strict=True)}
        found: list[Tensor] = []
        for bucket, first in zip(self.buckets, self.first_values, strict=True):
            flat = bucket.flat_buffers()
            spoilt = views(~flat.isfinite() & ~same_values(flat, first), bucket.buffers)
            found += [order[id(b)] for b, where in zip(bucket.buffers, spoilt, strict=True) if where.any()]
        return found

    @property
    def tau(self) -> int:
        """Local steps of the round that runs."""
        return self.pacing.tau

    def rider(self, kind: type[OneRider]) -> OneRider:
        """The rider of that class; UserError where there is none."""
        for rider in self.riders:
            if isinstance(rider, kind):
                return rider
        raise UserError(f"{self.name} has no {kind.__name__}: give one among its riders")

    @property
    def rounds(self) -> int:
        """Rounds closed so far, those of finish() included."""
        return self.flight.launched

    @property
    def stats(self) -> RoundStats:
        """Statistics of the round that closed last; once a mean was merged in mid-round, of the round that runs."""
        return self.clock.stats

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

    # -- for users ---------------------------------------------------------------------------------------------

    def step(self, *, last: bool = False) -> bool:
        """Call after every optimiser step, also one that a GradScaler skipped: not from the optimiser's
        register_step_post_hook, which torch does not call then. True when a round closed.

        last: finish() follows, which then waits for one all-reduce. Without it finish() needs a second one where a
        round has just closed, only to hear that no worker has sent anything since.
        """
        if self.on_step is not None:
            self.on_step()
        if self._ended is not None:
            raise UserError("step() after step(last=True): call finish() between them")
        self.local_steps += 1
        if self.local_steps == 1 and self.pacing.tau > 1:  # else the only step is timed, from the last boundary on
            self.clock.steps_begin()
        if self.pacing.closes(self):
            if any(p.requires_grad for p in self._frozen):
                raise UserError(
                    "a parameter that was frozen when this object was built now requires a gradient and would never be "
                    "averaged: build it again after changing requires_grad"
                )
            ended = self._boundary(finished=last)
            self._ended = ended if last else None
            return True
        self.flight.done()  # an error is known as soon as it can be
        return False

    def finish(self) -> None:
        """Averages what is pending and leaves all workers with equal parameters. Every worker must call it.

        Workers may come here after different numbers of steps: the early ones take part in the others' rounds,
        contributing no change, until all have arrived. Their rounds have a round's usual size: nobody knows whether
        another worker still trains, and one that does sends all it has. Training may go on afterwards.
        """
        for rider in self.riders:
            rider.finishing()
        while not self._ended:
            self._ended = self._boundary(finished=True)
        self._ended = None
        self._late = Late()  # what a GPU still holds of the last round is not heard
        for rider in self.riders:
            rider.finished()

    @property
    def at_boundary(self) -> bool:
        return not self.local_steps

    def settle(self) -> bool:
        equal = self.is_common()
        for rider in self.riders if self.at_boundary else []:
            rider.settled(equal=equal)
        return equal

    def is_common(self) -> bool:
        """Whether this worker holds the model that all workers hold. At a boundary, waits for it first."""
        return self.at_boundary and not (self.flight.in_flight and self.starts_roughly)

    def close(self) -> None:
        self.flight.close()

    def leave(self) -> None:
        self.flight.leave()

    # -- what a method says ------------------------------------------------------------------------------------

    @abstractmethod
    def close_round(self, *, finished: bool) -> bool:
        """Ends the round; True once a reduction has landed that every worker sent with `finished`."""

    def signature(self) -> Any:
        """What must be equal on all workers, compared at construction."""
        return f"tau={self.tau}"

    def settings(self) -> Any:
        """What must be equal on all workers in every round."""
        return self.tau

    def left_out(self, where: Tensor) -> None:
        """where: 0-d truth value. Where it is true, what this worker sends has weight 0, and it starts anew."""
        for rider in self.riders:
            rider.left_out(where)

    def begin_round(self, number: int) -> None:  # noqa: B027
        """For settings that change from round to round. number: of the round, from 0."""

    # -- a reduction -------------------------------------------------------------------------------------------

    def send(self, *, finished: bool) -> None:
        """Launches the reduction of what the payloads hold, of the buffers' values, and of the scalars."""
        self.send_buffers()
        for name, value in (("finished", float(finished)), ("steps", float(self.local_steps)), ("weight", 1.0)):
            self.scalars.set(name, value)
        for rider in self.riders:
            rider.pack()
        self.sent_tau = self.tau
        self.growth = self.sent_tau / self._moved_tau
        self.flight.launch(self.stages())
        self.local_steps = 0

    def send_buffers(self) -> None:
        """The buffers' values travel, as they were at the boundary's beginning; the host waits for no copy."""
        for bucket, own in zip(self.buckets, self._own_buffers, strict=True):
            copy(bucket.buffer_views, own, queued=True)

    def stages(self) -> Iterator[Stage]:
        """What is launched."""
        for rider in self.riders:
            yield from rider.stages()
        yield from self.reducer.stages(self.flight.group, self.flight.launched)

    def land(self, *, finished: bool) -> Landing:
        """Waits for what is in flight, and notes what that cost. The model's buffers become their means.

        The payloads hold what landed; `scale` turns it into means, in a pass that their owner makes anyway.
        """
        self.flight.wait([rider.landed for rider in self.riders])
        stats, flight, s = self.clock.stats, self.flight, self.scalars
        stats.round, stats.bytes_sent = flight.launched, flight.bytes_sent
        stats.exposed_seconds, stats.allreduce_seconds = flight.exposed, flight.seconds
        weight = s["weight"].double()  # a sum or a mean, as all that has landed
        self.scale = torch.where(weight == 0, 1.0 if self.differences else float("nan"), 1 / weight)
        for bucket, first in zip(self.buckets, self.first_values, strict=True):
            rescale(bucket.values, self.scale)
            keep_unchanged(bucket.values, first, flight.world_size)
        s.place.mul_(self.reducer.scale)
        if self.riders:
            self._hear()
        last = finished and s["finished"].item() > 1 - 1e-6  # one over the workers may be rounded
        empty = last and s["steps"].item() == 0.0
        for bucket in self.buckets if not empty else []:  # an empty round carries older values
            copy_where(s["weight"] > 0, bucket.buffers, bucket.buffer_views)
            self._moved_tau = self.sent_tau
        return Landing(last, empty)

    def _hear(self) -> None:
        """On a GPU what landed a round ago: the host waits until the GPU has passed that, for nothing queued since."""
        of = Heard(self.rounds - 1, self.everybody, self.flight.world_size)
        if told := self._late.exchange(self.scalars.place * self.everybody, of):
            sums = self.scalars.named(told[0])
            for rider in self.riders:
                rider.hear(sums, told[1])

    # -- of its own --------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # whose tensors, kept here, could not be written to later
    @torch.no_grad()
    def _boundary(self, *, finished: bool) -> bool:
        """`close_round`, measured, with what every method does around it."""
        self.flight.check_alive()  # before a method takes partial sums for what it keeps there
        with self.clock.boundary(self.tau, self.local_steps):
            for own, bucket in zip(self._own_buffers, self.buckets, strict=True):
                copy(own, bucket.buffers)  # whatever lands in the meantime
            ended = self.close_round(finished=finished)
            for rider in self.riders:
                rider.end()
            self.begin_round(self.flight.launched)
            self.pacing.begin(self.flight.launched)
            self.moved(at_boundary=True)
        return ended

    def moved(self, *, at_boundary: bool) -> None:
        for rider in self.riders:
            rider.moved(at_boundary=at_boundary)
