"""CO2 among workers that come and go. A worker that dies is left out, and a new worker joins at a round boundary.

A generation is a process group whose workers stay the same. No worker joins it, and all of them leave it together. A
small service (training/launch.py) lists the workers of each generation. It does not train, and outlives every worker.

Nothing that a survivor has sent is lost, and the survivors' outer iterates stay equal bit for bit (allreduce.py).

A newcomer joins at a boundary on which all workers have agreed, by a number that is summed with a reduction. It gets
the outer state, buffers and optimizer of the first worker, over its own connection, while the other workers train on.
It sends zeros for the current round, which do not count in the average. Then it trains from the outer iterate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets import copy_where, tensors_of
from ..co2 import CO2
from ..compression.formats import NARROW_FORMATS
from ..config import CO2Config, CommonArgs, CompressionConfig, Schedule, build_args, named_rule
from ..errors import UserError
from ..hooks import Hook, HookedMethod
from ..local_update import ReduceResult
from ..testing.link import Link, SlowAllReduce
from .allreduce import ElasticAllReduce
from .members import Members, Report
from .reducers import make_reducer


class Joining(Hook):
    """Lets newcomers join, and lets this worker join: call `join` after the method is made.

    It must be the first hook, because the other hooks send how many workers count.

    Args:
        members: The worker's generation, see Members.

    Attributes:
        give: Returns the state that a newcomer needs, with the method's state_dict(). Set it before `join`.
        take: Loads that state on the newcomer. Set it before `join`.
        may_join: Returns whether newcomers may join at the boundary that is closing, equal on all workers. Set it
            before `join`.
    """

    co2: ElasticCO2
    allreduce: ElasticAllReduce

    def __init__(self, members: Members):
        self.members = members
        self._joining = False  # whether all workers have agreed that newcomers may join
        self.may_join: Callable[[], bool] = lambda: True

    def attach(self, method: HookedMethod) -> None:
        again = hasattr(self, "method")
        super().attach(method)
        assert isinstance(method, ElasticCO2) and isinstance(method.allreduce, ElasticAllReduce), "see elastic_co2"
        self.co2, self.allreduce = method, method.allreduce
        self.allreduce.owner = method
        self.allreduce.counts = True
        if not again:
            self.give: Callable[[], dict[str, Any]] = method.state_dict
            self.take: Callable[[dict[str, Any]], None] = method.load_state_dict

    @torch.inference_mode(False)
    def join(self, found: Callable[[], None] = lambda: None) -> bool:
        """Joins the other workers and loads their state.

        Args:
            found: Makes or loads the first state. It is called on the first worker if no worker has any state.

        Returns:
            Whether other workers were training.
        """
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
            except RuntimeError:  # the worker that sent it was lost
                self.allreduce.let_go()
                continue
            if not founding:
                self._enter()
            return not founding

    def _enter(self) -> None:
        """Takes part in the current round, with zeros that do not count."""
        self.allreduce.counts = False
        self.co2.enter()

    def before_allreduce(self) -> None:
        if self.allreduce.counts:  # a newcomer does not change the workers that it has just joined
            if self.members.left():
                self.allreduce.mend()
            if self._joining and not self.method.scalars["finished"] and self.may_join():
                self._let_join()
        self.allreduce.count(self.allreduce.launched + 1)
        self.allreduce.asks = self.allreduce.rank == 0 and self.members.wanted()

    def after_allreduce(self) -> None:
        self._joining |= self.allreduce.asked
        self.allreduce.counts = True

    def _let_join(self) -> None:
        """Lets newcomers into the group while nothing is in flight, unless another worker has already done so."""
        while self._joining:
            reports = self.allreduce.mend("planned")
            known = [r for r in reports if r is not None]
            self._joining = not (self.members.planned or any(r["launched"] > self.allreduce.launched for r in known))
            if reports[self.allreduce.rank] is known[0]:
                self._serve(reports)

    def _serve(self, reports: list[Report | None]) -> None:
        """Sends the state to all other workers that have reported no state."""
        newcomers = reports.count(None) - (reports[self.allreduce.rank] is None)
        if newcomers:
            self.members.serve(self.give(), newcomers)


def check_elastic(config: Any) -> None:
    """Raises UserError for settings of a CO2Config that elastic workers do not support."""
    if config.fragments not in (1, "auto"):
        raise UserError(
            f"fragments={config.fragments} with elastic workers is not supported yet: a newcomer would have to join in "
            "the middle of a round; give 1"
        )
    if config.compression.format not in (*NARROW_FORMATS, "auto"):
        raise UserError(
            f"elastic does not go with compression.format={config.compression.format!r}: a round that a loss "
            "interrupts is sent again, and L-GreCo's residuals, sums, factors and choices have changed by then, so "
            "that undoing it would keep two more copies of the parameters; give a uniform format"
        )


class SlowElasticAllReduce(SlowAllReduce, ElasticAllReduce):
    """An ElasticAllReduce over an emulated link."""


class ElasticCO2(CO2):
    """The class of the method that elastic_co2 returns."""

    def __init__(self, params: Iterable[Tensor], c: CO2Config, schedule: Schedule | None, **built: Any):
        self._build(params, c, schedule, **built)
        self._finite_buffers = [t.clone() for t in self._buffers]  # of the last average

    def _wait_allreduce(self, *, finished: bool) -> ReduceResult:
        """Does what CO2 does. If no worker counts, the buffers become the buffers of the last average."""
        result, counts = super()._wait_allreduce(finished=finished), self._weight > 0
        if self._buffers:
            copy_where(counts, self._finite_buffers, self._buffers)
            copy_where(~counts, self._buffers, self._finite_buffers)
        return result

    @torch.no_grad()
    def enter(self) -> None:
        """Sends zeros for the current round, which a newcomer has joined, and begins a round of its own."""
        for outer_step in self.fragments[0].outer_steps:
            outer_step.restart()
            outer_step.take()
        self.local_steps = 0
        self._start_allreduce(finished=False)
        if self.config.delay == 0:
            self._merge()
        self._begin_round(self.rounds)
        self.sync_schedule.begin(self.rounds)  # the sender's state was of a closing round

    def _local_state(self) -> dict[str, Any]:
        """Returns the state for newcomers and checkpoints, without residuals, which are this worker's own."""
        state = super()._local_state()
        if self.reducer.state:
            del state["residual"]
        return state

    def _load_local_state(self, state: dict[str, Any]) -> None:
        super()._load_local_state({name: held for name, held in state.items() if name != "residual"})


class Classes(NamedTuple):
    """The classes of what elastic_co2 makes. island.py has others."""

    allreduce: Callable[..., ElasticAllReduce] = ElasticAllReduce
    slow_allreduce: Callable[..., ElasticAllReduce] = SlowElasticAllReduce
    joining: type[Joining] = Joining
    method: type[ElasticCO2] = ElasticCO2


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
    classes: Classes | None = None,
) -> tuple[CO2, Joining]:
    """Makes CO2 whose workers come and go, at the cost of one more copy of the parameters.

    Checkpoints hold no residuals of error feedback, so a resumed run starts with zeros.

    Make it on every worker before any process group exists, then call the hook's `join` on all of them.

    Args:
        params: As for CO2.
        config: As for CO2. Compression lgreco is refused. Compression auto means float32.
        members: The worker's generation, see Members.
        buffers: As for CO2.
        timeout: As for CO2.
        link: An emulated link, for tests.
        schedule: As for CO2.
        hooks: As for CO2.
        classes: Other classes of what this makes, for workers of several ranks.

    Returns:
        The method, and the hook that lets newcomers join.

    Raises:
        UserError: For settings that elastic workers do not support.
    """
    c, params = named_rule(config).uncut(), tensors_of(params, "parameters")
    check_elastic(c)
    if c.compression.format == "auto":
        c = replace(c, compression=CompressionConfig())
    c.compression.check(params, None)
    classes = classes or Classes()
    make = functools.partial(classes.slow_allreduce, link=link) if link else classes.allreduce
    args = CommonArgs(buffers=buffers, timeout=timeout, hooks=hooks)
    allreduce = functools.partial(make, members=members)
    built = build_args(c, args, schedule, allreduce=allreduce)
    built["hooks"].insert(0, joining := classes.joining(members))
    built["reducer"] = functools.partial(make_reducer, c.compression)
    return classes.method(params, c, schedule, **built), joining
