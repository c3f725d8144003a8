"""What carries a reduction among workers that come and go: to its owner no reduction fails.

A reduction has two phases. Its sum is followed by an all-reduce of one number: a worker that has received the number
knows that all hold the sum, and only then is the sum merged. After a failure the survivors tell how far each is. If one
of them has merged the round, or all hold its sum, it counts, with what the dead worker sent; else each sends again,
from a copy, what it had sent, and the mean is over those left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets import copy
from ..comm import AsyncAllReduce, Stage, sum_flats
from ..errors import CollectiveError
from ..local_update import LocalUpdateMethod
from ..stats import AsyncReadback
from .members import AGREED, SENT, SUMMED, Came, Members, Report, WorkersChanged, agreed

MOST = 1024  # workers: checksums are so narrow that the sums over as many are exact
LOOK_EVERY = 0.2  # seconds between two looks whether another worker has left


class ElasticAllReduce(AsyncAllReduce):
    """Flight whose group may change under what is in flight. RANK and WORLD_SIZE, from the environment, are this
    worker's place among as many workers as there may be: who takes the place of a lost one has the same.

    members: see Members. options: of Flight.
    Attributes: owner, the method whose reductions these are, set by Joining; world_size, how many workers count in the
    reduction in flight; phase, of that reduction; counts, whether what this worker sends counts; asks, whether this
    worker asks to let newcomers in, and asked, whether any has with what landed last. To be set by the training script:
    tell, which returns what it reports to the others; on_change, called with all reports once another generation has
    begun.
    """

    owner: LocalUpdateMethod

    def __init__(self, device: torch.device, *, members: Members, **options: Any):
        assert not dist.is_initialized(), "the workers' groups are made and left here"
        super().__init__(device, **options)
        self.members = members
        self._act, self._act_phase = 0, AGREED  # the sum of a training script that is under way, or the last one
        self.tell: Callable[[], Report] = dict
        self.on_change: Callable[[list[Report | None]], None] = lambda reports: None
        self.place, self.places = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.most = MOST
        self.phase = AGREED
        self.counts = True
        self.asks = self.asked = False
        self._spared: tuple[int, int] = 0, 0  # of which reduction how many workers do not count
        self._kept: list[Tensor] = []  # what was sent, as it was
        self._looked_at = 0.0

    # -- what the owner calls ------------------------------------------------------------------------------------

    def launch(self, stages: Iterator[Stage]) -> None:
        """See AsyncAllReduce; keeps a copy of what is sent."""
        flats = self._flats
        for flat in flats if not self.counts else []:
            flat.zero_()
        self._kept = self._kept or [torch.empty_like(flat) for flat in flats]
        copy(self._kept, flats)
        try:
            super().launch(self.in_phases(stages))
        except CollectiveError:
            self.mend()

    def in_phases(self, stages: Iterator[Stage]) -> Iterator[Stage]:
        """The stages of the sum, beside the first of them who asks to let newcomers in; then the agreement."""
        assert self.group is not None
        self.phase = SENT
        asks, token = torch.tensor([float(self.asks)]), torch.zeros(1)  # in the host's memory, where nothing waits
        beside, few = sum_flats([asks], self.group)
        for works, sent in stages:
            yield [*works, *beside], sent + few
            beside, few = [], 0
        self.asked = asks.item() > 0
        self.phase = SUMMED
        yield sum_flats([token], self.group)
        self.phase = AGREED

    def done(self) -> bool:
        """See AsyncAllReduce; looks, too, whether another worker has left."""
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

    def drain(self) -> bool:
        while True:
            try:
                return super().drain()
            except CollectiveError:
                self.mend()

    def sum_of_all(self, values: Tensor) -> Tensor:
        """The sum over the workers, for the training script; all of them must call it.

        WorkersChanged on all that are left where one was lost and not all have the sum.
        """
        self._act, self._act_phase, total = self._act + 1, SENT, values.clone()
        reason = False
        try:
            dist.all_reduce(total)
            self._act_phase = SUMMED
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            reason = True
        if reason:  # out here, where no traceback keeps the group
            reports = self.mend()
            if not agreed(reports, "act", self._act):
                self._act, self._act_phase = self._act - 1, AGREED
                raise WorkersChanged
        self._act_phase = AGREED
        return total

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
                self._send_again()
                return reports
            except CollectiveError:
                continue

    def adopt(self, reports: list[Report | None]) -> None:
        """Takes the members' group for what is launched from now on."""
        assert self.members.group is not None
        self.group, self.rank = self.members.group, self.members.rank
        self.timed_groups = [self.group]
        self.owner._readback = (
            AsyncReadback()
        )  # on a GPU the next landing tells a newcomer nothing yet, so nobody else either
        known = [r for r in reports if r is not None]
        latest = max((r["launched"] for r in known), default=self.launched)
        self._act = max([self._act, *(r["act"] for r in known if r["act_phase"] == AGREED)])
        newcomers = len(reports) - len(known) if known else 0
        spared = sum(r["launched"] == latest and not r["counts"] for r in known)
        self._spared = (latest + 1, newcomers) if newcomers else (latest, spared)
        self.owner._generation += 1
        self.on_change(reports)

    def count(self, number: int) -> None:
        """Of the reduction of that number, from 1, which is sent in this generation: how many workers count in it."""
        self.world_size = self.members.size - (self._spared[1] if number == self._spared[0] else 0)
        self.owner._reducer.scale = 1 / self.world_size

    @property
    def _flats(self) -> list[Tensor]:
        return [bucket.flat for bucket in self.owner._buckets]

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

    close = leave = let_go

    def _report(self) -> Report:
        phase = self.phase if self.in_flight else AGREED
        mine = {"launched": self.launched, "launched_phase": phase, "counts": self.counts}
        return mine | {"act": self._act, "act_phase": self._act_phase} | self.tell()

    def _send_again(self) -> None:
        copy(self._flats, self._kept)
        self.count(self.launched)
        self._begin(self.in_phases(self.owner._stages()))

    def _failure(self, reason: str, what: str = "") -> CollectiveError:
        """See AsyncAllReduce; lets go of the group at once, or its other workers would wait for the timeout."""
        self.let_go()
        return CollectiveError(reason)
