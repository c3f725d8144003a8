"""A discrete-event model of training: one event a round, vectorised over the workers.

Every worker has a clock. A round adds to it the time of tau local steps, then what the method makes it wait for. The
model knows nothing of learning; it answers how fast, and how much of the time is exposed communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from core.errors import UserError
from core.methods import METHODS

HIDDEN = ("co2", "overlap_local")  # their all-reduce runs under the next round
COMPUTE, ALLREDUCE = range(2)  # random streams: a knob of one leaves the others' draws alone


@dataclass(frozen=True)
class Work:
    """What a step, a boundary and an all-reduce cost. Seconds unless stated."""

    workers: int
    step: float
    """Mean of a local step without communication."""
    spread: float = 0.0
    """Standard deviation of a local step, independent between steps and workers."""
    allreduce: float = 0.0
    """Mean of one all-reduce, from the last worker's launch to its landing. ddp: of all of a step's buckets."""
    allreduce_spread: float = 0.0
    """Its standard deviation as a share of its mean; lognormal."""
    boundary: float = 0.0
    """What closing a round costs a worker besides waiting. ddp: per step."""
    backward_share: float = 2 / 3
    """Share of a step that is the backward pass."""
    overlap: float = 0.0
    """ddp: share of the backward pass that communication can run under."""
    paced: bool = False
    """Steps end at absolute deadlines (bench/standin.py): a round of them spreads no more than one step."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise UserError(f"{name}={getattr(self, name):g}: {remedy}")

        require(self.workers >= 1, "workers", "give 1 or more")
        require(0 < self.step < math.inf, "step", "give a finite number of seconds above 0")
        for name in ("spread", "allreduce", "allreduce_spread", "boundary"):
            require(0 <= getattr(self, name) < math.inf, name, "give 0 or a finite number above it")
        for name in ("backward_share", "overlap"):
            require(0 <= getattr(self, name) <= 1, name, "give a share between 0 and 1")


@dataclass(frozen=True)
class Outcome:
    """Of the rounds counted, means over workers. Seconds."""

    steps: int
    seconds: float
    exposed_seconds: float
    """Waiting at boundaries, for the link and for slower workers."""
    allreduce_seconds: float
    """One all-reduce as a worker sees it: from its own launch to the landing."""

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.seconds

    @property
    def step_seconds(self) -> float:
        """Wall-clock time per local step, all included."""
        return self.seconds / self.steps


class _Workers:
    """The state of one simulated run. clock: (workers,) seconds; compute: (workers,) seconds of this round."""

    def __init__(self, work: Work):
        self.work = work
        self.clock = np.zeros(work.workers)
        self.landing = 0.0  # when the last all-reduce landed, or will
        self.waited = self.seen = 0.0

    def ddp(self, compute: np.ndarray, allreduce: float) -> None:
        """All-reduces begin once the last worker is into its backward pass; the step ends when the last one lands."""
        start = self.clock + compute * (1 - self.work.overlap * self.work.backward_share)
        ready = self.clock + compute
        self.landing = max(start.max() + allreduce, ready.max())
        self._wait(ready)
        self.seen += float(start.max() + allreduce - start.mean())
        self.clock = np.full_like(self.clock, self.landing + self.work.boundary)

    def blocking(self, compute: np.ndarray, allreduce: float) -> None:
        """local, slowmo: the slowest worker starts the all-reduce, and everyone waits until it lands."""
        ready = self.clock + compute
        self.landing = ready.max() + allreduce
        self._wait(ready)
        self.seen += float(self.landing - ready.mean())
        self.clock = np.full_like(self.clock, self.landing + self.work.boundary)

    def hidden(self, compute: np.ndarray, allreduce: float) -> None:
        """co2, overlap_local: wait for the last round's all-reduce; launch this one's at the boundary's end."""
        ready = self.clock + compute
        self._wait(ready)
        self.clock = np.maximum(ready, self.landing) + self.work.boundary
        self.landing = self.clock.max() + allreduce
        self.seen += float(self.landing - self.clock.mean())

    def _wait(self, ready: np.ndarray) -> None:
        self.waited += float(np.maximum(self.landing - ready, 0.0).mean())


def simulate(method: str, work: Work, tau: int, rounds: int, *, seed: int = 0, warmup: int = 0) -> Outcome:
    """Runs `rounds` rounds of tau local steps; ddp has a round a step, whatever tau.

    warmup: rounds at the start that are not counted (in round 0 of a hidden method nothing is in flight yet). The
    same seed gives every method the same draws.
    """
    if method not in METHODS:
        raise UserError(f"method {method!r}: choose one of {', '.join(METHODS)}")
    if tau < 1 or rounds <= warmup:
        raise UserError(f"tau={tau}, rounds={rounds}: give 1 local step or more, and more than {warmup} rounds")
    tau = 1 if method == "ddp" else tau
    streams = [np.random.default_rng([seed, kind]) for kind in (COMPUTE, ALLREDUCE)]
    state = _Workers(work)
    close = state.ddp if method == "ddp" else state.hidden if method in HIDDEN else state.blocking
    before = (0.0, 0.0, 0.0)
    for index in range(rounds):
        if index == warmup:
            before = (float(state.clock.mean()), state.waited, state.seen)
        compute = _draw(streams[COMPUTE], work, tau)
        allreduce = _lognormal(streams[ALLREDUCE], work.allreduce, work.allreduce * work.allreduce_spread, 1)
        close(compute, float(allreduce[0]))
    counted = rounds - warmup
    seconds, waited = float(state.clock.mean()) - before[0], state.waited - before[1]
    return Outcome(counted * tau, seconds, waited, (state.seen - before[2]) / counted)


def _draw(rng: np.random.Generator, work: Work, tau: int) -> np.ndarray:
    """Seconds of tau local steps, (workers,). Drawn as one number of the sum's mean and standard deviation.

    It is lognormal, which is the Fenton-Wilkinson approximation of a sum of lognormal steps (Fenton 1960).
    """
    return _lognormal(rng, tau * work.step, _deviation(work, tau), work.workers)


def _deviation(work: Work, tau: int) -> float:
    """Standard deviation of the seconds of tau steps."""
    return work.spread * (1.0 if work.paced else math.sqrt(tau))


def _lognormal(rng: np.random.Generator, mean: float, deviation: float, size: int) -> np.ndarray:
    """Numbers of that mean and standard deviation: the mean itself where either is 0."""
    if mean == 0.0 or deviation == 0.0:
        return np.full(size, mean)
    variance = math.log1p((deviation / mean) ** 2)
    return rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), size)


def expected_skew(work: Work, tau: int) -> float:
    """Mean seconds from a worker's arrival at a barrier to the last one's, after tau steps; Blom's approximation."""
    n = work.workers
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) * _deviation(work, tau)


def recommend_tau(work: Work, *, quantile: float, margin: float, seed: int = 0) -> int:
    """Smallest tau such that tau mean steps last 1 + margin times the all-reduce's quantile.

    Waiting for slow workers is left out: no tau hides it, for it grows along with the round.
    """
    if not 0 < quantile < 1 or not 0 <= margin < math.inf:
        raise UserError(f"quantile={quantile:g}, margin={margin:g}: give a quantile between 0 and 1, a margin from 0")
    rng = np.random.default_rng([seed, ALLREDUCE])
    draws = _lognormal(rng, work.allreduce, work.allreduce * work.allreduce_spread, 10_000)
    needed = (1 + margin) * float(np.quantile(draws, quantile)) / work.step
    return max(1, math.ceil(needed - 1e-9))
