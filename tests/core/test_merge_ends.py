"""What else meets a merge, or Nesterov's momentum: uneven ends, those of the baselines, too, and 16 bits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import LocalSGD, OverlapLocalSGD, SlowMo
from core.testing import run_distributed
from tests import problems
from tests.core.test_co2 import check_dtypes
from tests.core.test_merge import BASE
from tests.core.test_resume import MERGES
from tests.problems import Settings, flat, take_steps

FEW = [*MERGES[:2], *(pytest.param(changes, marks=pytest.mark.slow) for changes in MERGES[2:5]), MERGES[6]]


@pytest.mark.parametrize("changes", FEW, ids=str)
def test_16_bit_parameters(changes: dict[str, Any]):
    """Up to each dtype's rounding."""
    config = replace(BASE, tau=2 + (changes.get("delay") == 2), gap="none", allow_unstable=True)
    check_dtypes(replace(config, **changes), 1e-12, 1e-6, 0.03)


AUTO: list[dict[str, Any]] = [{"merge": "mix", "delay": "auto"}, {"merge": "keep", "delay": "auto"}]
UNEVEN: dict[str, Callable[[list[Tensor]], Any]] = {
    str(changes): replace(BASE, tau=3, **changes).build for changes in ({}, *MERGES, *AUTO)
}
UNEVEN |= {kind.name: partial(kind, tau=3) for kind in (LocalSGD, SlowMo, OverlapLocalSGD)}


def uneven_twice(rank: int, build: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    """finish() with nothing done, after uneven steps, once more, and after further ones; where the next ones begin."""
    params, seen = problems.odd_parameters(), []
    co2 = build(params)
    co2.finish()
    seen.append(flat(params))
    for steps in (range(5 + 2 * rank), range(0), range(20, 24 + rank)):
        take_steps(co2, params, rank, steps)
        co2.finish()
        seen.append(flat(params))
    co2.close()
    return [*seen, co2.starts[0].clone() if co2.differences else flat(params), *(f[0] for f in co2.state.values())]


def uneven(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    return {name: uneven_twice(rank, build) for name, build in UNEVEN.items()}


def test_finish_leaves_equal_workers_however_uneven_and_training_goes_on():
    results = run_distributed(uneven, 3)
    for name in UNEVEN:
        untouched, first, again, second, x, *_ = results[0][name]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0][name], other[name], strict=True)), name
        for before, after in ((flat(problems.odd_parameters()), untouched), (first, again)):
            if name != "OverlapLocalSGD":  # whose every boundary pulls, one without a step, too
                torch.testing.assert_close(after, before, rtol=1e-15, atol=0)  # nothing to finish
        assert (first - untouched).abs().max() > 0.1 and (second - first).abs().max() > 0.01
        assert torch.equal(second, x)


def in_two_parts_of(rank: int, world_size: int, config: Settings) -> tuple[Tensor, Tensor]:
    """One object with finish() in the middle; and a new one from there on."""
    ends = []
    for anew in (False, True):
        params = problems.odd_parameters()
        co2 = config.build(params)
        for steps in (range(5), range(5, 10)):
            take_steps(co2, params, rank, steps)
            co2.finish()
            co2 = config.build(params) if anew else co2
        ends.append(flat(params))
    return ends[0], ends[1]


@pytest.mark.parametrize("changes", FEW, ids=str)
def test_without_momentum_nothing_is_left_over_after_finish(changes: dict[str, Any]):
    config = replace(BASE, tau=3, outer_momentum=0.0, clip=None, gap="none")
    for through, anew in run_distributed(in_two_parts_of, 2, replace(config, **changes)):
        torch.testing.assert_close(through, anew, rtol=1e-12, atol=1e-12)


HAND = Settings(tau=2, gap="none", outer_momentum=0.0, clip=None, allow_unstable=True)


def uneven_by_hand(rank: int, world_size: int, config: Settings) -> list[float]:
    """Each local step goes down by 1; worker 0 makes 4 of them, worker 1 makes 7."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    co2 = config.build([p])
    seen = []
    for _ in range((4, 7)[rank]):
        with torch.no_grad():
            p.sub_(1.0)
        if co2.step():
            seen.append(p.item())
    co2.finish()
    return [*seen, p.item()]


def test_a_worker_that_finished_early_contributes_nothing():
    """mix = 1/2. Differences from x = 0, 0, -2, -5: 2, 3, then 5/2 and 3/4 of worker 1 alone; -2 - 3 - 5/4 - 3/8."""
    early, late = run_distributed(uneven_by_hand, 2, replace(HAND, merge="mix"))
    assert early == [-1.0, -2.5, -6.625]
    assert late == [-1.0, -2.5, -4.75, -6.625]
