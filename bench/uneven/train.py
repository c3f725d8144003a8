"""When each worker does what, and the training that follows: scenarios, ways to keep workers together, and what they
come to in so many seconds, all in one process.

Times are in local steps of an undisturbed worker. The clock is bench/simulator/events.py's."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from bench.search.engine import Plan, Result, stack_of
from bench.search.engine import run as run_alike
from bench.search.methods import Outer
from bench.search.task import Batch, Task, cosine
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


class Crew:
    """The workers' parameters, the rows of x, [workers, n], each with an optimiser of its own."""

    def __init__(self, task: Task, plan: Plan):
        self.plan, self.stack = plan, stack_of(task)
        self.x = self.stack.start(plan.seed).expand(plan.workers, -1).clone()
        self.inners = [task.inner.start(row[None]) for row in self.x]
        self._draw = functools.lru_cache(maxsize=64)(
            lambda step: task.draw(plan.seed, step, plan.workers, plan.batch, plan.shards)
        )

    def step(self, who: Sequence[int], numbers: Sequence[int], lrs: Sequence[float]) -> None:
        """A local step of each worker in `who`, on its batch of that number, at that learning rate."""
        if not who:
            return
        drawn = [tuple(part[i] for part in self._draw(number)) for i, number in zip(who, numbers, strict=True)]
        batch = cast(Batch, tuple(torch.stack(part) for part in zip(*drawn, strict=True)))
        gradient = self.stack.gradient(self.x[list(who)], batch)
        for place, (i, lr) in enumerate(zip(who, lrs, strict=True)):
            self.inners[i].step(self.x[i : i + 1], gradient[place : place + 1], lr)


def run(task: Task, plan: Plan, way: Way, clock: Run, seconds: float) -> float | None:
    """The loss after so many seconds, of the model that all workers then share; None where it is not finite."""
    if way.settings is None:
        end = train_ssp(task, plan, clock, seconds)
    elif way.rule.by_speed:
        end = train_by_speed(task, plan, clock.parts[: clock.rounds])
    else:
        result: Result = run_alike(task, plan)
        return result.loss
    return stack_of(task).held_out_loss(end, task.held_out[plan.split])


def train_by_speed(task: Task, plan: Plan, parts: np.ndarray) -> Tensor:
    """parts: local steps, [rounds, workers], of which a round's last ones a slower worker leaves out, as
    core/adaptive/pace.py has it; its difference counts by its steps. Returns the end, [n]."""
    crew = Crew(task, plan)
    method = cast(Outer, plan.settings.make(crew.x, plan.tau))
    total = len(parts) * plan.tau
    for index, of_round in enumerate(parts):
        for reference in method.parts:
            reference.weights = torch.as_tensor(of_round, dtype=crew.x.dtype)
        for place in range(plan.tau):
            number = index * plan.tau + place
            who = [i for i, count in enumerate(of_round) if place < count]
            crew.step(who, [number] * len(who), [plan.lr * cosine(number, total)] * len(who))
            method.taken += 1
            method.local_step()
    method.finish()
    return method.x[0]


def train_ssp(task: Task, plan: Plan, clock: Run, seconds: float) -> Tensor:
    """Stale synchronous parallel, as bench/simulator/events.py's clock has it: a worker begins a clock from all
    updates that have arrived by then and from its own; it adds what its local steps have moved, over the number of
    workers. The learning rate follows the seconds. Returns the sum of what arrived within them, [n]."""
    crew = Crew(task, plan)
    server, on_the_way = crew.x[0].clone(), cast(list[tuple[float, int, Tensor]], [])
    waiting: list[tuple[int, int]] = []  # clocks that have begun and are not computed yet: (clock, worker)

    def compute() -> None:
        """All that wait, at once: nothing that one of them sends arrives before the others have begun."""
        begun = crew.x.clone()
        for place in range(plan.tau):
            who = [i for _, i in waiting]
            numbers = [c * plan.tau + place for c, _ in waiting]
            at = [clock.starts[c, i] + place for c, i in waiting]
            crew.step(who, numbers, [plan.lr * cosine(min(t, seconds), seconds) for t in at])
        for c, i in waiting:
            on_the_way.append((clock.ends[c, i], i, (crew.x[i] - begun[i]) / plan.workers))
        waiting.clear()

    def arrive(until: float) -> None:
        while due := [sent for sent in on_the_way if sent[0] <= until]:
            first = min(due, key=lambda sent: sent[0])
            on_the_way.remove(first)
            server.add_(first[2])

    order = sorted((clock.starts[c, i], c, i) for c, i in np.argwhere(clock.within).tolist())
    for start, c, i in order:
        if any(clock.ends[at] <= start or at[1] == i for at in waiting):
            compute()
        arrive(start)
        own = [update for _, worker, update in on_the_way if worker == i]
        crew.x[i] = server + sum(own, torch.zeros_like(server))
        waiting.append((c, i))
    compute()
    arrive(seconds)
    return server
