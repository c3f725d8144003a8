"""CO2 among workers that come and go: a worker that dies is left out, one that comes joins at a boundary.

The workers of one stretch of time are a generation: a process group that none joins and all leave together. A small
service (training/launch.py) lists each generation's workers; it does not train, and outlives every worker.

Nothing a survivor has sent is lost, and all survivors' outer iterates stay equal, bit for bit: see allreduce.py.

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

from ..build import CommonArgs, build_args
from ..co2 import CO2
from ..config import CO2Config, CompressionConfig, Schedule, named_rule
from ..errors import UserError
from ..hooks import Hook
from ..local_update import LocalUpdateMethod
from ..testing.link import Link, SlowAllReduce
from .allreduce import ElasticAllReduce
from .members import Members, Report


class Joining(Hook):
    """Lets newcomers in, and is this worker's own way in: call `join` once the method is made. It must be the first of
    the hooks, because the others write how many workers count.

    members: see Members. at_once: whether a mean is waited for and merged where it was sent (delay 0).
    Attributes, to be set before `join`: give, which returns what a newcomer needs, the method's state_dict() included;
    take, which takes it there; may_join, whether newcomers may join at the boundary that is being closed, alike on all
    workers.
    """

    co2: CO2
    allreduce: ElasticAllReduce

    def __init__(self, members: Members, *, at_once: bool = False):
        self.members, self._at_once = members, at_once
        self._joining = False  # whether all have agreed that newcomers may join
        self.may_join: Callable[[], bool] = lambda: True

    def attach(self, method: LocalUpdateMethod) -> None:
        again = hasattr(self, "method")
        super().attach(method)
        assert isinstance(method, CO2) and isinstance(method._allreduce, ElasticAllReduce), "see elastic_co2"
        self.co2, self.allreduce = method, method._allreduce
        self.allreduce.owner = method
        self.allreduce.counts = True
        if not again:
            self.give: Callable[[], dict[str, Any]] = method.state_dict
            self.take: Callable[[dict[str, Any]], None] = method.load_state_dict

    def join(self, found: Callable[[], None] = lambda: None) -> bool:
        """Comes among the workers, with their state; whether others were training. found: called on the first worker
        where nobody has any state: it makes or loads the first."""
        while True:
            reports = self.members.meet(None, "empty")
            self.allreduce.adopt(reports)
            founding = all(r is None for r in reports)
            if founding and self.allreduce.rank == 0:
                found()
                self._serve(reports)
                return False
            try:
                self.take(self.members.fetch())
            except RuntimeError:  # its sender was lost
                self.allreduce.let_go()
                continue
            if not founding:
                self._enter()
            return not founding

    @torch.no_grad()
    def _enter(self) -> None:
        """Takes part in the round that is under way, with zeros that do not count."""
        m = self.co2
        for outer_step in m._outer_steps:
            outer_step.restart()
            outer_step.take()
        m._local_steps = 0
        self.allreduce.counts = False
        m._start_allreduce(finished=False)
        if self._at_once:
            m._merge()
        m._begin_round(m.rounds)
        m._sync_schedule.begin(m.rounds)  # a round of its own begins, while the giver's was closing

    def before_allreduce(self) -> None:
        if self.allreduce.counts:  # a newcomer takes part with those that it has come to
            if self.members.left():
                self.allreduce.mend()
            if self._joining and not self.method._scalars["finished"] and self.may_join():
                self._let_join()
        self.allreduce.count(self.allreduce.launched + 1)
        self.allreduce.asks = self.allreduce.rank == 0 and self.members.wanted()

    def after_allreduce(self) -> None:
        self._joining |= self.allreduce.asked
        self.allreduce.counts = True

    def _let_join(self) -> None:
        """Lets newcomers into the group, where nothing is in flight; or goes on where another worker has done so."""
        while self._joining:
            reports = self.allreduce.mend("planned")
            known = [r for r in reports if r is not None]
            self._joining = not (self.members.planned or any(r["launched"] > self.allreduce.launched for r in known))
            if reports[self.allreduce.rank] is known[0]:
                self._serve(reports)

    def _serve(self, reports: list[Report | None]) -> None:
        """Sends what newcomers need to all other workers that have reported no state."""
        newcomers = reports.count(None) - (reports[self.allreduce.rank] is None)
        if newcomers:
            self.members.serve(self.give(), newcomers)


def check_elastic(config: Any) -> None:
    """UserError for what does not go with workers that come and go. config: a CO2Config."""
    if config.tau == "auto":
        raise UserError("elastic does not go with tau='auto': give a number of local steps")
    if config.compression.format not in ("float32", "auto"):
        raise UserError(f"elastic does not go with compression.format={config.compression.format!r}: leave it out")


class SlowElasticAllReduce(SlowAllReduce, ElasticAllReduce):
    """ElasticAllReduce over an emulated link."""


class ElasticCO2(CO2):
    """What elastic_co2 makes."""

    def __init__(self, params: Iterable[Tensor], c: CO2Config, schedule: Schedule | None, **built: Any):
        self._build(params, c, schedule, **built)


def elastic_co2(
    params: Iterable[Tensor],
    config: CO2Config | None = None,
    *,
    members: Members,
    buffers: Iterable[Tensor] = (),
    timeout: float = 600.0,
    link: Link | None = None,
    schedule: Schedule | None = None,
    hooks: Sequence[Hook] = (),
) -> tuple[CO2, Joining]:
    """Makes CO2 whose workers come and go, at the cost of one more copy of the parameters.

    Make it on every worker before any process group exists, then call the hook's `join` on all.

    Args:
        config: See CO2. tau auto and compressions are refused, and compression auto means float32.
        members: See Members.

    Returns:
        The method, and the hook that lets newcomers in.
    """
    given = named_rule(config)
    check_elastic(given)
    c = replace(given, compression=CompressionConfig())
    make = functools.partial(SlowElasticAllReduce, link=link) if link else ElasticAllReduce
    args = CommonArgs(buffers=buffers, timeout=timeout, hooks=hooks)
    allreduce = functools.partial(make, members=members)
    built = build_args(c, args, schedule, with_times=False, allreduce=allreduce)
    joining = Joining(members, at_once=c.delay == 0)
    built["hooks"].insert(0, joining)
    return ElasticCO2(params, c, schedule, **built), joining
