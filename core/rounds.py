"""Round after round: local steps are counted, what was sent a round ago lands, and the next reduction is launched.

A method (CO2, the baselines) says in `close_round` what a round's end means, by `land` and `send`. Plugged in are: what
carries a reduction (Flight), how it travels (Reducer), when a round ends (Pacing), and what goes along (Riders).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .errors import UserError
from .flat import Bucket, Scalars, copy, copy_where, rescale
from .flight import Flight
from .groups import Stage
from .held import Held
from .loop import Loop
from .pacing import Pacing
from .reducer import Reducer, all_reduce
from .riders import Heard, Rider, check_riders
from .stats import Late

OneRider = TypeVar("OneRider", bound=Rider)


class Landing(NamedTuple):
    """What has landed; only finish() reads it from the device. last: every worker sent it from finish(), and no round
    follows. empty: besides, nobody had taken a step, and it must move nothing."""

    last: bool
    empty: bool


class Rounds(Held, Loop):
    """A method that trains in rounds. pacing, riders: see the top of this file. The other arguments: see Held; what a
    loop calls besides step and finish: see Loop.

    Attributes, beside Held's: sent_tau, the tau of the round whose reduction is in flight, or landed last; growth,
    sent_tau over the tau of the round whose mean landed before (outer.carried).
    """

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
        super().__init__(params, buffers, flight, reducer, shared, of_each)
        self.sent_tau = self._moved_tau = pacing.tau
        self.growth = 1.0
        self._late = Late()
        self._ended: bool | None = None  # after step(last=True): whether all workers have ended
        self.begin_alike()
        for rider in self.riders:
            rider.attach(self)

    def begin_alike(self) -> None:
        """All workers take the first one's tensors."""
        self.flight.agree((self.name, self.signature()), self._alike)

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

    # -- for users ---------------------------------------------------------------------------------------------

    def step(self, *, last: bool = False) -> bool:
        """Call after every optimiser step, also one that a GradScaler skipped: not from the optimiser's
        register_step_post_hook, which torch does not call then. True when a round closed.

        last: finish() follows, which then waits for one all-reduce. Without it finish() needs a second one where a
        round has just closed, only to hear that no worker has sent anything since.
        """
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
        return self.tau

    def left_out(self, where: Tensor) -> None:
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
        for bucket in self.buckets:
            rescale(bucket.values, self.scale)
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
