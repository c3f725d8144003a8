"""skip_after: a mean that does not come, as when a link is down, is not waited for; nothing is lost."""

import time

import pytest
import torch

from core import CO2, CO2Config
from core.testing import run_distributed
from tests import problems


class Outage:
    """A link over which the `number`-th reduction takes `seconds` longer."""

    def __init__(self, number: int, seconds: float):
        self.number, self.seconds, self.count = number, seconds, 0

    def reserve(self, nbytes: float) -> float:
        self.count += 1
        return time.perf_counter() + (self.seconds if self.count == self.number else 0.0)


def over_a_bad_link(rank: int, world_size: int, merge: dict) -> tuple[list[int], list[list[float]], float, list[float]]:
    """Worker 1's third mean comes 0.6 s late, beside rounds of 0.06 s: its local steps by round, the outer iterates,
    the longest time in step(), and the parameters at the end."""
    params = problems.odd_parameters()
    config = CO2Config(tau=3, outer_lr=0.5, outer_momentum=0.2, gap="none", clip=None, **merge)
    method = CO2(params, config, link=Outage(3, 0.6) if rank == 1 else None)
    method.skip_after = 0.01
    steps, iterates, longest = [], [], 0.0
    for step in range(60):
        problems.sgd_step(params, rank, step)
        time.sleep(0.02)
        began = time.perf_counter()
        if method.step():
            steps.append(method.stats.local_steps)
            iterates.append(problems.flat(method.state["outer_iterate"]).tolist())
        longest = max(longest, time.perf_counter() - began)
    method.finish()
    method.close()
    return steps, iterates, longest, problems.flat(params).tolist()


@pytest.mark.parametrize("merge", [{}, {"merge": "keep", "delay": "auto"}], ids=["outer", "keep"])
def test_a_mean_that_does_not_come_is_not_waited_for(merge: dict):
    """The late worker's round goes on for tau steps more, and again; the outer iterates are the same on both, round by
    round, and for the paper's order those of a plain loop that takes as many local steps."""
    results = run_distributed(over_a_bad_link, 2, merge)
    (steps0, iterates0, longest0, end0), (steps1, iterates1, longest1, end1) = results
    assert any(n > 3 for n in steps1) and all(n % 3 == 0 for n in [*steps0, *steps1])
    assert max(longest0, longest1) < 0.5
    both = min(len(iterates0), len(iterates1))
    assert both > 5 and iterates0[:both] == iterates1[:both]
    assert end0 == end1
    if not merge:
        expected = by_hand([steps0[:both], steps1[:both]])
        torch.testing.assert_close(torch.tensor(iterates0[:both]), torch.stack(expected).float())


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
