"""When each worker does what: scenarios, ways to keep workers together, and what they come to in so many seconds.

Times are in local steps of an undisturbed worker. The clock is bench/simulator/events.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bench.simulator.events import HIDDEN, SSP, Rule, Work, Workers, simulate
from core.errors import UserError

STALENESS = (1, 3, 8)
COUNTED = 300  # rounds over which a speed is taken


@dataclass(frozen=True)
class Scenario:
    """How the workers' speeds differ, in words, and as Work has it."""

    about: str
    slow: tuple[float, ...] = ()
    stall_chance: float = 0.0
    stall: float = 0.0


SCENARIOS = {
    "even": Scenario("all alike"),
    "half": Scenario("one worker at half speed", slow=(2.0,)),
    "stalls": Scenario("each step stalls with a chance of 2 %, for 10 steps' time", stall_chance=0.02, stall=10.0),
}


def work_of(scenario: str, workers: int, allreduce: float, spread: float = 0.05) -> Work:
    """A step takes 1. allreduce: one of the parameters in float32; spread: standard deviation of a step."""
    s = SCENARIOS[scenario]
    speeds = {"slow": s.slow[:workers], "stall_chance": s.stall_chance, "stall": s.stall}
    return Work(workers, 1.0, spread, allreduce, overlap=0.8, **speeds)


@dataclass(frozen=True)
class Way:
    """A way to keep workers together. settings: bench.search's, None for ssp, which it has not."""

    name: str
    method: str
    tau: int
    rule: Rule = Rule()
    settings: str | None = None

    def run(self, work: Work, seconds: float, seed: int) -> Run:
        """Whole rounds, or clocks, that end within so many seconds, what is in flight then having landed, too."""
        state, rounds, parts, starts = Workers(work, self.rule, seed), 0, [], []
        drain = work.allreduce if self.method in HIDDEN else 0.0
        ends: list[np.ndarray] = []
        while True:
            starts.append(state.clock.copy())
            parts.append(state.parts(self.tau) if self.rule.by_speed else np.full(work.workers, self.tau))
            state.round(self.method, self.tau)
            ends.append(state.arrivals[-1] if self.method == SSP else np.full(work.workers, state.clock.max() + drain))
            if ends[-1].min() > seconds:
                break
            rounds += 1
        if not rounds:
            raise UserError(f"seconds={seconds:g}: {self.name} closes no round in them; give more")
        within = np.array(ends) <= seconds
        return Run(np.array(parts), np.array(starts), np.array(ends), within)

    def speed(self, work: Work) -> float:
        """Steps of all workers a second, over those of as many undisturbed workers that never wait."""
        rounds = COUNTED if self.tau > 1 else 10 * COUNTED
        outcome = simulate(self.method, work, self.tau, rounds, warmup=rounds // 10, rule=self.rule)
        return work.step * outcome.steps / outcome.seconds


@dataclass(frozen=True)
class Run:
    """[rounds, workers] each: local steps; when they begin; when what comes of them is everywhere; and whether that is
    in time. Rows that are not on any worker end the run."""

    parts: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    within: np.ndarray

    @property
    def rounds(self) -> int:
        """Closed by all workers."""
        return int(self.within.all(axis=1).sum())

    @property
    def samples(self) -> int:
        """Local steps of all workers that count."""
        return int((self.parts * self.within).sum())


def ways(tau: int, allreduce: float) -> list[Way]:
    """All that are compared, at one tau over one link."""
    late = max(1, math.ceil(allreduce - 1e-9))  # steps under which a mean is hidden
    if late >= tau:
        raise UserError(f"tau={tau}: an all-reduce takes {allreduce:g} local steps; give a tau above {late}")
    keep = f"co2:merge=keep,gap=none,beta=0,delay={late}"
    return [
        Way("ddp", "ddp", 1, settings="ddp"),
        *(Way(f"ssp, s = {s}, a clock a step", SSP, 1, Rule(staleness=s)) for s in STALENESS),
        *(Way(f"ssp, s = {s}, clocks of {tau}", SSP, tau, Rule(staleness=s)) for s in STALENESS),
        Way(f"local, tau {tau}", "local", tau, settings="local"),
        Way(f"co2, tau {tau}, even", "co2", tau, settings="co2:beta=0"),
        Way(f"co2, tau {tau}, by_speed", "co2", tau, Rule(by_speed=True), "co2:beta=0"),
        Way(f"co2, keep, tau {tau}, even", "co2", tau, Rule(delay=late), keep),
        Way(f"co2, keep, tau {tau}, by_speed", "co2", tau, Rule(delay=late, by_speed=True), keep),
    ]
