"""How far the workers are apart, as logged: against their parameters, and against what the theory predicts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config
from core.testing import run_distributed
from tests import problems
from tests.problems import Settings, flat, sgd_step
from tests.quadratic import Quadratic

BASE = Settings(tau=4, gap="none", outer_lr=0.5, outer_momentum=0.2)
WAYS: dict[str, dict[str, Any]] = {
    "outer": {},
    "at once": {"delay": 0},
    "mix": {"merge": "mix", "delay": 1},
    "keep": {"merge": "keep", "delay": 2},
    "keep, a round late": {"merge": "keep"},
}
QUADRATICS = ((2, 0.9), (6, 0.8), (8, 0.9))  # delay of 8 local steps, and q


def train(rank: int, world_size: int) -> dict[str, list[tuple[Tensor, float]]]:
    """What each worker sent, and what is told of it a round later."""
    found: dict[str, list[tuple[Tensor, float]]] = {}
    for name, changes in WAYS.items():
        params = problems.odd_parameters()
        co2, sent, told = replace(BASE, **changes).build(params), [], []
        for step in range(24):
            sgd_step(params, rank, step)
            before = flat(params)
            if co2.step():
                sent.append(flat(params) if "merge" in changes else before)
                told.append(co2.stats.as_dict()["disagreement"])
        co2.finish()
        found[name] = list(zip(sent, told if name == "at once" else told[1:], strict=False))
    return found


def noisy(rank: int, world_size: int) -> list[float]:
    """The mean square of a number's distance as the statistics tell it, over many numbers and rounds."""
    means = []
    for delay, q in QUADRATICS:
        p = nn.Parameter(torch.zeros(20_000))
        late: Any = "boundary" if delay == 8 else delay
        config = CO2Config(8, merge="keep", delay=late, gap="none", outer_momentum=0.0, clip=None)
        co2, draw, told = CO2([p], config), torch.Generator().manual_seed(rank), []
        for _ in range(24 * 8):
            with torch.no_grad():
                p.mul_(q).add_(torch.randn(p.shape, generator=draw))
            if co2.step():
                told.append(co2.stats.as_dict()["disagreement"] ** 2 / p.numel())
        co2.finish()
        means.append(sum(told[12:]) / 12)
    return means


@pytest.fixture(scope="module")
def trained() -> list[dict[str, list[tuple[Tensor, float]]]]:
    return run_distributed(train, 3)


@pytest.mark.parametrize("name", WAYS)
def test_it_is_the_workers_distance_from_their_mean(trained: list[Any], name: str):
    rows = [[sent for sent, _ in worker[name]] for worker in trained]
    for round_, sent in enumerate(zip(*rows, strict=True)):
        x = torch.stack(sent)
        expected = float((x - x.mean(0)).square().sum(1).mean().sqrt())
        for worker in trained:
            assert worker[name][round_][1] == pytest.approx(expected, rel=1e-6), (name, round_)
    assert len(rows[0]) > 3 and expected > 0.01


def test_under_noise_it_is_what_the_theory_says():
    """(1 - 1/G) V / (1 - v^2): docs/theory.md."""
    told = run_distributed(noisy, 3)
    assert told[0] == told[1] == told[2]
    for (delay, q), seen in zip(QUADRATICS, told[0], strict=True):
        assert seen == pytest.approx(Quadratic("keep", q, 8, delay).apart(3), rel=0.02)
