"""CO2 among workers that come and go: a worker that dies is left out, one that comes joins at a boundary.

The workers of one stretch of time are a generation: a process group that none joins and all leave together. A small
service (training/launch.py) lists each generation's workers; it does not train, and outlives every worker.

Nothing a survivor has sent is lost, and all survivors' outer iterates stay equal, bit for bit. A reduction is agreed
on in two phases. Its sum is followed by an all-reduce of one number: who has received that knows that all hold the sum,
and only then is it merged. After a failure the survivors tell how far each is. If one of them has merged the round, or
all hold its sum, it counts, with what the dead worker sent; else each sends again, from a copy, what it had sent, and
the mean is over those left.

A newcomer joins where all have agreed on it, by a number that travels with a reduction. It gets the outer state,
buffers and optimiser of the first worker, over a connection of its own while the others train on, sends zeros for the
round that is under way, which do not count in its mean, and trains from the outer iterate.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..averaging import Landing
from ..co2 import CO2, CO2Config, Schedule
from ..errors import CollectiveError, UserError
from ..flat import copy, resized
from ..flight import Flight, Link
from ..groups import Stage, all_reduce
from ..wires.config import WireConfig
from .members import AGREED, SENT, SUMMED, Came, Members, Report, Workers, agreed

MOST = 1024  # workers: checksums are so narrow that the sums over as many are exact
LOOK_EVERY = 0.2  # seconds between two looks whether another worker has left


class ElasticFlight(Flight, Workers):
    """Flight whose group may change under what is in flight: to its owner no reduction fails.

    Attributes: world_size, how many workers count in the reduction in flight; phase, of that reduction.
    """

    def __init__(self, device: torch.device, members: Members, owner: ElasticCO2, **options: Any):
        assert not dist.is_initialized(), "the workers' groups are made and left here"
        Flight.__init__(self, device, **options)
        Workers.__init__(self, members)
        self.owner = owner
        self.phase = AGREED
        self.counts = True  # whether what this worker has sent counts
        self._spared: tuple[int, int] = 0, 0  # of which reduction how many workers do not count
        self._kept: list[Tensor] = []  # what was sent, as it was
        self._looked_at = 0.0

    # -- what the owner of a Flight calls ------------------------------------------------------------------------

    def launch(self, stages: Iterator[Stage]) -> None:
        """See Flight; keeps a copy of what is sent."""
        flats = self._flats
        for flat in flats if not self.counts else []:
            flat.zero_()
        self._kept = self._kept or [torch.empty_like(flat) for flat in flats]
        copy(self._kept, flats)
        self.phase = SENT
        try:
            super().launch(stages)
        except CollectiveError:
            self.mend()

    def done(self) -> bool:
        """See Flight; looks, too, whether another worker has left."""
        try:
            through = super().done()
        except CollectiveError:
            through = False
            self.mend()
        if time.monotonic() - self._looked_at > LOOK_EVERY:
            self._looked_at = time.monotonic()
            if self.members.left():
                self.mend()
                through = False
        return through

    def settle(self) -> bool:
        """See Flight."""
        while True:
            try:
                return super().settle()
            except CollectiveError:
                self.mend()

    def close(self) -> None:
        """See Flight."""
        self.let_go()

    # -- another generation -----------------------------------------------------------------------------------

    def mend(self, came: Came = "failed") -> list[Report | None]:
        """Goes on to the next generation with those that are left, and settles what becomes of what is in flight."""
        while True:
            self._drop()
            reports = self.members.meet(self._report(), came)
            self.adopt(reports)
            if not self.in_flight:
                return reports
            if agreed(reports, "launched", self.launched):
                self.phase = AGREED
                return reports
            try:
                self._send_again(reports)
                return reports
            except CollectiveError:
                continue

    def adopt(self, reports: list[Report | None]) -> None:
        """Takes the members' group for what is launched from now on."""
        assert self.members.group is not None
        self.group, self.rank = self.members.group, self.members.rank
        self.timed_groups = [self.group]
        known = [r for r in reports if r is not None]
        latest = max((r["launched"] for r in known), default=self.launched)
        self.adopt_sums(known)
        newcomers = len(reports) - len(known) if known else 0
        spared = sum(r["launched"] == latest and not r["counts"] for r in known)
        self._spared = (latest + 1, newcomers) if newcomers else (latest, spared)
        self.owner.forget_repair()
        self.on_change(reports)

    def counted(self, number: int) -> int:
        """How many workers count in the reduction of that number, from 1, sent in this generation."""
        return self.members.size - (self._spared[1] if number == self._spared[0] else 0)

    @property
    def _flats(self) -> list[Tensor]:
        return [bucket.flat for bucket in self.owner.buckets]

    def _drop(self) -> None:
        """Lets go of the group. What is in flight there lands, or fails once another has let go."""
        if self._thread is not None:
            with contextlib.suppress(CollectiveError):
                self._end()
        self.let_go()

    def let_go(self) -> None:
        """Leaves the group, so that those who wait for this worker there see it broken."""
        self.group, self.timed_groups = None, []
        self.members.leave()

    def _report(self) -> Report:
        phase = self.phase if self.in_flight else AGREED
        mine = {"launched": self.launched, "launched_phase": phase, "counts": self.counts}
        return mine | self.of_sums() | self.tell()

    def _send_again(self, reports: Sequence[Report | None]) -> None:
        copy(self._flats, self._kept)
        self.phase = SENT
        self.owner.count(self.counted(self.launched))
        self._begin(self.owner.stages())

    def _failure(self, reason: str) -> CollectiveError:
        """See Flight; lets go of the group at once, or its other workers would wait for the timeout."""
        self.let_go()
        return CollectiveError(reason)


class ElasticCO2(CO2):
    """CO2 whose workers come and go: see this module. The plain one's options but for tau auto, sync_steps, steps by
    speed and narrow wires (of wire auto it takes float32); one copy of the parameters more. RANK and WORLD_SIZE, from
    the environment, are its place among as many workers as there may be.

    Make it on every worker before any process group exists, then call `join` on all. members: see Members. Set, before
    `join`: give, which returns what a newcomer needs, this object's state_dict() included; take, which takes it there;
    may_join, whether newcomers may join at the boundary that is being closed, alike on all workers.
    """

    more_scalars: ClassVar[Mapping[str, int]] = {"join": 1}
    tells_times = False
    flight: ElasticFlight

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        members: Members,
        buffers: Iterable[Tensor] = (),
        timeout: float = 600.0,
        link: Link | None = None,
        schedule: Schedule | None = None,
    ):
        self.members = members
        config = config or CO2Config()
        check_elastic(config)
        if config.wire.format == "auto":
            config = replace(config, wire=WireConfig())
        super().__init__(params, config, buffers=buffers, timeout=timeout, link=link, schedule=schedule)
        self._token = torch.zeros(1)
        self._joining = False  # whether all have agreed that newcomers may join
        self._wanted_in = False  # whether the reduction that landed last says so
        self._agreement.most = MOST
        self.give: Callable[[], dict[str, Any]] = self.state_dict
        self.take: Callable[[dict[str, Any]], None] = self.load_state_dict
        self.may_join: Callable[[], bool] = lambda: True

    def slot(self, group: dist.ProcessGroup | None) -> tuple[int, int]:
        """The launcher's: a worker that takes the place of a lost one has its slot."""
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def make_flight(self, device: torch.device, **options: Any) -> ElasticFlight:
        return ElasticFlight(device, self.members, self, **{k: v for k, v in options.items() if k in OPTIONS})

    def join(self, found: Callable[[], None] = lambda: None) -> bool:
        """Comes among the workers, with their state; whether others were training. found: called on the first worker
        where nobody has any state: it makes or loads the first."""
        while True:
            reports = self.members.meet(None, "empty")
            self.flight.adopt(reports)
            founding = all(r is None for r in reports)
            if founding and self.flight.rank == 0:
                found()
                self._serve(len(reports) - 1)
                return False
            try:
                self.take(self.members.fetch())
            except RuntimeError:  # its sender was lost
                self.flight.let_go()
                continue
            if not founding:
                self._enter()
            return not founding

    @torch.no_grad()
    def _enter(self) -> None:
        """Takes part in the round that is under way, with zeros that do not count."""
        self._restart()
        for boundary in self._boundaries:
            boundary.take()
        self.local_steps, self._spans = 0, 1  # a round of its own begins, while the giver's was closing
        self.flight.counts = False
        self._send(finished=False)
        if self.config.delay == 0:
            self.merge()
        self.begin_round(self.rounds)
        self.flight.counts = not self.flight.in_flight

    def send(self, *, finished: bool) -> None:
        background = self.flight
        if background.members.left():
            background.mend()
        if not finished and self._joining and self.may_join():
            self._let_join()
        background.counts = True
        self._send(finished=finished)

    def _let_join(self) -> None:
        """Lets newcomers into the group, where nothing is in flight; or goes on where another worker has done so."""
        background = self.flight
        while self._joining:
            reports = background.mend("planned")
            known = [r for r in reports if r is not None]
            self._joining = not (self.members.planned or any(r["launched"] > background.launched for r in known))
            if len(known) < len(reports) and reports[background.rank] is known[0]:
                self._serve(len(reports) - len(known))

    def _serve(self, newcomers: int) -> None:
        if newcomers:
            self.members.serve(self.give(), newcomers)

    def _send(self, *, finished: bool) -> None:
        self.count(self.flight.counted(self.flight.launched + 1))
        self.scalars.set("join", float(self.flight.rank == 0 and self.members.wanted()))
        super().send(finished=finished)

    def count(self, workers: int) -> None:
        """So many workers count in the reduction that is sent next."""
        self.flight.world_size = self._agreement.everybody = workers
        self.reducer.scale = 1 / workers

    def stages(self) -> Iterator[Stage]:
        yield from super().stages()
        self._wanted_in = self.scalars["join"].item() > 0  # read here: on a GPU the background alone waits for it
        self.flight.phase = SUMMED
        if self.flight.group is not None:
            yield all_reduce([self._token], self.flight.group)
        self.flight.phase = AGREED

    def receive(self, *, finished: bool) -> Landing:
        landing = super().receive(finished=finished)
        self._joining |= self._wanted_in
        return landing

    def own_state(self) -> dict[str, Any]:
        return super().own_state() | {"slots": len(self.guard.names)}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """As the plain one; a sum that was in flight may be over any number of workers, with places for any number."""
        self.count(state["workers"])
        more, flats = len(self.guard.names) - state["slots"], state["flats"]
        if more:  # places come last in the first of the flat tensors
            flats = resized(flats, [f.new_empty(len(f) + (0 if i else more)) for i, f in enumerate(flats)])
        super().load_own_state(state | {"flats": flats})
        self._wanted_in = self.scalars["join"].item() > 0

    def forget_repair(self) -> None:
        """Of replicas that differ, and of workers left out: those that have just come know nothing of it."""
        self._agreement.forget_repair()
        self.guard.forget_rounds()
        self.guard.tells = self.flight.rank == 0


OPTIONS = ("timeout", "link")


def check_elastic(config: CO2Config) -> None:
    """UserError for what does not go with workers that come and go."""
    for ok, name, remedy in (
        (config.tau != "auto", "tau='auto'", "give a number of local steps"),
        (config.wire.format in ("float32", "auto"), f"wire.format={config.wire.format!r}", "leave it out"),
        (config.sync_steps == 0, f"sync_steps={config.sync_steps}", "leave it out"),
        (config.steps == "even", f"steps={config.steps!r}", "leave it out"),
    ):
        if not ok:
            raise UserError(f"elastic does not go with {name}: {remedy}")
