"""An all-reduce among workers that come and go. It never fails for the method that uses it.

A reduction has two phases. First copies of the buckets are summed. Then an all-reduce of one number confirms the sum:
once a worker has received the number, all workers hold the sum. Only then is the sum merged.

After a failure the survivors report how far each of them is. If one survivor has merged the round, or all hold its sum,
the sum counts, with the dead worker's part. Otherwise each survivor sends its part again, and the average is over the
survivors.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import AsyncAllReduce, Stage, sum_flats
from ..errors import CollectiveError, UserError, env_number
from ..local_update import LocalUpdateMethod
from .members import AGREED, SENT, SUMMED, Came, Members, Report, WorkersChanged, agreed

MOST = 1024  # workers: checksums are narrow enough for exact sums over as many workers
LOOK_EVERY = 0.2  # seconds between two checks whether another worker has left
GRACE = 1.0  # seconds for a collective to end after that


class Script:
    """The part of a training script that elastic workers call. Override what your script has."""

    def give(self, method: LocalUpdateMethod) -> dict[str, Any]:
        """Returns the state that a newcomer needs, tensors and plain values."""
        return method.state_dict()

    def take(self, method: LocalUpdateMethod, state: dict[str, Any]) -> None:
        """Loads that state on the newcomer."""
        method.load_state_dict(state)

    def may_join(self) -> bool:
        """Returns whether newcomers may join at the boundary that is closing, equal on all workers."""
        return True

    def tell(self) -> Report:
        """Returns this worker's own report to the other workers of a new generation, JSON values."""
        return {}

    def on_change(self, reports: list[Report | None]) -> None:
        """A new generation has begun, with these reports by rank, None for a worker without state."""


class ElasticAllReduce(AsyncAllReduce):
    """An AsyncAllReduce whose process group may change while a reduction is in flight.

    The environment's RANK and WORLD_SIZE are this worker's place among the largest number of workers. A worker that
    replaces a lost one has the same place.

    Args:
        device: As for AsyncAllReduce.
        owner: The method that uses this all-reduce, whose `reducer` is an ElasticReducer.
        members: The worker's generation, see Members.
        script: See Script.
        **options: Other arguments of AsyncAllReduce.

    Attributes:
        world_size: Number of workers that count in the reduction in flight.
        phase: Phase of the reduction in flight.
        counts: Whether this worker's part counts.
        asked: Whether the last reduction that arrived has asked to let newcomers in.
    """

    is_elastic = True

    def __init__(self, device: torch.device, *, owner: Any, members: Members, script: Script, **options: Any):
        if dist.is_initialized():  # the workers' groups are made and left here
            raise UserError("elastic workers make their process groups themselves: leave out init_process_group()")
        super().__init__(device, **options)
        self.owner, self.members, self.script = owner, members, script
        self._act, self._act_phase = 0, AGREED  # the training script's current or last sum
        self.place, self.places = env_number("RANK", 0), env_number("WORLD_SIZE", 1)
        self.most = MOST
        self.phase = AGREED
        self.counts, self.asked = True, False
        self._spared: tuple[int, int] = 0, 0  # number of a reduction, and of the workers that do not count in it
        self._stuck: list[threading.Thread] = []  # they wait for collectives that were left to themselves
        self._looked_at = 0.0

    # -- for the owner -------------------------------------------------------------------------------------------

    def launch(self, stages: Iterator[Stage]) -> None:
        """Starts a reduction, as AsyncAllReduce does, of a copy of the buckets."""
        for sent in self.owner.reducer.live if not self.counts else []:
            sent.zero_()
        self._attempt(self.launched + 1)
        with contextlib.suppress(CollectiveError):
            return super().launch(self.in_phases(stages))
        self.mend()  # outside of `with`: an error's traceback would keep the group alive

    def in_phases(self, stages: Iterator[Stage]) -> Iterator[Stage]:
        """Yields the sum of newcomers' requests, the steps of the sum, then the confirmation.

        Only one collective is in flight at a time. gloo closes a group's connections only when all its collectives
        have ended. If one had failed while a second one waited for a peer, and that peer waited for the first one, both
        would wait until the timeout.
        """
        assert self.group is not None
        self.phase = SENT
        asks = torch.zeros(1, device="cpu")  # on the host, so that no GPU waits
        asks.fill_(self.rank == 0 and self.members.wanted())
        token = torch.zeros(1, device="cpu")
        yield sum_flats([asks], self.group)
        yield from stages
        self.asked = asks.item() > 0
        self.phase = SUMMED
        yield sum_flats([token], self.group)
        self._take_sum()

    def done(self) -> bool:
        """Returns whether the reduction is done, as AsyncAllReduce does. Also checks whether a worker has left."""
        with contextlib.suppress(CollectiveError):
            through = super().done()
            if not self._someone_left():
                return through
        self.mend()
        return False

    def drain(self) -> bool:
        while True:
            with contextlib.suppress(CollectiveError):
                return super().drain()
            self.mend()

    def sum_of_all(self, values: Tensor) -> Tensor:
        """Returns the sum over the workers, for the training script. All workers must call it.

        Raises:
            WorkersChanged: On all remaining workers, if a worker was lost and not all of them have the sum.
        """
        self._act, self._act_phase, total, arrived = self._act + 1, SENT, values.clone(), False

        def phases() -> Iterator[Stage]:
            assert self.group is not None
            yield sum_flats([total], self.group)
            self._act_phase = SUMMED
            yield sum_flats([torch.zeros(1, device="cpu")], self.group)

        with contextlib.suppress(CollectiveError):
            super().drain()  # one collective at a time, see in_phases
            of_round = self.bytes_sent, self.seconds
            self._begin(phases())
            self._end()
            self.bytes_sent, self.seconds = of_round
            arrived = True
        if not arrived and not agreed(self.mend(), "act", self._act):
            self._act, self._act_phase = self._act - 1, AGREED
            raise WorkersChanged
        self._act_phase = AGREED
        return total

    # -- another generation -----------------------------------------------------------------------------------

    def mend(self, came: Came = "failed") -> list[Report | None]:
        """Forms the next generation with the remaining workers, and completes or repeats the reduction in flight."""
        while True:
            self._drop()
            reports = self.members.meet(self._report(), came)
            self.adopt(reports)
            if not self.in_flight or self.phase == AGREED:
                return reports
            if agreed(reports, "launched", self.launched):
                self._take_sum()
                return reports
            self.owner.reducer.undo()
            self._attempt(self.launched)
            with contextlib.suppress(CollectiveError):
                self._begin(self.in_phases(self.owner.stages()))
                return reports

    def adopt(self, reports: list[Report | None]) -> None:
        """Uses the members' group for the reductions from now on."""
        assert self.members.group is not None
        self.group, self.rank = self.members.group, self.members.rank
        self.timed_groups = [self.group]
        known = [r for r in reports if r is not None]
        latest = max((r["launched"] for r in known), default=self.launched)
        self._act = max([self._act, *(r["act"] for r in known if r["act_phase"] == AGREED)])
        newcomers = len(reports) - len(known) if known else 0
        spared = sum(r["launched"] == latest and not r["counts"] for r in known)
        self._spared = (latest + 1, newcomers) if newcomers else (latest, spared)
        self.generation += 1
        self.owner.broadcasts_state = False  # workers may have asked for it in different generations
        self._changed(reports)

    def _changed(self, reports: list[Report | None]) -> None:
        self.script.on_change(reports)

    def _attempt(self, number: int) -> None:
        """Begins an attempt at the reduction of this number, counted from 1, with the workers that count in it."""
        self.world_size = self.members.size - (self._spared[1] if number == self._spared[0] else 0)
        self.owner.reducer.begin(self.rank, self.members.size, self.world_size)

    def _take_sum(self) -> None:
        self.phase = AGREED
        self.owner.reducer.deliver()

    def _someone_left(self) -> bool:
        """Returns whether another worker has left, and looks for it only now and then."""
        if time.monotonic() - self._looked_at < LOOK_EVERY:
            return False
        self._looked_at = time.monotonic()
        return self.members.left()

    def _end(self) -> None:
        """Does what AsyncAllReduce does, or raises CollectiveError if another worker has left meanwhile."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(LOOK_EVERY / 4)
            if self._someone_left():
                raise CollectiveError("a worker has left")
        super()._end()

    def _drop(self) -> None:
        """Leaves the group. The reduction in flight completes, fails, or is left to itself.

        gloo loses the error of a send to a worker that dies just as the send begins. The send ends at its timeout.
        """
        if (thread := self._thread) is not None:
            thread.join(GRACE)
            with self._lock:  # from here on the thread starts no stage
                if stuck := thread.is_alive():
                    self._thread = None
                    self._stuck.append(thread)
                    if self.phase == SENT:
                        self.owner.reducer.copies = []  # it may still write there
            if not stuck:
                with contextlib.suppress(CollectiveError):
                    super()._end()
            if self._side is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._side)
        self.let_go()

    def let_go(self) -> None:
        """Leaves the group, so that workers that wait for this one see a broken group."""
        stuck, self._stuck = self._stuck, []
        self.group, self.timed_groups = None, []
        self.members.leave(stuck)

    close = leave = let_go

    def _report(self) -> Report:
        phase = self.phase if self.in_flight else AGREED
        mine = {"launched": self.launched, "launched_phase": phase, "counts": self.counts}
        return mine | {"act": self._act, "act_phase": self._act_phase} | self.script.tell()

    def failure(self, reason: str, what: str = "") -> CollectiveError:
        """Returns the error, as AsyncAllReduce does. Leaves the group at once, so that no worker waits in vain."""
        self.let_go()
        return CollectiveError(reason)
