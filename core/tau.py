"""When a round ends: after a given tau, or after one that is chosen from times measured during training.

The chosen tau is the fewest local steps that hide an all-reduce. With fragments auto, an all-reduce that takes longer
than LATE local steps is cut into as many parts. tau then leaves little more time than the link needs, because parts are
fresh wherever they arrive in a round. With compression auto, TauTuner also tests whether a format with more bytes per
element is as fast.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any

from torch import Tensor

from .errors import UserError, log
from .hooks import Hook, ReductionInfo
from .stats import RoundStats, ready

CALIBRATION_TAU = 2  # local steps per round until the first times; 4 took longer to a loss that falls fast
WARM_UP = 1  # rounds that do not count: kernels are selected and connections opened
WINDOW = 5  # rounds in each median
COST = 0.05  # maximum of a boundary's own work over the local steps' time; 2 % and 10 % took longer to a loss
SETTLE = 4  # rounds at most between a change of compression and the arrival of its times
NUMBERS = 3  # seconds that each worker sends: local step, all-reduce, boundary's own work
LATE = 1.25  # with fragments auto, local steps that a fragment's all-reduce takes
MOST = 8  # fragments at most
CUT_MARGIN = 0.15  # with several fragments, the local steps exceed the round's all-reduces by this share
VOTED = 3  # on nodes, further local steps of a round, for the votes of its fragments (AsyncAllReduce.arrived)
FLOAT32 = {"float32": 4.0}  # format -> bytes per element
SAVED = ("tau", "fragments", "compression", "_received", "_untested", "_previous")


class SyncSchedule:
    """Decides when a round ends.

    Args:
        tau: Local steps per round, or a function from a round's number to them.

    Attributes:
        tau: Local steps of the current round.
        chooses: Whether tau follows from measured times, not from the user.
        fragments: In how many fragments the next round's all-reduces follow each other. None if that stays as it is.
    """

    tau: int
    fragments: int | None = None
    chooses = False

    def __init__(self, tau: Any):
        self._given = tau
        self.begin(0)

    def begin(self, number: int) -> None:
        """Round `number` begins, counted from 0."""
        tau: Any = self._given(number) if callable(self._given) else self._given
        if not isinstance(tau, int) or tau < 1:
            raise UserError(f"tau={tau!r}: give a whole number of local steps, 1 or more")
        self.tau = tau


@dataclass(frozen=True)
class TauDecision:
    """One decision about tau and the compression. All workers take it in the same round."""

    round: int
    old: int
    new: int
    step_seconds: float
    """Time of a local step on the slowest worker."""
    allreduce_seconds: float
    """From the last worker's launch to the arrival. For a compression under test, the time expected from its bytes."""
    reason: str
    compression: str = "float32"
    """Compression from this round on. tau changes once the times of the new compression are known."""
    fragments: int = 1

    @property
    def exposed_share(self) -> float:
        """Fraction of the time in which communication is exposed, with the new tau."""
        return max(0.0, 1 - self.new * self.step_seconds / self.allreduce_seconds)


def smallest_tau(allreduce_seconds: float, step_seconds: float, margin: float) -> int:
    """Returns the smallest tau >= 1 with tau * step_seconds >= (1 + margin) * allreduce_seconds."""
    return max(1, math.ceil((1 + margin) * allreduce_seconds / step_seconds - 1e-9))


class TauTuner:
    """Decides tau alike on every worker, because all workers decide from the same all-reduced times.

    Each worker writes its times to its own places among the scalars (`write_times`). The decision uses the times of all
    workers (`receive`). The slowest worker sets the pace, because the other workers wait for it with any tau. Hence a
    local step takes as long as on the slowest worker. The all-reduce takes as long as the last worker to launch it
    measures, which is the shortest time. Both are medians over the last rounds.

    tau grows as soon as the all-reduce no longer fits into the local steps. It shrinks only if a quarter fewer steps
    suffice, so that noise does not change it.

    With several compressions, the first is used at the beginning. The next one is tested once if, by its bytes, its
    average would arrive within one local step or need no more steps. It is kept if the measured times confirm that.

    Args:
        tau_max: Largest tau.
        margin: The local steps take this share longer than the all-reduce.
        compressions: Format -> bytes per element, in ascending order, because a test of many bytes costs most on a slow
            network.
        given: The user's tau, which does not change. Only the compression and the fragments are chosen then.
        cuts: Whether the number of fragments is chosen.

    Attributes:
        tau: Local steps per round.
        compression: Format of the next all-reduce.
        fragments: Fragments from the next round on.
        vote: Local steps from an arrival until the ranks of a node merge together: 1 on nodes.
        decisions: All decisions so far.
    """

    def __init__(
        self,
        tau_max: int,
        margin: float = 0.25,
        compressions: Mapping[str, float] = FLOAT32,
        *,
        given: int | None = None,
        cuts: bool = False,
    ):
        self.given, self.cuts, self.fragments, self.vote = given, cuts, 1, 0
        self.tau = given or min(CALIBRATION_TAU, tau_max)
        self.tau_max, self.margin = tau_max, margin
        self.compressions, self.compression = compressions, next(iter(compressions))
        self.decisions: list[TauDecision] = []
        self.measure_again()

    def measure_again(self) -> None:
        """Forgets all times, and tests the other compressions again. tau and the compression stay until then."""
        self._untested = [other for other in self.compressions if other != self.compression]
        # during a test: the previous compression, the tau that it needs, and its all-reduce time in seconds
        self._previous: tuple[str, int, float] | None = None
        self._received = 0  # rounds whose times have arrived; negative after a change of compression
        # seconds of a local step, an all-reduce and a boundary in each of the last rounds
        self._times = deque[tuple[float, float, float]](maxlen=WINDOW)
        self._own_times = [0.0] * NUMBERS  # this worker's latest times

    def follow(self, tau: int) -> None:
        """A round begins with a tau that the user has given."""
        self.given = self.tau = tau

    def write_times(self, stats: RoundStats, before: RoundStats, rank: int, places: Tensor) -> None:
        """Writes this worker's latest times to its `places`, [NUMBERS * workers]. Other workers write 0 there.

        `stats` belong to the round that is closing, `before` to the previous round, whose boundary is complete.
        """
        for known in (stats, before):  # if the host is ahead of the GPU, this round's times are not ready
            if ready(known.step_seconds, known.allreduce_seconds) and float(known.step_seconds):
                self._own_times[:2] = float(known.step_seconds), float(known.allreduce_seconds)
                break
        if ready(before.boundary_seconds, before.merge_seconds, before.exposed_seconds):
            own = float(before.boundary_seconds) + float(before.merge_seconds) - float(before.exposed_seconds)
            self._own_times[2] = max(0.0, own)
        places.zero_()
        for i, seconds in enumerate(self._own_times):
            places[NUMBERS * rank + i].fill_(seconds)

    def receive(
        self,
        round: int,
        step_seconds: Sequence[float],
        allreduce_seconds: Sequence[float],
        boundary_seconds: Sequence[float] = (0.0,),
    ) -> TauDecision | None:
        """Receives one round's times of every worker, in seconds, 0 if a worker has none yet.

        Args:
            round: Number of the round.
            step_seconds: One local step.
            allreduce_seconds: The all-reduce.
            boundary_seconds: A boundary's own work.

        Returns:
            The first decision and each change, otherwise None.
        """
        steps, allreduces = [s for s in step_seconds if s > 0], [a for a in allreduce_seconds if a > 0]
        if not steps or not allreduces:
            return None
        self._received += 1
        if self._received <= WARM_UP:
            return self._first_guess(round, max(steps), min(allreduces))
        self._times.append((max(steps), min(allreduces), max(boundary_seconds)))
        return self._decide(round) if self._received > WARM_UP + 1 else None

    def _first_guess(self, round: int, step: float, allreduce: float) -> TauDecision | None:
        """Raises tau from the first times of a run, because each round of CALIBRATION_TAU steps waits for the network.

        Later decisions do not use these times, which may include a warm-up.
        """
        required = smallest_tau(allreduce, step, self._margin(step, allreduce))
        if self.given or self.decisions or required <= self.tau:
            return None
        return self._decided(round, required, step, allreduce)

    def _decide(self, round: int) -> TauDecision | None:
        """Returns a change of the compression or of tau, if the medians call for one."""
        steps, allreduces, boundaries = zip(*self._times, strict=True)
        step, allreduce, boundary = median(steps), median(allreduces), min(boundaries)  # disturbances only lengthen it
        margin = self._margin(step, allreduce)
        required = max(smallest_tau(allreduce, step, margin), smallest_tau(boundary / COST, step, 0.0))
        if change := self._change_compression(step, allreduce, required):
            tau, expected, why = change
            return self._decided(round, tau, step, expected, why=why)
        new = self.given or min(required, self.tau_max)
        wanted = self._wanted(step, allreduce, new)
        misfits = not wanted / 1.5 <= self.fragments <= 2 * wanted or (wanted == 1) != (self.fragments == 1)
        # tau stays until half of the margin is used up
        least = max(smallest_tau(allreduce, step, margin / 2), smallest_tau(boundary / COST, step, -0.25))
        stays = new == self.tau or (self.tau >= least and new > 0.75 * self.tau)
        if stays and not misfits and (self.decisions or self.given):  # else the first decision is always reported
            return None
        return self._decided(round, required, step, allreduce, boundary)

    def _margin(self, step: float, allreduce: float) -> float:
        """Returns the share by which the local steps exceed the all-reduce."""
        cut = CUT_MARGIN + (1 + VOTED * self.vote) * step / allreduce  # one step because fragments last whole steps
        return cut if self.cuts and allreduce > LATE * step else self.margin

    def _wanted(self, step: float, allreduce: float, tau: int) -> int:
        """Returns the number of fragments for these times: as many as follow each other within tau local steps.

        A fragment is merged, and the next one starts, after a whole number of local steps.
        """
        most = min(math.ceil(allreduce / (LATE * step)), MOST, tau) if self.cuts else 1
        steps = (1 + CUT_MARGIN) * allreduce / step
        fit = (n for n in range(most, 1, -1) if n * (math.ceil(steps / n - 1e-9) + self.vote) <= tau)
        return next(fit, 1)

    def _decided(
        self, round: int, required: int, step: float, allreduce: float, boundary: float = 0.0, why: str = ""
    ) -> TauDecision:
        """Records a decision, and applies it."""
        why, old = why or self._reason(step, allreduce, boundary, required), self.tau
        self.tau = self.given or min(required, self.tau_max)
        self.fragments = self._wanted(step, allreduce, self.tau)
        settings = self.compression, self.fragments
        self.decisions.append(TauDecision(round, old, self.tau, step, allreduce, why, *settings))
        return self.decisions[-1]

    def _change_compression(self, step: float, allreduce: float, required: int) -> tuple[int, float, str] | None:
        """Starts or ends the test of a compression if it is time. The present one needs `required` local steps.

        It returns tau until the new times arrive, the expected all-reduce time, and the reason. None: the compression
        stays.
        """
        text = f"with {self.compression} the all-reduce takes {allreduce:.4g} s and a local step {step:.4g} s"
        if self._previous is not None:
            (previous, tau, expected), self._previous = self._previous, None
            if allreduce <= step or required <= tau:
                return None
            why = f"{text}: it needs {required} steps, and {previous} needs {tau}, so {previous} is used again"
            self.compression, self._untested = previous, []
        elif self._untested:
            candidate = self._untested[0]
            expected = allreduce * self.compressions[candidate] / self.compressions[self.compression]
            tau = smallest_tau(expected, step, self._margin(step, expected))
            if expected > step and tau > required:
                return None
            self._previous = self.compression, required, allreduce
            self.compression, self._untested = candidate, self._untested[1:]
            why = f"{text}: {self.compression} is tested"
        else:
            return None
        self._received = -SETTLE
        self._times.clear()
        return tau, expected, why

    def _reason(self, step: float, allreduce: float, boundary: float, required: int) -> str:
        """Explains a choice of tau in one line, in words for the log."""
        text = f"the all-reduce takes {allreduce:.4g} s and a local step {step:.4g} s"
        margin, most = self._margin(step, allreduce), self.given or self.tau_max
        if smallest_tau(allreduce, step, margin) < required <= most:
            return f"{text}, a boundary's own work {boundary:.3g} s: {required} steps keep that at {COST:.0%}"
        if required <= most:
            return f"{text}: {required} steps outlast it by {margin:.0%}"
        exposed = max(0.0, allreduce - most * step)
        limit = f"{'tau' if self.given else 'tau_max'}={most} leaves {exposed:.3g} s a round exposed"
        return f"{text}: {required} steps would outlast it, {limit}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        lists = {"_times": [*self._times], "decisions": [astuple(d) for d in self.decisions]}
        return {name: getattr(self, name) for name in SAVED} | lists

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned.

        A state with compressions that this tuner does not have is ignored. A tau that the user has given replaces the
        checkpoint's tau.
        """
        if missing := [name for name in SAVED if name not in state]:
            raise UserError(
                f"the checkpoint's automatic tau has no {missing[0]!r}, so an older version wrote it: resume with that "
                "version, or start afresh"
            )
        used = {state["compression"], *state["_untested"], *(state["_previous"] or ())[:1]}
        if not used <= self.compressions.keys():
            return
        vars(self).update({name: state[name] for name in SAVED})
        self.tau, self.fragments = self.given or min(self.tau, self.tau_max), self.fragments if self.cuts else 1
        self.decisions = [TauDecision(*d) for d in state["decisions"]]
        self._times = deque(state["_times"], WINDOW)


class AdaptiveTau(SyncSchedule, Hook):
    """Exchanges the workers' times, lets TauTuner decide, and applies the decisions.

    Args:
        tau: See SyncSchedule. It is not used if the tuner chooses tau.
        tuner: Decides from the times.

    Attributes:
        decision: The decision of the last boundary, or None.
    """

    name, per_worker_scalars = "tau", {"times": NUMBERS}

    def __init__(self, tau: int | str | Callable[[int], Any], tuner: TauTuner):
        self.tuner, self.chooses = tuner, tuner.given is None
        self.decision: TauDecision | None = None
        self._decided: TauDecision | None = None  # takes effect at the end of the round
        self._timed: list[bool] = []  # elastic: at each place, whether the last sums had a worker's times
        super().__init__(tau)

    # -- as a hook ---------------------------------------------------------------------------------------------

    def attach(self, method: Any) -> None:
        super().attach(method)
        self.tuner.vote = int(method.node.group is not None or method.allreduce.votes)

    def before_allreduce(self) -> None:
        m = self.method
        self.tuner.write_times(m.clock.stats, m.clock.before, m.allreduce.place, m.scalars["times"])
        if m.rounds <= m.timed_from:  # these times are of a round with all buffers
            m.scalars["times"].zero_()
        m.reducer.become(self.tuner.compression)  # follows from received times, so it is equal on all workers

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        times = [t * info.workers / info.total_world_size for t in sums["times"]]  # the ranks of a node share a place
        step, allreduce, boundary = (times[i::NUMBERS] for i in range(NUMBERS))
        before, self._timed = self._timed, [a * b > 0 for a, b in zip(step, allreduce, strict=True)]
        if self.method.allreduce.is_elastic and any(before) and before != self._timed:
            # A worker has left or joined. All find that in the same sums. The next times may include the change.
            self.tuner.measure_again()
            return
        self._decided = self.tuner.receive(self.method.rounds, step, allreduce, boundary)

    def on_round_end(self) -> None:
        """Takes the decision, and reports it on the rank that reports."""
        d = self.decision = self._decided
        self._decided = None
        if d is not None and self.method.is_log_rank:
            parts = f", {d.fragments} fragments" if d.fragments > 1 else ""
            settings = self.method.rounds, d.new, d.old, d.compression, parts, d.reason
            log.info("round %d: tau %d (it was %d), compression %s%s: %s", *settings)

    def state_dict(self) -> Any:
        return self.tuner.state_dict() | {"places": self.method.allreduce.places, "timed": self._timed}

    def load_state_dict(self, state: Any) -> None:
        self.tuner.load_state_dict(state)
        self._timed = state["timed"]
        if state["places"] != self.method.allreduce.places:
            self.tuner.measure_again()

    # -- as a schedule -----------------------------------------------------------------------------------------

    @property
    def fragments(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.tuner.fragments if self.tuner.cuts else None

    def begin(self, number: int) -> None:
        if self.chooses:
            self.tau = self.tuner.tau
        else:
            super().begin(number)
            self.tuner.follow(self.tau)
