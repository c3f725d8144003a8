"""Training of workers that do not go in step, in one process: by_speed's unlike numbers of local steps, and SSP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from bench.search.engine import Plan, Result, stack_of
from bench.search.engine import run as run_alike
from bench.search.methods import Outer
from bench.search.task import Batch, Task, cosine
from bench.uneven.clocks import Run, Way


class Crew:
    """The workers' parameters, the rows of x, [workers, n], each with an optimiser of its own."""

    def __init__(self, task: Task, plan: Plan):
        self.plan, self.stack = plan, stack_of(task, False, "cpu")
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
    return stack_of(task, False, "cpu").held_out_loss(end, task.held_out[plan.split])


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
