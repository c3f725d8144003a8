"""Choosing tau: the fewest local steps under which an all-reduce fits, and beside which a boundary's own work is small,
from times measured while training; with it whether a wider wire would do as well as a narrow one; and after how many
steps a mean that is merged on arrival is waited for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean, median
from typing import Any, Literal

from torch import Tensor

from .hooks import Hook, ReductionInfo
from .local_update import LocalUpdateMethod, SyncSchedule
from .stats import RoundStats, ready

CALIBRATION_TAU = 2  # local steps a round until the first decision; 4 led later to a loss that falls fast
WARM_UP = 1  # rounds whose numbers are left out: kernels are picked, connections opened
WINDOW = 5  # rounds over which medians are taken
COST = 0.05  # a boundary's own work, as a share of the local steps' time; 2 % and 10 % led later to a loss
SLACK = 0.25  # by how much the local steps after which a mean is waited for outlast the all-reduce
SETTLE = 4  # rounds after another wire is taken until its times are heard, at most
WAITS = 8  # rounds over which each worker takes the mean of how long it waited
NUMBERS = 4  # each worker tells seconds: of a step, the all-reduce, a boundary's own work, and waited for a mean
FLOAT32 = {"float32": 4.0}  # format -> bytes an element


@dataclass(frozen=True)
class TauDecision:
    """One change of tau, equal on all workers."""

    round: int
    old: int
    new: int
    step_seconds: float
    """A local step of the slowest worker."""
    allreduce_seconds: float
    """The all-reduce, from the last launch to its landing; over a wire that is tried, as its bytes let expect."""
    reason: str
    compression: str = "float32"
    """From this round on; tau follows once that wire's times are known."""

    @property
    def exposed_share(self) -> float:
        """Of the time, by the times above and with the new tau."""
        return max(0.0, 1 - self.new * self.step_seconds / self.allreduce_seconds)


def smallest_tau(allreduce_seconds: float, step_seconds: float, margin: float) -> int:
    """The smallest tau with tau x step_seconds >= (1 + margin) x allreduce_seconds; at least 1."""
    return max(1, math.ceil((1 + margin) * allreduce_seconds / step_seconds - 1e-9))


class TauTuner:
    """Decides tau on every worker alike, from numbers that all workers have received in the same all-reduce.

    Each worker writes its times into its own places among the scalars (`tell`), and decides by all workers' (`hear`).

    The slowest worker paces the rounds: the others wait for it whatever tau is. So a step counts as long as the
    slowest worker's, and the all-reduce as long as the worker saw that launched last, which is the shortest time seen.
    Both are medians over the last rounds. tau grows as soon as the all-reduce no longer fits; it shrinks only
    when a quarter fewer steps would do, so that noise does not move it.

    wires: format -> bytes an element, the first to begin with, each wider than the one before: on a slow link a trial
    of a wide one costs most. Where the next one's mean, by its bytes, would come within a local step, and so be fresh,
    or need no more steps, it is tried, once, and kept if that is so.

    margin: by how much the local steps should outlast the all-reduce. tau_max: never above. given: the
    user's tau, which holds; only the compression is chosen, and `needed`, where means are merged on arrival.
    Attributes: tau; wire, to be taken for what is sent next.
    """

    def __init__(
        self,
        tau_max: int,
        margin: float = 0.25,
        compressions: Mapping[str, float] = FLOAT32,
        *,
        given: int | None = None,
    ):
        self.given = given
        self.tau = given or min(CALIBRATION_TAU, tau_max)
        self.tau_max, self.margin = tau_max, margin
        self.compressions = compressions
        self.compression, *self._wider = compressions
        # while a wire is tried: the one before, the tau that it needs, and the seconds of its all-reduce
        self._before: tuple[str, int, float] | None = None
        self.decisions: list[TauDecision] = []
        self._heard = 0
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._allreduces: deque[float] = deque(maxlen=WINDOW)
        self._boundaries: deque[float] = deque(maxlen=WINDOW)
        self._told = [0.0] * NUMBERS  # this worker's last known ones
        self._more = 0  # steps of `needed` beyond what the link needs
        self._waits: list[float] = []  # of this worker, a number a round, since that was judged last
        self._judged = 0  # rounds heard since then

    @property
    def needed(self) -> int | None:
        """Local steps after its sending at which a worker waits for a mean; None: not known yet.

        By then the all-reduce of the worker that sent last is over, and who waits does not drift away from the slower
        ones. Where steps are uneven, now one worker's and then another's, that costs all of them time: if even the
        worker that waits least loses more than COST of it, so many steps are added. A slow one waits for nobody.
        """
        if self._allreduces:
            return smallest_tau(median(self._allreduces), median(self._steps), SLACK) + self._more
        if not self.decisions:
            return None
        last = self.decisions[-1]  # the compression has changed since
        return smallest_tau(last.allreduce_seconds, last.step_seconds, SLACK) + self._more

    def tell(self, stats: RoundStats, before: RoundStats, rank: int, places: Tensor) -> None:
        """Writes this worker's latest times to places, [NUMBERS x workers], where all others write 0.

        before: of the round before, whose boundary is over.
        """
        for known in (stats, before):  # a GPU has not passed this round's end yet where the host runs ahead of it
            if ready(known.step_seconds, known.allreduce_seconds) and float(known.step_seconds):
                self._told[:2] = float(known.step_seconds), float(known.allreduce_seconds)
                break
        if ready(before.boundary_seconds, before.merge_seconds, before.exposed_seconds):
            waited = float(before.exposed_seconds)
            self._told[2] = max(0.0, float(before.boundary_seconds) + float(before.merge_seconds) - waited)
            self._waits.append(waited if before.merged_after else 0.0)  # what an evaluation waits for is not counted
            self._told[3] = fmean(self._waits)
        places.zero_()
        for i, seconds in enumerate(self._told):
            places[NUMBERS * rank + i].fill_(seconds)

    def hear(
        self,
        round: int,
        step_seconds: Sequence[float],
        allreduce_seconds: Sequence[float],
        boundary_seconds: Sequence[float] = (0.0,),
        waited: Sequence[float] = (0.0,),
    ) -> TauDecision | None:
        """One round's times of every worker, 0 where one has none, and how long each waited in a round. Returns the
        first decision, and each change."""
        steps, allreduces = [s for s in step_seconds if s > 0], [a for a in allreduce_seconds if a > 0]
        if not steps or not allreduces:
            return None
        self._heard += 1
        if self._heard <= WARM_UP:
            return None
        self._steps.append(max(steps))
        self._allreduces.append(min(allreduces))
        self._boundaries.append(max(boundary_seconds))
        self._judged += 1
        if self._judged == WAITS:
            self._judge(min(waited))
        return self._decide(round) if self._heard > WARM_UP + 1 else None

    def _judge(self, waited: float) -> None:
        """waited: by the worker that waits least, in a round."""
        step = median(self._steps)
        share = waited / (self.tau * step)
        if share > COST and (self.needed or 0) < self.tau:  # else they wait at the boundary, for the link
            self._more += math.ceil(waited / step)
        elif share < COST / 4:
            self._more -= math.ceil(self._more / 4)
        self._judged = 0
        self._waits.clear()

    def _decide(self, round: int) -> TauDecision | None:
        step, allreduce = median(self._steps), median(self._allreduces)
        boundary = min(self._boundaries)  # what disturbs it only adds to it
        wanted = max(smallest_tau(allreduce, step, self.margin), smallest_tau(boundary / COST, step, 0.0))
        if change := self._another_wire(step, allreduce, wanted):
            tau, expected, why = change
            return self._decided(round, tau, step, expected, why)
        if self.given:
            return None
        new = min(wanted, self.tau_max)
        # half the margin may be used up
        least = max(smallest_tau(allreduce, step, self.margin / 2), smallest_tau(boundary / COST, step, -0.25))
        fits = self.tau >= least
        wasteful = new <= 0.75 * self.tau
        if self.decisions and (new == self.tau or (fits and not wasteful)):  # the first is always told
            return None
        return self._decided(round, new, step, allreduce, self._reason(step, allreduce, boundary, wanted))

    def _decided(self, round: int, new: int, step: float, allreduce: float, why: str) -> TauDecision:
        new = self.given or min(new, self.tau_max)
        decision = TauDecision(round, self.tau, new, step, allreduce, why, self.compression)
        self.tau = decision.new
        self.decisions.append(decision)
        return decision

    def _another_wire(self, step: float, allreduce: float, wanted: int) -> tuple[int, float, str] | None:
        """Returns, if the compression changes now, tau until its times are known, the all-reduce's expected time, and
        why. wanted: the tau that the present compression needs."""
        text = f"over {self.compression} the mean takes {allreduce:.4g} s and a local step {step:.4g} s"
        if self._before is not None:
            (narrow, tau, expected), self._before = self._before, None
            if allreduce <= step or wanted <= tau:
                return None
            why = f"{text}: {wanted} steps needed, over {narrow} {tau}, which is taken again"
            self.compression, self._wider = narrow, []
        elif self._wider:
            wider = self._wider[0]
            expected = allreduce * self.compressions[wider] / self.compressions[self.compression]
            tau = smallest_tau(expected, step, self.margin)
            if expected > step and tau > wanted:
                return None
            self._before, self.compression, self._wider = (self.compression, wanted, allreduce), wider, self._wider[1:]
            why = f"{text}: {self.compression} is tried"
        else:
            return None
        self._heard = -SETTLE
        for times in (self._steps, self._allreduces, self._boundaries):
            times.clear()
        return tau, expected, why

    def _reason(self, step: float, allreduce: float, boundary: float, wanted: int) -> str:
        text = f"the all-reduce takes {allreduce:.4g} s and a local step {step:.4g} s"
        if smallest_tau(allreduce, step, self.margin) < wanted <= self.tau_max:
            return f"{text}, a boundary's own work {boundary:.3g} s: {wanted} steps keep that at {COST:.0%}"
        if wanted <= self.tau_max:
            return f"{text}: {wanted} steps outlast it by {self.margin:.0%}"
        exposed = max(0.0, allreduce - self.tau_max * step)
        return f"{text}: {wanted} steps would outlast it, tau_max={self.tau_max} leaves {exposed:.3g} s a round exposed"

    def state_dict(self) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "heard": self._heard,
            "decisions": [astuple(d) for d in self.decisions],
            "steps": list(self._steps),
            "allreduces": list(self._allreduces),
            "boundaries": list(self._boundaries),
            "compression": (self.compression, list(self._wider), self._before),
            "waits": (self._more, list(self._waits), self._judged),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of a tuner with other wires nothing holds; of one that chose tau, its tau does not where one is given."""
        compression, wider, narrow = state["compression"]
        if not {compression, *wider, *(narrow or ())[:1]} <= self.compressions.keys():
            return
        self.tau, self._heard = self.given or state["tau"], state["heard"]
        self.decisions = [TauDecision(*d) for d in state["decisions"]]
        self._steps = deque(state["steps"], maxlen=WINDOW)
        self._allreduces = deque(state["allreduces"], maxlen=WINDOW)
        self._boundaries = deque(state["boundaries"], maxlen=WINDOW)
        self.compression, self._wider, self._before = compression, list(wider), narrow
        self._more, self._waits, self._judged = state.get("waits", (0, [], 0))


class TauHook(Hook):
    """The workers' times, from which all choose tau, the compression and when to wait alike.

    Attributes:
        decision: Taken at the last boundary, or None.
        chooses: Whether tau is chosen, not given.
    """

    name, per_worker_scalars = "tau", {"times": NUMBERS}

    def __init__(self, tuner: TauTuner):
        self.tuner, self.chooses = tuner, tuner.given is None
        self.decision: TauDecision | None = None
        self._decided: TauDecision | None = None  # takes effect at the round's end

    def before_allreduce(self) -> None:
        m = self.method
        self.tuner.tell(m._clock.stats, m._clock.before, m._allreduce.place, m._scalars["times"])
        m._reducer.become(self.tuner.compression)  # chosen from what has arrived, so equal on all workers

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        times = [t * info.workers / info.total_world_size for t in sums["times"]]  # the ranks of a node share a place
        step, allreduce, boundary, waited = (times[0::NUMBERS], times[1::NUMBERS], times[2::NUMBERS], times[3::NUMBERS])
        self._decided = self.tuner.hear(self.method._allreduce.launched, step, allreduce, boundary, waited)

    def on_round_end(self) -> None:
        self.decision, self._decided = self._decided, None

    def state_dict(self) -> Any:
        return self.tuner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.tuner.load_state_dict(state)


class AdaptiveTau(SyncSchedule):
    """Follows CO2Config's tau and delay.

    Args:
        tau: From a round's number to its local steps.
        delay: See CO2Config.
        tau_hook: Receives the workers' times. None if nothing is chosen from them.
    """

    def __init__(
        self,
        tau: Callable[[int], int],
        delay: int | Literal["boundary", "auto"] = "boundary",
        tau_hook: TauHook | None = None,
    ):
        self.delay, self.tau_hook = delay, tau_hook
        super().__init__(tau)

    @property
    def decision(self) -> TauDecision | None:
        """Taken by tau auto at the last boundary, or None."""
        return self.tau_hook.decision if self.tau_hook is not None else None

    def begin(self, number: int) -> None:
        if self.tau_hook is not None and self.tau_hook.chooses:
            self.tau = self.tau_hook.tuner.tau
            return
        super().begin(number)
        if self.tau_hook is not None:
            self.tau_hook.tuner.given = self.tau_hook.tuner.tau = self.tau

    def merges(self, method: LocalUpdateMethod) -> bool:
        if self.delay != "auto":
            return method._local_steps == self.delay
        due = self.tau_hook is not None and method._local_steps == self.tau_hook.tuner.needed
        return method._allreduce.landed() or due
