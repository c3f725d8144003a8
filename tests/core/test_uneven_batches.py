"""Workers with different numbers of batches end together."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, LocalSGD, OverlapLocalSGD, ShardedCO2, UserError
from core.testing import run_distributed
from tests import problems
from tests.problems import flat, sgd_step

HIDDEN = {
    "co2": CO2Config(tau=3),
    "keep": CO2Config(tau=3, merge="keep", delay=2, gap="none"),
    "mix": CO2Config(tau=3, merge="mix", delay="auto"),
    "mixed at the boundary": CO2Config(tau=3, merge="mix"),
}
ENDS: dict[str, Any] = {name: lambda p, c=c: CO2(p, c) for name, c in HIDDEN.items()} | {
    "shard": lambda p: ShardedCO2(p, CO2Config(tau=3), shard=True),
    "no delay": lambda p: CO2(p, CO2Config(tau=3, gap="none", delay=0)),
    "local": lambda p: LocalSGD(p, 3),
    "overlap_local": lambda p: OverlapLocalSGD(p, 3),
}


def last_steps(rank: int, world_size: int) -> dict[str, list[tuple[Tensor, int]]]:
    """The end without and with step(last=True): after as many steps on all, after fewer on rank 0, and once more."""
    found: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in ENDS}
    for name, build in ENDS.items():
        for says in (False, True):
            params = problems.odd_parameters()
            method = build(params)
            for steps in (6, 6 + 3 * rank, 5, 3):
                for step in range(steps):
                    sgd_step(params, rank, step)
                    if name == "mix":
                        method.flight.settle()  # so that a mean is merged after the same step
                    method.step(last=says and step == steps - 1)
                method.finish()
                found[name].append((flat(params), method.rounds))
    return found


def test_a_last_step_saves_an_all_reduce_and_changes_nothing():
    zero, one = run_distributed(last_steps, 2)
    for name in ENDS:
        for i in range(4):
            (usual, rounds), (ended, fewer) = zero[name][i], zero[name][4 + i]
            assert torch.equal(ended, one[name][4 + i][0]), f"{name}: workers differ after finish() {i}"
            if name != "overlap_local":  # whose every boundary pulls, one without a step, too
                torch.testing.assert_close(ended, usual, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            # after 6 steps, after 6 to 9, not after 5, after 3
            assert rounds - fewer == (1, 2, 2, 3)[i], (name, i, rounds, fewer)


def test_a_step_after_the_last_needs_finish_between():
    co2 = CO2([nn.Parameter(torch.ones(3))], CO2Config(tau=1))
    co2.step(last=True)
    with pytest.raises(UserError, match=r"call finish\(\)"):
        co2.step()
    co2.finish()
    co2.step()
