"""CO2 among workers that come and go. A worker that dies is left out, and a new worker joins at a round boundary.

A generation is a process group whose workers stay the same. No worker joins it, and all of them leave it together. A
small service (launch.py) lists the workers of each generation. It does not train, and outlives every worker.

A death may lose the reduction in flight, on all survivors alike, so their outer iterates stay equal bit for bit
(allreduce.py). With merge keep_local and with delay 0 the parameters keep its progress, which the next reduction sends.
In the paper's order the survivors lose that round's steps. After a change of workers, error feedback starts from zero.

A newcomer joins at a boundary on which all workers have agreed, by a number that is summed with a reduction. There, all
fragments are merged. It gets the outer state, buffers and optimizer of the first worker, while the other workers train
on. It sends zeros for the current round, which do not count in the average. Then it trains from the outer iterate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..buckets import copy_where
from ..co2 import CO2
from ..comm import Link
from ..config import CO2Config, CommonArgs, CompressionConfig, Schedule, build_args
from ..guards.arguments import checked
from ..guards.inputs import tensors_of
from ..hooks import Hook
from ..local_update import ReduceResult
from .allreduce import CopyReducer, ElasticAllReduce, Script
from .members import Members, Report, WorkersChanged


@checked
class ElasticCO2(CO2):
    """CO2 whose workers come and go, see elastic_co2."""

    allreduce: ElasticAllReduce  # pyright: ignore[reportIncompatibleVariableOverride]
    _kind: type[ElasticAllReduce] = ElasticAllReduce

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config,
        *,
        members: Members,
        script: Script | None = None,
        buffers: Iterable[Tensor] = (),
        timeout: float = 600.0,
        link: Link | None = None,
        schedule: Schedule | None = None,
        hooks: Sequence[Hook] = (),
    ):
        self.members, self.script = members, script or Script()
        self._joining = False  # whether all workers have agreed that newcomers may join
        c, params = config, tensors_of(params, "parameters")
        if c.compression.format == "auto":
            c = replace(c, compression=CompressionConfig())
        c.compression.check(params, None)
        make = functools.partial(self._kind, owner=self, members=members, script=self.script)
        args = CommonArgs(buffers=buffers, timeout=timeout, link=link, hooks=hooks)
        built = build_args(c, args, schedule, allreduce=make)
        if c.compression.format == "float32":
            built["reducer"] = CopyReducer
        self._build(params, c, schedule, **built)
        self._finite_buffers = [t.clone() for t in self._buffers]  # of the last average

    @torch.inference_mode(False)
    def join(self, found: Callable[[], None] = lambda: None) -> bool:
        """Joins the other workers and loads their state.

        Args:
            found: Makes or loads the first state. It is called on the first worker if no worker has any state.

        Returns:
            Whether other workers were training.

        Raises:
            Over: If the run has ended.
        """
        training, state = self._first_state(found)
        if state is not None:
            self.script.take(self, state)
        if training:
            self._take_part()
        return training

    def end(self, act: Callable[[], None] = lambda: None) -> None:
        """Ends the run after finish(). All workers wait for the first worker's `act`, or the next worker's."""
        while True:
            if self.allreduce.rank == 0:
                act()
            with contextlib.suppress(WorkersChanged):
                self.allreduce.sum_of_all(torch.zeros(1, device="cpu"))
                break
        self.members.end()
        self.close()

    def _first_state(self, found: Callable[[], None]) -> tuple[bool, dict[str, Any] | None]:
        """Meets the other workers. Returns whether they were training, and their state, None for the first worker."""
        while True:
            reports = self.allreduce.mend("empty")
            founding = all(r is None for r in reports)
            if founding and self.allreduce.rank == 0:
                found()
                self._serve(reports)
                return False, None
            with contextlib.suppress(RuntimeError):  # the worker that sends it was lost
                sender = next((rank for rank, report in enumerate(reports) if report is not None), 0)
                return not founding, self.members.receive(sender)

    @torch.no_grad()
    def _take_part(self) -> None:
        """Takes part in the current round, with zeros that do not count, and begins a round of its own."""
        self.allreduce.counts = False
        for fragment in self.fragments:
            fragment.lag = 0
            for outer_step in fragment.outer_steps:
                outer_step.restart()
                outer_step.take()
        self.local_steps = 0
        self._start_allreduce(finished=False)
        if self.config.delay == 0:
            self._merge()
        self._begin_round()  # the sender's state was of a closing round

    def _start_allreduce(self, *, finished: bool) -> None:
        """Does what CO2 does. Before, it forms a new generation if a worker has left, or if newcomers may join."""
        if self.allreduce.counts:  # a newcomer does not change the workers that it has just joined
            if self.members.left():
                self.allreduce.mend()
            if self._joining and not finished and self.script.may_join():
                self._let_join()
        super()._start_allreduce(finished=finished)

    def _wait_allreduce(self, *, finished: bool) -> ReduceResult:
        """Does what CO2 does. If no worker counts, the buffers become the buffers of the last average."""
        result, counts = super()._wait_allreduce(finished=finished), self._weight > 0
        self.allreduce.counts = True
        if self.allreduce.is_lost:
            self._is_last = False  # another round follows, also if only a fragment was lost
            return ReduceResult(is_last=False, is_empty=False)
        self._joining |= self.allreduce.asked
        if self._buffers and not self.fragment_index:
            copy_where(counts, self._finite_buffers, self._buffers)
            copy_where(~counts, self._buffers, self._finite_buffers)
        return result

    def _outer_step(self, *, arrived: bool = True, takes_difference: bool = True) -> None:
        """Does what CO2 does, without an average if the reduction is lost: x and m stay.

        If the pass takes no difference, the parameters stay, too. So the next difference has the lost one's progress.
        """
        lost = arrived and self.allreduce.is_lost
        if not lost or takes_difference:
            super()._outer_step(arrived=arrived and not lost, takes_difference=takes_difference)

    def _send_late_buffers(self) -> None:
        super()._send_late_buffers()
        while self.allreduce.is_lost:
            self._start_allreduce(finished=True)
            self._wait_allreduce(finished=False)  # writes all averages: these buffers are sent for the second time
            self._begin_round()

    def make_reducers(self) -> None:
        """Makes the reducers for the workers of a new generation, with zeros as error feedback."""
        for fragment in self.fragments:
            workers = self.allreduce.rank, self.allreduce.world_size
            fragment.reducer = self._make_reducer(fragment.parts, self.scalars, *workers)
        self.reducer = self._now.reducer

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
        if newcomers := [rank for rank, r in enumerate(reports) if r is None and rank != self.allreduce.rank]:
            self.members.send(self.script.give(self), newcomers)

    def _local_state(self) -> dict[str, Any]:
        """Returns the state for newcomers and checkpoints, without residuals, which are this worker's own."""
        state = super()._local_state()
        del state["residual"]
        return state

    def _load_local_state(self, state: dict[str, Any]) -> None:
        super()._load_local_state({name: held for name, held in state.items() if name != "residual"})
