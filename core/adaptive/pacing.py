"""Rounds whose length follows from what is measured: tau auto, steps by speed, and a mean that does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from ..config import is_number
from ..errors import UserError
from ..flight import Flight
from ..held import Held
from ..pacing import Pacing
from .pace import BySpeed
from .tau import TauDecision, Tuned


class Adaptive(Pacing):
    """delay: when a mean is merged, see AdaptiveConfig. tuned, by_speed: the riders that hear the workers' times; None
    where they are not needed.

    Attributes: own, the local steps of this worker in the round that runs: tau, or fewer where it is slower; more,
    once, where tau auto has led the workers apart. skipped, local steps of the round that closed last which this worker
    has left out, being slower: its data and learning rate may then keep step with the others'. skip_after, to be set
    before the first step: seconds that a boundary waits for a mean (with delay auto once more in mid-round, see
    TauTuner.needed), None for as long as it takes. A round whose predecessor's mean does not come, as when a link is
    down, goes on for tau local steps more, and so on: nothing is thrown away, nor sent before it has come. Each worker
    decides by itself, for the outer state follows from the means alone, whenever they are merged. Workers come in
    unlike rounds to collectives of the caller's own: these go over groups.host_group.
    """

    def __init__(
        self,
        tau: Callable[[int], int],
        delay: int | Literal["boundary", "auto"] = "boundary",
        *,
        tuned: Tuned | None = None,
        by_speed: BySpeed | None = None,
    ):
        self.delay, self.tuned, self.by_speed = delay, tuned, by_speed
        self._skip_after: float | None = None
        self.skipped = self._sparing = 0
        super().__init__(tau)

    @property
    def skip_after(self) -> float | None:
        return self._skip_after

    @skip_after.setter
    def skip_after(self, seconds: float | None) -> None:
        if seconds is not None and not (is_number(seconds) and seconds >= 0):
            raise UserError(f"skip_after={seconds!r}: give seconds, 0 or more, or None to wait as long as it takes")
        if seconds is not None and self.tuned is not None and self.tuned.chooses:
            raise UserError("skip_after with tau='auto', which needs rounds of known lengths: give tau a number")
        if seconds is not None and self.by_speed is not None:
            raise UserError("skip_after with steps='by_speed', whose rounds have unlike lengths: leave one of them out")
        self._skip_after = seconds

    @property
    def together(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See Pacing. With steps by speed a method's at_boundary is the same on all workers after calls of their own.
        With skip_after it is False while a reduction is in flight: from the first boundary until finish() where a mean
        is merged at the next one."""
        return self.skip_after is None and not self.apart

    @property
    def apart(self) -> bool:
        """Whether the round that closed last did so at unlike steps of the workers, the same on all: in the first
        rounds of tau auto where means are merged on arrival. Evaluate, save and stop when it is False."""
        return self.tuned is not None and self.tuned.tuner.apart

    @property
    def decision(self) -> TauDecision | None:
        """Taken by tau auto at the last boundary, if any was."""
        return self.tuned.decision if self.tuned is not None else None

    def begin(self, number: int, taken: int = 0) -> None:
        if self.tuned is not None and self.tuned.chooses:
            self.tau = self.tuned.tuner.tau
        else:
            super().begin(number)
            if self.tuned is not None:
                self.tuned.tuner.given = self.tuned.tuner.tau = self.tau
        lead = self.tuned.lead if self.tuned is not None else 0
        part = self.by_speed.steps(self.tau) if self.by_speed is not None else self.tau
        self.skipped, self._sparing = self._sparing, self.tau - part
        self.own = part + lead
        self._spans = taken // self.own + 1  # each of `own` local steps, that the round has

    def closes(self, method: Held, *, last: bool) -> bool:
        """See Pacing. A mean that is due in mid-round is merged here."""
        taken = method.local_steps
        if taken >= self._spans * self.own:
            if last or not self._is_late(method):
                return True
            self._spans += 1
        elif method.flight.in_flight and self._arrives(taken, method.flight) and not self._is_late(method):
            merge_early(method)
        return False

    def check_saving(self, method: Held) -> None:
        """Refuses while workers are apart, but after finish(): their states are of unlike steps."""
        if self.apart and method.rounds and (method.local_steps or method.flight.in_flight):
            raise UserError(
                f"state_dict() after round {method.rounds - 1}, which workers closed at unlike steps, as they do until "
                "tau auto has chosen: save at a boundary where pacing.apart is False, or after finish()"
            )

    def _arrives(self, taken: int, flight: Flight) -> bool:
        if self.delay == "auto":
            return flight.landed() or (self.tuned is not None and taken == self.tuned.tuner.needed)
        return taken == self.delay != self.tau  # else it is merged at the boundary

    def _is_late(self, method: Held) -> bool:
        """Whether what is in flight does not come within `skip_after` seconds; or is not there while tau auto tries and
        a longer round would not be above its tau_max."""
        tuner = self.tuned.tuner if self.tuned is not None else None
        goes_on = tuner is not None and tuner.free and (self._spans + 1) * self.own <= tuner.tau_max
        patience = 0.0 if goes_on else self.skip_after
        if patience is None or not method.flight.in_flight:
            return False
        began = time.perf_counter()
        late = not lands_within(method.flight, patience)
        method.clock.pause(time.perf_counter() - began)
        return late


@torch.inference_mode(False)
@torch.no_grad()
def merge_early(method: Any) -> None:
    """Merges in mid-round the mean that is in flight. method: one with `merge`, as OnArrival."""
    with method.clock.early_merge(method.local_steps):
        method.merge()
        method.moved(at_boundary=False)


def lands_within(flight: Flight, seconds: float) -> bool:
    """Waits so long for what is in flight to land, at most, which counts as exposed; returns whether it has."""
    until = time.perf_counter() + seconds
    while not flight.landed():
        if (left := until - time.perf_counter()) <= 0:
            return False
        with flight.counted():
            time.sleep(min(left, 1e-3))
    return True
