"""CO2 among workers that come and go: a worker that dies is left out, one that comes joins at a boundary.

The workers of one stretch of time are a generation: a process group that none joins and all leave together. A small
service (training/launch.py) lists each generation's workers; it does not train, and outlives every worker.

Nothing a survivor has sent is lost, and all survivors' outer iterates stay equal, bit for bit: see flight.py.

A newcomer joins where all have agreed on it, by a number that travels with a reduction. It gets the outer state,
buffers and optimiser of the first worker, over a connection of its own while the others train on, sends zeros for the
round that is under way, which do not count in its mean, and trains from the outer iterate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..adaptive.config import Schedule, settings_of
from ..adaptive.merging import OnArrival
from ..assembly.co2 import Options, plugs
from ..assembly.config import CO2Config, WireConfig, named_rule
from ..checkpoints.saved import Saved
from ..errors import UserError
from ..rounds import Rider, Rounds
from ..testing.link import Link, SlowFlight
from .flight import ElasticFlight
from .members import Members, Report


class Joining(Rider):
    """Lets newcomers in, and is this worker's own way in: call `join` once the method is made. The first of the riders,
    for the others write how many workers count.

    members: see Members. at_once: whether a mean is waited for and merged where it was sent (delay 0).
    Attributes, to be set before `join`: give, which returns what a newcomer needs, the method's state_dict() included;
    take, which takes it there; may_join, whether newcomers may join at the boundary that is being closed, alike on all
    workers.
    """

    co2: OnArrival
    flight: ElasticFlight

    def __init__(self, members: Members, *, at_once: bool = False):
        self.members, self._at_once = members, at_once
        self._joining = False  # whether all have agreed that newcomers may join
        self.may_join: Callable[[], bool] = lambda: True

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        assert isinstance(method, OnArrival) and isinstance(method, Saved), "see elastic_co2"
        assert isinstance(method.flight, ElasticFlight)
        self.co2, self.flight = method, method.flight
        self.flight.owner = method
        self.give: Callable[[], dict[str, Any]] = method.state_dict
        self.take: Callable[[dict[str, Any]], None] = method.load_state_dict

    def join(self, found: Callable[[], None] = lambda: None) -> bool:
        """Comes among the workers, with their state; whether others were training. found: called on the first worker
        where nobody has any state: it makes or loads the first."""
        while True:
            reports = self.members.meet(None, "empty")
            self.flight.adopt(reports)
            founding = all(r is None for r in reports)
            if founding and self.flight.rank == 0:
                found()
                self._serve(reports)
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
        m = self.co2
        for boundary in m._boundaries:
            boundary.restart()
            boundary.take()
        m.local_steps = 0
        self.flight.counts = False
        m.send(finished=False)
        if self._at_once:
            m.merge()
        m.begin_round(m.rounds)
        m.pacing.begin(m.rounds)  # a round of its own begins, while the giver's was closing

    def pack(self) -> None:
        if self.flight.counts:  # a newcomer takes part with those that it has come to
            if self.members.left():
                self.flight.mend()
            if self._joining and not self.method.scalars["finished"] and self.may_join():
                self._let_join()
        self.flight.count(self.flight.launched + 1)
        self.flight.asks = self.flight.rank == 0 and self.members.wanted()

    def landed(self) -> None:
        self._joining |= self.flight.asked
        self.flight.counts = True

    def restart(self) -> None:
        self.flight.counts = True

    def _let_join(self) -> None:
        """Lets newcomers into the group, where nothing is in flight; or goes on where another worker has done so."""
        while self._joining:
            reports = self.flight.mend("planned")
            known = [r for r in reports if r is not None]
            self._joining = not (self.members.planned or any(r["launched"] > self.flight.launched for r in known))
            if reports[self.flight.rank] is known[0]:
                self._serve(reports)

    def _serve(self, reports: list[Report | None]) -> None:
        """Sends what newcomers need to all other workers that have reported no state."""
        newcomers = reports.count(None) - (reports[self.flight.rank] is None)
        if newcomers:
            self.members.serve(self.give(), newcomers)


def check_elastic(config: Any) -> None:
    """UserError for what does not go with workers that come and go. config: a CO2Config."""
    if config.tau == "auto":
        raise UserError("elastic does not go with tau='auto': give a number of local steps")
    if config.wire.format not in ("float32", "auto"):
        raise UserError(f"elastic does not go with wire.format={config.wire.format!r}: leave it out")


class SlowElasticFlight(SlowFlight, ElasticFlight):
    """ElasticFlight over an emulated link."""


class ElasticCO2(Saved, OnArrival):
    """What elastic_co2 makes: it reads the settings of all riders."""

    reads = CO2Config


def elastic_co2(
    params: Iterable[Tensor],
    config: CO2Config | None = None,
    *,
    members: Members,
    buffers: Iterable[Tensor] = (),
    timeout: float = 600.0,
    link: Link | None = None,
    schedule: Schedule | None = None,
    riders: Sequence[Rider] = (),
) -> tuple[OnArrival, Joining]:
    """CO2 whose workers come and go (core/elastic/joining.py), and the rider that lets them in.

    The arguments: see CO2. tau auto and narrow wires are refused; wire auto stands for float32. It
    takes a copy of the parameters more. members: see Members. Make it on every worker before any process group exists,
    then call the rider's `join` on all.
    """
    given = named_rule(config)
    check_elastic(given)
    c = replace(given, wire=WireConfig())
    settings = settings_of(c, schedule)
    options = Options(buffers=buffers, timeout=timeout, riders=riders)
    carrier = functools.partial(SlowElasticFlight, link=link) if link else ElasticFlight
    flight = functools.partial(carrier, members=members)
    plugged = plugs(c, lambda number: settings(number).tau, options, times=False, flight=flight)
    joining = Joining(members, at_once=c.delay == 0)
    plugged["riders"].insert(0, joining)
    return ElasticCO2(params, settings, **plugged), joining
