"""Nesterov's outer momentum on real processes, against the executable specification."""

from dataclasses import replace

import pytest

from tests.core.test_co2 import CLIPS, OUTER, STEPS
from tests.problems import Settings, check_grid


def grid() -> list[Settings]:
    """Every penalty with every clip, both momenta, tau 1 and 4; and without delay."""
    configs = []
    for i, (beta, alpha) in enumerate(OUTER):
        for j, clip in enumerate(CLIPS):
            tau = (1, 4)[(i + j) % 2]
            base = Settings(tau=tau, outer_momentum=beta, outer_lr=alpha, allow_unstable=True, nesterov=True, **clip)
            configs += [replace(base, gap=gap) for gap in ("elementwise", "norm", "none")]
            configs.append(replace(base, gap="none", delay=0))
    return configs


CORNERS = grid()[::4]  # every penalty and clip, both momenta and taus
GRIDS = [pytest.param(CORNERS, id="corners"), pytest.param(grid(), id="whole", marks=pytest.mark.slow)]


@pytest.mark.parametrize("configs", GRIDS)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_equals_the_reference_round_by_round(world_size: int, configs: list[Settings]):
    check_grid(world_size, configs, STEPS)
