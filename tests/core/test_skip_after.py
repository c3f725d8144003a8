"""skip_after: a mean that does not come, as when a link is down, is not waited for; nothing is lost."""

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core import CO2, CO2Config, ShardedCO2
from core.adaptive import pacing as rooms_pacing
from core.adaptive.pacing import Adaptive
from core.adaptive.tau import TauTuner, Tuned
from core.flight import Flight
from core.sharded.mesh import node_mesh
from core.testing import run_distributed
from tests import problems


class Outage:
    """A link over which the `number`-th reduction comes once its worker has taken `until` steps. Who waits for it takes
    none."""

    def __init__(self, number: int, until: int):
        self.number, self.until, self.count, self.taken = number, until, 0, 0

    def reserve(self, nbytes: float) -> float:
        self.count += 1
        while self.count == self.number and self.taken < self.until:
            time.sleep(1e-3)
        return 0.0


def over_a_bad_link(rank: int, world_size: int, merge: dict) -> tuple[list[int], list[list[float]], list[float], int]:
    """Worker 1's third mean comes ten rounds late: its local steps by round, the outer iterates, the parameters at the
    end, and how often it waited while that did not come."""
    params = problems.odd_parameters()
    config = CO2Config(tau=3, outer_lr=0.5, outer_momentum=0.2, gap="none", clip=None, **merge)
    link = Outage(3, until=39) if rank == 1 else None
    method = CO2(params, config, link=link)
    waits, lands_within = [0] * 60, rooms_pacing.lands_within

    def counted(flight: Flight, seconds: float) -> bool:
        waits[step] += 1
        return lands_within(flight, seconds)

    rooms_pacing.lands_within = counted  # in this process alone
    steps, iterates = [], []
    for step in range(60):
        problems.sgd_step(params, rank, step)
        method.pacing.skip_after = 0.01 if 9 <= step < 45 else None
        if method.step():
            steps.append(method.stats.local_steps)
            iterates.append(problems.flat(method.state["outer_iterate"]).tolist())
        if link:
            link.taken = step + 1
    method.finish()
    method.close()
    return steps, iterates, problems.flat(params).tolist(), sum(waits[9:39])


@pytest.mark.parametrize("merge", [{}, {"merge": "keep", "delay": "auto"}], ids=["outer", "keep"])
def test_a_mean_that_does_not_come_is_not_waited_for(merge: dict):
    """The late worker's round goes on for tau steps more, and again; the outer iterates are the same on both, round by
    round, and for the paper's order those of a plain loop that takes as many local steps."""
    results = run_distributed(over_a_bad_link, 2, merge)
    (steps0, iterates0, end0, waits0), (steps1, iterates1, end1, waits1) = results
    assert steps1[:3] == [3, 3, 3] and steps1[3] >= 30 and all(n % 3 == 0 for n in [*steps0, *steps1])
    both = min(len(iterates0), len(iterates1))
    assert both > 5 and iterates0[:both] == iterates1[:both]
    assert end0 == end1
    assert 10 <= waits1 <= 14 and waits0 <= 14, "once in tau steps, and once a round where the mean should be there"
    if not merge:
        expected = by_hand([steps0[:both], steps1[:both]])
        torch.testing.assert_close(torch.tensor(iterates0[:both]), torch.stack(expected).float())


def of_a_node(rank: int, world_size: int, rounds: int) -> str:
    params = problems.odd_parameters()
    method = ShardedCO2(params, CO2Config(tau=1), mesh=node_mesh("cpu", world_size))
    for _ in range(rounds):
        method.step()
    method.pacing.skip_after = 1.0
    return problems.refusal(method.step)


@pytest.mark.parametrize("rounds", [0, 1], ids=["first", "later"])
def test_workers_of_a_node_cannot_skip(rounds: int):
    for said in run_distributed(of_a_node, 2, rounds):
        assert said == "skip_after with an inner group, whose workers must close their rounds together: leave it out"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tau": "auto"}, "tau='auto', which needs rounds of known lengths: give tau a number"),
        ({"steps": "by_speed"}, "steps='by_speed', whose rounds have unlike lengths: leave one of them out"),
    ],
)
def test_rounds_of_unlike_lengths_cannot_skip(settings: dict, why: str):
    method = CO2(problems.odd_parameters(), CO2Config(**settings))
    method.pacing.skip_after = None
    assert problems.refusal(setattr, method.pacing, "skip_after", 1.0) == f"skip_after with {why}"


def by_hand(steps: list[list[int]]) -> list[torch.Tensor]:
    """x_{t+1,0} of each round of the paper's order with alpha 0.5, beta 0.2, where worker i takes steps[i][t] in it."""
    x = problems.flat(problems.odd_parameters())
    m, delta, found, taken = torch.zeros_like(x), None, [], [0, 0]
    for t in range(len(steps[0])):
        differences = []
        for worker in range(2):
            p = x.clone()
            for _ in range(steps[worker][t]):
                p -= problems.LR * problems.gradient(p, worker, taken[worker])
                taken[worker] += 1
            differences.append(x - p)
        if delta is not None:
            m = 0.2 * m + delta
            x = x - 0.5 * m
        delta = sum(differences) / 2
        found.append(x)
    return found


def test_a_mean_due_at_the_boundary_is_not_merged_before_it():
    """A worker of fewer steps, whose round goes on beyond the delay, would lose its own progress."""
    pacing = Adaptive(lambda number: 8, delay=8)
    pacing.own, pacing._spans = 3, 3
    for taken, closes in ((7, False), (8, False), (9, True)):
        method: Any = SimpleNamespace(local_steps=taken, flight=SimpleNamespace(in_flight=True))  # none to be merged
        assert pacing.closes(method, last=False) is closes


def test_while_tau_auto_tries_no_round_is_longer_than_tau_max():
    """The first worker to start would run ahead for as long as the others take to do so."""
    for tau_max, length in ((24, 24), (11, 10), (2, 2), (1, 1)):
        pacing = Adaptive(lambda number: 1, "auto", tuned=Tuned(TauTuner(tau_max, waits=False)))
        flight = SimpleNamespace(in_flight=True, landed=lambda: False, counted=contextlib.nullcontext)
        method: Any = SimpleNamespace(local_steps=0, flight=flight, clock=SimpleNamespace(pause=lambda seconds: None))
        for method.local_steps in range(1, 25):
            if pacing.closes(method, last=False):
                break
        assert method.local_steps == length
