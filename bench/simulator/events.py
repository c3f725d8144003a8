"""A discrete-event model of training: one event a round, vectorised over the workers.

Every worker has a clock. A round adds to it the time of tau local steps, then what the method makes it wait for. The
model knows nothing of learning; it answers how fast, and how much of the time is exposed communication.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from core.adaptive.pace import WINDOW

from core.errors import UserError
from core.methods import METHODS

HIDDEN = ("co2", "overlap_local")  # their all-reduce runs under the next round
SSP = "ssp"  # stale synchronous parallel, which core has not: a comparator (bench/uneven)
KNOWN = (*METHODS, SSP)
QUANTILE, MARGIN = 0.95, 0.25  # what of an all-reduce's times the tau to use covers, and the share more
COMPUTE, ALLREDUCE, STALLS = range(3)  # random streams: a knob of one leaves the others' draws alone


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
    slow: tuple[float, ...] = ()
    """How many times as long the first workers' steps take; the others' 1."""
    stall_chance: float = 0.0
    """Of a step to stall, independent between steps and workers: a straggler now here, now there."""
    stall: float = 0.0
    """Seconds that a stalled step takes more."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise UserError(f"{name}={getattr(self, name):g}: {remedy}")

        require(self.workers >= 1, "workers", "give 1 or more")
        require(0 < self.step < math.inf, "step", "give a finite number of seconds above 0")
        for name in ("spread", "allreduce", "allreduce_spread", "boundary", "stall"):
            require(0 <= getattr(self, name) < math.inf, name, "give 0 or a finite number above it")
        for name in ("backward_share", "overlap", "stall_chance"):
            require(0 <= getattr(self, name) <= 1, name, "give a share between 0 and 1")
        if len(self.slow) > self.workers or not all(0 < factor < math.inf for factor in self.slow):
            raise UserError(f"slow={self.slow}: give up to {self.workers} finite factors above 0, a worker each")

    @property
    def steps(self) -> np.ndarray:
        """Mean seconds of a local step of each worker, (workers,)."""
        return self.step * np.array([*self.slow, *[1.0] * (self.workers - len(self.slow))])


@dataclass(frozen=True)
class Outcome:
    """Of the rounds counted, means over workers. Seconds."""

    steps: float
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


@dataclass(frozen=True)
class Rule:
    """How workers wait for one another, beside the method's name.

    delay: of co2, the local steps after a sending at which its mean is awaited and merged; None for a whole round.
    by_speed: of co2, a slower worker takes fewer of a round's steps (core/adaptive/pace.py).
    staleness: of ssp, how many clocks a worker may be ahead of the slowest.
    """

    delay: int | None = None
    by_speed: bool = False
    staleness: int = 0


class Workers:
    """The state of one simulated run. clock: (workers,) seconds; compute: (workers,) seconds of this round."""

    def __init__(self, work: Work, rule: Rule = Rule(), seed: int = 0):
        self.work, self.rule = work, rule
        self.streams = [np.random.default_rng([seed, kind]) for kind in (COMPUTE, ALLREDUCE, STALLS)]
        self.clock = np.zeros(work.workers)
        self.landing = 0.0  # when the last all-reduce landed, or will
        self.waited = self.seen = self.taken = 0.0
        self.arrivals: list[np.ndarray] = []  # ssp: when each worker's updates are with all others, a row a clock
        self.heard: deque[np.ndarray] = deque(maxlen=WINDOW)  # by_speed: seconds of a local step
        self.told: np.ndarray | None = None  # the same, on its way

    def round(self, method: str, tau: int) -> None:
        """tau local steps and what follows; ddp's tau is 1."""
        allreduce = _lognormal(
            self.streams[ALLREDUCE], self.work.allreduce, self.work.allreduce * self.work.allreduce_spread, 1
        )
        parts = self.parts(tau) if self.rule.by_speed else np.full(self.work.workers, tau)
        busy, rest = np.zeros(self.work.workers), parts
        if method in HIDDEN and self.rule.delay:
            early = np.minimum(parts, self.rule.delay)
            busy, rest = self._draw(early), parts - early
            self._merge_early(busy)
        compute = self._draw(rest)
        close = {"ddp": self.ddp, SSP: self.ssp}.get(method, self.hidden if method in HIDDEN else self.blocking)
        close(compute, float(allreduce[0]))
        self.taken += float(parts.mean())
        if self.rule.by_speed:
            self._hear((busy + compute) / parts)

    def parts(self, tau: int) -> np.ndarray:
        """Each worker's local steps of the next round, as Pace.steps has them."""
        if not self.heard:
            return np.full(self.work.workers, tau)
        medians = np.median(self.heard, axis=0)
        return np.minimum(tau, np.maximum(2, np.round(tau * medians.min() / medians).astype(int)))

    def _hear(self, seconds: np.ndarray) -> None:
        """What is sent with a round's reduction is known once it has landed, a round later."""
        if self.told is not None:
            self.heard.append(self.told)
        self.told = seconds

    def _draw(self, steps: np.ndarray) -> np.ndarray:
        """Seconds of so many local steps of each worker, (workers,). One number of the sum's mean and deviation.

        It is lognormal, which is the Fenton-Wilkinson approximation of a sum of lognormal steps (Fenton 1960).
        """
        work, mean = self.work, self.work.steps
        compute = np.zeros(work.workers)
        for count in np.unique(steps):
            drawn = _lognormal(self.streams[COMPUTE], count * work.step, _deviation(work, count), work.workers)
            compute = np.where(steps == count, drawn * mean / work.step, compute)
        if work.stall_chance and work.stall:
            compute = compute + work.stall * self.streams[STALLS].binomial(steps, work.stall_chance)
        return compute

    def ddp(self, compute: np.ndarray, allreduce: float) -> None:
        """All-reduces begin once the last worker is into its backward pass; the step ends when the last one lands."""
        self.blocking(compute, allreduce, self.work.overlap * self.work.backward_share)

    def blocking(self, compute: np.ndarray, allreduce: float, early: float = 0.0) -> None:
        """local, slowmo: the slowest worker starts the all-reduce, and everyone waits until it lands. early: the share
        of its computing that it then has before it."""
        start, ready = self.clock + compute * (1 - early), self.clock + compute
        self.landing = max(start.max() + allreduce, ready.max())
        self._wait(ready)
        self.seen += float(start.max() + allreduce - start.mean())
        self.clock = np.full_like(self.clock, self.landing + self.work.boundary)

    def hidden(self, compute: np.ndarray, allreduce: float) -> None:
        """co2, overlap_local: wait for the last round's all-reduce; launch this one's at the boundary's end."""
        ready = self.clock + compute
        self._wait(ready)
        self.clock = np.maximum(ready, self.landing) + self.work.boundary
        self.landing = self.clock.max() + allreduce
        self.seen += float(self.landing - self.clock.mean())

    def _merge_early(self, compute: np.ndarray) -> None:
        """co2 with a delay: the last round's all-reduce is awaited after the round's first steps."""
        ready = self.clock + compute
        self._wait(ready)
        self.clock = np.maximum(ready, self.landing)

    def ssp(self, compute: np.ndarray, allreduce: float) -> None:
        """Stale synchronous parallel (Ho et al., NeurIPS 2013): clock c begins once every worker's updates of the
        clocks before c - staleness are there; with staleness 0, those of all clocks before it.

        A parameter server shared out over the workers: an update goes to the parts' owners, and from there to all,
        over a link that carries one after the other; both ways together as many bytes as a ring's all-reduce, so as
        many seconds.
        """
        ready = self.clock + compute
        free = np.maximum(ready, self.arrivals[-1]) if self.arrivals else ready
        self.arrivals.append(free + allreduce)
        needed = len(self.arrivals) - 1 - self.rule.staleness
        self.landing = float(self.arrivals[needed].max()) if needed >= 0 else 0.0
        self._wait(ready)
        self.seen += float((self.arrivals[-1] - ready).mean())
        self.clock = np.maximum(ready, self.landing) + self.work.boundary

    def _wait(self, ready: np.ndarray) -> None:
        self.waited += float(np.maximum(self.landing - ready, 0.0).mean())


def simulate(
    method: str, work: Work, tau: int, rounds: int, *, seed: int = 0, warmup: int = 0, rule: Rule = Rule()
) -> Outcome:
    """Runs `rounds` rounds of tau local steps; ddp has a round a step, whatever tau. ssp: a round is a clock.

    warmup: rounds at the start that are not counted (in round 0 of a hidden method nothing is in flight yet). The
    same seed gives every method the same draws.
    """
    if method not in KNOWN:
        raise UserError(f"method {method!r}: choose one of {', '.join(KNOWN)}")
    if tau < 1 or rounds <= warmup:
        raise UserError(f"tau={tau}, rounds={rounds}: give 1 local step or more, and more than {warmup} rounds")
    tau = 1 if method == "ddp" else tau
    state = Workers(work, rule, seed)
    before = (0.0,) * 4
    for index in range(rounds):
        if index == warmup:
            before = (state.taken, float(state.clock.mean()), state.waited, state.seen)
        state.round(method, tau)
    after = state.taken, float(state.clock.mean()), state.waited, state.seen
    steps, seconds, waited, seen = (late - early for late, early in zip(after, before, strict=True))
    return Outcome(steps, seconds, waited, seen / (rounds - warmup))


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


def recommend_tau(work: Work, seed: int = 0) -> int:
    """Smallest tau such that tau mean steps last 1 + MARGIN times the all-reduce's QUANTILE.

    Waiting for slow workers is left out: no tau hides it, for it grows along with the round.
    """
    rng = np.random.default_rng([seed, ALLREDUCE])
    draws = _lognormal(rng, work.allreduce, work.allreduce * work.allreduce_spread, 10_000)
    needed = (1 + MARGIN) * float(np.quantile(draws, QUANTILE)) / work.step
    return max(1, math.ceil(needed - 1e-9))
