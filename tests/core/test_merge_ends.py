"""What else meets a merge, or Nesterov's momentum: uneven ends, 16 bits, BatchNorm, and going on from a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2
from core.testing import run_distributed
from tests import problems
from tests.core.test_co2 import three_dtypes, train_dtypes
from tests.core.test_merge import BASE
from tests.core.test_resume import SAVE_AT, Net, everything, go
from tests.problems import Settings, flat, sgd_step, train_reference

SOME: list[dict[str, Any]] = [
    {"merge": "mix"},
    {"merge": "mix", "delay": 1},
    {"merge": "keep", "delay": 2},
    {"delay": 0, "gap": "none"},
    {"merge": "keep"},
    {"merge": "mix", "delay": 1, "wire": "int8"},
    {"nesterov": True},
    {"nesterov": True, "delay": 0, "gap": "none"},
]
FEW = [*SOME[:2], *(pytest.param(changes, marks=pytest.mark.slow) for changes in SOME[2:5]), SOME[6]]


@pytest.mark.parametrize("changes", FEW, ids=str)
def test_16_bit_parameters(changes: dict[str, Any]):
    """float64, float32 and bfloat16 in one model, as one float64 model up to each dtype's rounding."""
    config = replace(BASE, tau=2 + (changes.get("delay") == 2), gap="none", allow_unstable=True)
    config = replace(config, **changes)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.03}
    allowed = torch.cat([torch.full((p.numel(),), tolerance[p.dtype]).double() for p in three_dtypes()])
    for rank, result in enumerate(run_distributed(train_dtypes, 2, config)):
        expected = train_reference(config, 2, 6, flat(three_dtypes()), rank)
        for ours, want in zip(result, expected, strict=True):
            assert ((ours - want).abs() <= allowed * (1 + want.abs())).all()


UNEVEN: list[dict[str, Any]] = [*SOME, {"merge": "mix", "delay": "auto"}, {"merge": "keep", "delay": "auto"}]


def uneven_twice(rank: int, config: Settings) -> list[Tensor]:
    """finish() with nothing done, after uneven steps, once more, after further ones, and in a new object from there."""
    params, seen = problems.odd_parameters(), []
    co2 = config.build(params)
    co2.finish()
    seen.append(flat(params))
    for steps in (range(5 + 2 * rank), range(0), range(20, 24 + rank)):
        for step in steps:
            sgd_step(params, rank, step)
            co2.step()
        co2.finish()
        seen.append(flat(params))
    return [*seen, co2._x[0].clone(), co2._m[0].clone()]


def uneven(rank: int, world_size: int) -> list[list[Tensor]]:
    return [uneven_twice(rank, replace(BASE, tau=3, **changes)) for changes in UNEVEN]


def test_finish_leaves_equal_workers_however_uneven_and_training_goes_on():
    results = run_distributed(uneven, 3)
    for i, changes in enumerate(UNEVEN):
        untouched, first, again, second, x, _ = results[0][i]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0][i], other[i], strict=True)), changes
        for before, after in ((flat(problems.odd_parameters()), untouched), (first, again)):
            torch.testing.assert_close(after, before, rtol=1e-15, atol=0)  # nothing to finish
        assert (first - untouched).abs().max() > 0.1 and (second - first).abs().max() > 0.01
        assert torch.equal(second, x)


def build(seed: int, changes: dict[str, Any]) -> tuple[Net, torch.optim.Optimizer, CO2]:
    model = Net(seed)
    config = replace(Settings(tau=3, outer_lr=0.4, outer_momentum=0.5, gap="none", clip=0.1), **changes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return model, optimizer, config.build(model.parameters(), buffers=model.buffers())


def interrupt(rank: int, changes: dict[str, Any], path: Path) -> tuple[Tensor, Tensor]:
    whole = build(0, changes)
    go(*whole, rank, range(SAVE_AT))
    torch.save([part.state_dict() for part in whole], path)
    go(*whole, rank, range(SAVE_AT, 13))
    resumed = build(1, changes)  # starts from other values
    for part, saved in zip(resumed, torch.load(path, weights_only=True), strict=True):
        part.load_state_dict(saved)
    go(*resumed, rank, range(SAVE_AT, 13))
    before = everything(whole[0]), everything(resumed[0])
    whole[2].finish(), resumed[2].finish()
    return torch.cat([before[0], everything(whole[0])]), torch.cat([before[1], everything(resumed[0])])


def interrupted(rank: int, world_size: int, folder: str) -> list[tuple[Tensor, Tensor]]:
    return [interrupt(rank, changes, Path(folder, f"{rank}.pt")) for changes in SOME]


def test_a_resumed_run_is_bit_identical(tmp_path: Path):
    """Saved in mid-round, before or after the merge; with BatchNorm."""
    for results in run_distributed(interrupted, 2, str(tmp_path)):
        for changes, (whole, resumed) in zip(SOME, results, strict=True):
            assert torch.equal(whole, resumed), changes


def in_two_parts_of(rank: int, world_size: int, config: Settings) -> tuple[Tensor, Tensor]:
    """One object with finish() in the middle; and a new one from there on."""
    ends = []
    for anew in (False, True):
        params = problems.odd_parameters()
        co2 = config.build(params)
        for steps in (range(5), range(5, 10)):
            for step in steps:
                sgd_step(params, rank, step)
                co2.step()
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
