"""Nesterov's outer momentum on real processes, against the executable specification."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import core.outer
from core import CO2, CO2Config, UserError
from core.passes import ChunkedBoundary
from core.testing import run_distributed
from tests import problems
from tests.core.test_co2 import CLIPS, OUTER, STEPS
from tests.problems import Settings, assert_traces_equal, flat, train_co2, train_reference


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


def test_a_checkpoint_of_another_momentum_is_refused():
    """Either way: one lacks state, or has too much."""
    base = Settings(tau=1, outer_lr=0.4, gap="none")
    one, other = (c.build([nn.Parameter(torch.ones(2))]) for c in (base, replace(base, nesterov=True)))
    for saved, reader in ((one, other), (other, one)):
        with pytest.raises(UserError, match="resume with") as caught:
            reader.load_state_dict(saved.state_dict())
        assert "\n" not in str(caught.value)
