"""Nesterov's outer momentum on real processes, against the executable specification."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core.outer
from core import CO2, CO2Config, UserError
from core.passes import ChunkedBoundary
from core.testing import run_distributed
from tests import problems
from tests.core.test_co2 import CLIPS, OUTER, STEPS, three_dtypes, train_dtypes
from tests.core.test_resume import SAVE_AT, Net, everything, go
from tests.problems import Settings, assert_traces_equal, flat, sgd_step, train_co2, train_reference


def grid() -> list[Settings]:
    """Every penalty with every clip, both momenta, tau 1 and 4; and without delay."""
    configs = []
    for i, (beta, alpha) in enumerate(OUTER):
        for j, clip in enumerate(CLIPS):
            tau = (1, 4)[(i + j) % 2]
            base = Settings(tau=tau, outer_momentum=beta, outer_lr=alpha, allow_unstable=True, nesterov=True, **clip)
            configs += [replace(base, gap=gap) for gap in ("elementwise", "norm", "inner", "none")]
            configs.append(replace(base, gap="none", delay=0))
    return configs


CORNERS = grid()[::4]  # every penalty and clip, both momenta and taus
GRIDS = [pytest.param(CORNERS, id="corners"), pytest.param(grid(), id="whole", marks=pytest.mark.slow)]


def train_grid(rank: int, world_size: int, configs: list[Settings]) -> list[list[Tensor]]:
    core.outer.SEGMENT = 16  # so that no piece ends where a tensor does
    return [train_co2(problems.odd_parameters(), rank, STEPS, c) for c in configs]


@pytest.mark.parametrize("configs", GRIDS)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_equals_the_reference_round_by_round(world_size: int, configs: list[Settings]):
    x = flat(problems.odd_parameters())
    results = run_distributed(train_grid, world_size, configs, timeout=300)
    for i, config in enumerate(configs):
        expected = train_reference(config, world_size, STEPS, x)
        for rank in range(world_size):
            assert_traces_equal(results[rank][i], expected)
            assert all(torch.equal(a, b) for a, b in zip(results[rank][i], results[0][i], strict=True)), config


def test_one_worker_without_a_process_group():
    x = flat(problems.odd_parameters())
    for config in CORNERS:
        expected = train_reference(config, 1, STEPS, x)
        assert_traces_equal(train_co2(problems.odd_parameters(), 0, STEPS, config), expected)


def test_mix_1_is_the_plain_delayed_step():
    """It restarts from the outer iterate."""
    plain = Settings(tau=2, gap="none", clip=0.3, outer_lr=0.4)
    expected = train_co2(problems.odd_parameters(), 0, 7, plain)
    ours = train_co2(problems.odd_parameters(), 0, 7, replace(plain, merge="mix", mix=1.0))
    assert_traces_equal(ours, expected, 1e-12)


def test_the_penalty_keeps_its_single_pass_and_its_copies():
    co2 = CO2(problems.odd_parameters(), CO2Config(tau=2))
    assert all(isinstance(b, ChunkedBoundary) for b in co2._boundaries)
    assert set(co2.state) == {"outer_iterate", "outer_momentum"}


# -- uneven workers -------------------------------------------------------------------------------------------

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


def uneven(rank: int, world_size: int, configs: list[Settings]) -> list[list[Tensor]]:
    return [uneven_twice(rank, config) for config in configs]


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


def test_finish_leaves_equal_workers_however_uneven_and_training_goes_on():
    base = Settings(tau=2, gap="none", outer_lr=0.5, outer_momentum=0.4, clip=0.1)
    configs = [replace(base, nesterov=True), replace(base, nesterov=True, delay=0)]
    results = run_distributed(uneven, 3, configs)
    for i, config in enumerate(configs):
        untouched, first, again, second, x, _ = results[0][i]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0][i], other[i], strict=True)), config
        for before, after in ((flat(problems.odd_parameters()), untouched), (first, again)):
            torch.testing.assert_close(after, before, rtol=1e-15, atol=0)  # nothing to finish; a mean of equals rounds
        assert (first - untouched).abs().max() > 0.1 and (second - first).abs().max() > 0.01
        assert torch.equal(second, x)


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


# -- 16 bits, BatchNorm, resuming -----------------------------------------------------------------------------


def test_16_bit_parameters():
    """float64, float32 and bfloat16 in one model, as one float64 model up to each dtype's rounding."""
    config = Settings(tau=2, outer_momentum=0.3, outer_lr=0.6, gap="none", clip=0.2, nesterov=True)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.02}
    allowed = torch.cat([torch.full((p.numel(),), tolerance[p.dtype]).double() for p in three_dtypes()])
    for rank, result in enumerate(run_distributed(train_dtypes, 2, config)):
        expected = train_reference(config, 2, 6, flat(three_dtypes()), rank)
        for ours, want in zip(result, expected, strict=True):
            assert ((ours - want).abs() <= allowed * (1 + want.abs())).all()


RUNS: list[dict[str, Any]] = [{"nesterov": True}, {"nesterov": True, "delay": 0}]


def build(seed: int, changes: dict[str, Any]) -> tuple[Net, torch.optim.Optimizer, CO2]:
    model = Net(seed)
    config = replace(Settings(tau=3, outer_lr=0.4, outer_momentum=0.5, gap="none", clip=0.1), **changes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return model, optimizer, config.build(model.parameters(), buffers=model.buffers())


def interrupted(rank: int, world_size: int, folder: str) -> list[tuple[Tensor, Tensor]]:
    return [interrupt(rank, changes, Path(folder, f"{rank}.pt")) for changes in RUNS]


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


def test_a_resumed_run_is_bit_identical(tmp_path: Path):
    """Also before finish(), where workers differ; with BatchNorm."""
    for results in run_distributed(interrupted, 2, str(tmp_path)):
        for changes, (whole, resumed) in zip(RUNS, results, strict=True):
            assert torch.equal(whole, resumed), changes


def test_a_checkpoint_of_another_momentum_is_refused():
    """Either way: one lacks state, or has too much."""
    base = Settings(tau=1, outer_lr=0.4, gap="none")
    one, other = (c.build([nn.Parameter(torch.ones(2))]) for c in (base, replace(base, nesterov=True)))
    for saved, reader in ((one, other), (other, one)):
        with pytest.raises(UserError, match="resume with") as caught:
            reader.load_state_dict(saved.state_dict())
        assert "\n" not in str(caught.value)
