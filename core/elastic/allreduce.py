"""An all-reduce among workers that come and go. It never fails for the method that uses it.

A reduction has two phases. First the buckets are summed. Then an all-reduce of one number confirms the sum: once a
worker has received the number, all workers hold the sum. Only then is the sum merged.

After a failure the survivors report how far each of them is. If one survivor has merged the round, or all hold its sum,
the sum counts, with the dead worker's part. Otherwise the reduction is lost, on all survivors: it changes nothing.
The training script's own sums do the same. The two kinds are counted apart.
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

from ..buckets import copy
from ..comm import AsyncAllReduce, Reducer, Stage, sum_flats
from ..errors import CollectiveError, UserError, env_number
from ..local_update import LocalUpdateMethod
from .members import AGREED, SENT, SUMMED, Came, Members, Report, WorkersChanged, agreed

KINDS: tuple[str, ...] = ("launched", "summed")  # of reductions: the method's, and the training script's
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


class CopyReducer(Reducer):
    """Sums copies of the buckets, because a collective that is left to itself may still write to what it sums."""

    def of_bucket(self, i: int, group: dist.ProcessGroup | None, number: int, turn: int) -> Iterator[Stage]:  # noqa: ARG002
        if group is not None:
            sent = self.buckets[i].sent()
            copies = [flat.clone() for flat in sent]
            yield sum_flats(copies, group)
            copy(sent, copies)


class ElasticAllReduce(AsyncAllReduce):
    """An AsyncAllReduce whose process group may change while a reduction is in flight.

    The environment's RANK and WORLD_SIZE are this worker's place among the largest number of workers. A worker that
    replaces a lost one has the same place.

    Args:
        device: As for AsyncAllReduce.
        owner: The method that uses this all-reduce.
        members: The worker's generation, see Members.
        script: See Script.
        **options: Other arguments of AsyncAllReduce.

    Attributes:
        world_size: Number of workers in the reduction that started last.
        summed: Number of the training script's sums.
        lost: Numbers of the reductions that were lost, counted from 1, by kind, a key of a report. A worker that is
            late has yet to start them.
        counts: Whether this worker's part counts.
        asked: Whether the last reduction that arrived has asked to let newcomers in.
    """

    is_elastic = True

    def __init__(self, device: torch.device, *, owner: Any, members: Members, script: Script, **options: Any):
        if dist.is_initialized():  # the workers' groups are made and left here
            raise UserError("elastic workers make their process groups themselves: leave out init_process_group()")
        super().__init__(device, **options)
        self.owner, self.members, self.script = owner, members, script
        self.place, self.places = env_number("RANK", 0), env_number("WORLD_SIZE", 1)
        self.most = MOST
        self.summed = 0
        self.lost, self._phases = {kind: set[int]() for kind in KINDS}, dict.fromkeys(KINDS, AGREED)
        self.counts, self.asked = True, False
        self._made_for = 0  # the generation whose number of workers the reducers have
        self._stuck: list[threading.Thread] = []  # they wait for collectives that were left to themselves
        self._looked_at = 0.0

    # -- for the owner -------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the reduction that started last is lost."""
        return self.launched in self.lost["launched"]

    def launch(self, stages: Iterator[Stage]) -> None:
        """Starts a reduction, as AsyncAllReduce does, unless other workers have lost it already."""
        if not self.counts:
            self.owner.exclude(torch.ones_like(self.owner.scalars["weight"], dtype=torch.bool))
        if self._made_for != self.generation:
            self._made_for, self.world_size = self.generation, self.members.size
            self.owner.make_reducers()
        with contextlib.suppress(CollectiveError):
            return super().launch(iter(()) if self.launched + 1 in self.lost["launched"] else self.in_phases(stages))
        self.mend()  # outside of `with`: an error's traceback would keep the group alive

    def in_phases(self, stages: Iterator[Stage]) -> Iterator[Stage]:
        """Returns the steps of the sum, behind the sum of newcomers' requests, and the confirmation."""

        def asking() -> Iterator[Stage]:
            assert self.group is not None
            asks = torch.zeros(1, device="cpu")  # on the host, so that no GPU waits
            asks.fill_(self.rank == 0 and self.members.wanted())
            yield sum_flats([asks], self.group)
            yield from stages
            self.asked = asks.item() > 0

        return self._confirmed("launched", asking())

    def _confirmed(self, kind: str, stages: Iterator[Stage]) -> Iterator[Stage]:
        """Yields the steps of a sum, then the confirmation.

        Only one collective is in flight at a time. gloo closes a group's connections only when all its collectives
        have ended. If one had failed while a second one waited for a peer, and that peer waited for the first one, both
        would wait until the timeout.
        """
        assert self.group is not None
        self._phases[kind] = SENT
        yield from stages
        self._phases[kind] = SUMMED
        yield sum_flats([torch.zeros(1, device="cpu")], self.group)
        self._phases[kind] = AGREED
        self.members.sending.clear()  # newcomers take part once they have received it

    def done(self) -> bool:
        """Returns whether the reduction is done, as AsyncAllReduce does. Also checks whether a worker has left."""
        with contextlib.suppress(CollectiveError):
            through = super().done()
            if not self._someone_left():
                return through
        self.mend()
        return False

    def drain(self) -> bool:
        """Does what AsyncAllReduce does. The buckets then hold the sums, or zeros if the reduction is lost."""
        while True:
            with contextlib.suppress(CollectiveError):
                if there := super().drain():
                    for bucket in self.owner.reducer.buckets if self.is_lost else ():
                        bucket.payload.zero_()
                        bucket.rest.zero_()
                return there
            self.mend()

    def sum_of_all(self, values: Tensor) -> Tensor:
        """Returns the sum over the workers, for the training script. All workers must call it.

        Raises:
            WorkersChanged: On all remaining workers, if a worker was lost and not all of them have the sum.
        """
        self.summed, self._phases["summed"], total = self.summed + 1, SENT, values.clone()
        if self.summed not in self.lost["summed"] and not self._sums(total):
            self.mend()
        if self.summed in self.lost["summed"]:
            raise WorkersChanged
        return total

    def _sums(self, total: Tensor) -> bool:
        """Sums a tensor in place. Returns False if a worker was lost meanwhile."""

        def stages() -> Iterator[Stage]:
            assert self.group is not None
            yield sum_flats([total], self.group)

        with contextlib.suppress(CollectiveError):
            super().drain()  # one collective at a time, see _confirmed
            of_round = self.bytes_sent, self.seconds
            self._begin(self._confirmed("summed", stages()))
            self._end()
            self.bytes_sent, self.seconds = of_round
            return True
        return False

    # -- another generation -----------------------------------------------------------------------------------

    def mend(self, came: Came = "failed") -> list[Report | None]:
        """Forms the next generation with the remaining workers, and returns their reports by rank.

        All workers find alike whether the reduction in flight counts or is lost.
        """
        self._drop()
        mine = None
        if came != "empty":
            phases = {f"{kind}_phase": phase for kind, phase in self._phases.items()}
            mine = {"launched": self.launched, "summed": self.summed} | phases | self.script.tell()
        reports = self.members.meet(mine, came)
        assert self.members.group is not None
        self.group, self.rank = self.members.group, self.members.rank
        self.timed_groups = [self.group]
        known = [r for r in reports if r is not None]
        for kind in KINDS:
            latest = max((r[kind] for r in known), default=0)
            if not agreed(reports, kind, latest):
                self.lost[kind].add(latest)
            self._phases[kind] = AGREED
            if kind == "summed" and reports[self.rank] is None:
                self.summed = latest
        self.generation += 1
        self.owner.broadcasts_state = False  # workers may have asked for it in different generations
        self._changed(reports)
        return reports

    def _changed(self, reports: list[Report | None]) -> None:
        self.script.on_change(reports)

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

    def failure(self, reason: str, what: str = "") -> CollectiveError:
        """Returns the error, as AsyncAllReduce does. Leaves the group at once, so that no worker waits in vain."""
        self.let_go()
        return CollectiveError(reason)
