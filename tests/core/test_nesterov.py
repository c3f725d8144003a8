"""Nesterov's outer step with every merge and delay, on real processes against the executable specification.

tests/core/test_resume.py resumes it, tests/core/test_reference.py has its limits, tests/core/test_outer.py its formula.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from core.baselines import DiLoCo
from core.baselines.local import DiLoCoConfig
from core.compression.formats import BLOCK, decode, encode
from core.config import CO2Config
from core.testing.reference import Reference
from tests import problems
from tests.on_ranks import on_ranks
from tests.problems import LR, Settings, assert_traces_equal, check_grid, flat, gradient, train_reference

STEPS = 14  # tau = 4 does not divide it
BASE = Settings(tau=4, outer_momentum=0.3, outer_lr=0.6, clip=0.1, allow_unstable=True, nesterov=True)
KEEP = replace(BASE, merge="keep_local", gap="none")


def grid() -> list[Settings]:
    """Every merge and delay, with every penalty that goes with it."""
    late: list[dict[str, Any]] = [{"merge": "keep_local", "delay": d} for d in (1, 2, "boundary")]
    configs = [replace(BASE, gap=gap, **way) for way in late for gap in ("elementwise", "norm", "none")]
    configs += [replace(BASE, gap="none", delay=0, merge=merge) for merge in ("restart", "keep_local")]
    return configs + [replace(KEEP, delay=2, clip=None), replace(KEEP, delay=2, gap="norm", clip=None)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_equals_the_reference_round_by_round(world_size: int):
    check_grid(world_size, grid(), STEPS)


class Rounding:
    """What a format with error feedback leaves of a mean of workers' differences, [numel] each.

    once: the owner of a part keeps the mean as it is, and sends x.
    """

    def __init__(self, numel: int, compression: str = "int4", workers: int = 2, *, once: bool = False):
        self.size, self.once = -(-numel // (workers * BLOCK)) * workers * BLOCK, once
        self.compression, self.workers = compression, workers
        self.errors = torch.zeros(workers + 1, self.size, dtype=torch.float64)  # of the workers, and of their mean

    def __call__(self, own: Tensor, weights: Tensor) -> Tensor:
        assert (weights == 1).all()
        rows = [self.send(pad(row, (0, self.size - len(row))), i) for i, row in enumerate(own)]
        mean = sum(rows, torch.zeros(())) / self.workers
        return (mean if self.once else self.send(mean, self.workers))[: own.shape[1]]

    def send(self, x: Tensor, i: int) -> Tensor:
        total = x + self.errors[i]
        decoded = decode(encode(total, self.compression), self.compression, total.dtype)
        self.errors[i] = total - decoded
        return decoded


@pytest.mark.parametrize("delay", [0, 2])
@on_ranks(2)
def test_through_int4(rank: int, delay: int):
    start = torch.linspace(-1, 1, 700, dtype=torch.float64)
    params = [nn.Parameter(start.clone())]
    settings = replace(KEEP, gap="none" if delay == 0 else "norm", delay=delay, compression="int4")
    trace = problems.train_co2(params, rank, 3 * settings.tau, settings)  # finish() has no steps to send
    c, workers = settings, torch.arange(2, dtype=torch.float64)[:, None]
    ref = Reference(
        start.expand(2, -1).clone(), c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip,
        delay=delay, merge=c.merge, nesterov=True, reduce=Rounding(len(start)),
    )  # fmt: skip
    ref.run(lambda rows, step: gradient(rows, workers, step), LR, 3 * c.tau)
    rounds = [rows[rank] for rows in ref.restarts]
    ref.finish()
    assert_traces_equal(trace, [*rounds, ref.x[rank]])
    wide = train_reference(replace(c, compression="float32"), 2, 3 * c.tau, start, rank)
    assert (wide[-1] - trace[-1]).abs().max() > 1e-4, "nothing was rounded"


@on_ranks(2)
def test_diloco_is_the_blocking_step_without_penalty_and_clip(rank: int):
    start = flat(problems.odd_parameters())
    for own in (DiLoCoConfig(), DiLoCoConfig(0.5, 0.4)):
        step: dict[str, Any] = {"outer_lr": own.outer_lr, "outer_momentum": own.outer_momentum}
        blocking = Settings(3, gap="none", clip=None, delay=0, nesterov=True, **step)
        trace = problems.train("diloco", problems.odd_parameters(), rank, STEPS, co2=CO2Config(tau=3), diloco=own)
        assert_traces_equal(trace, train_reference(blocking, 2, STEPS, start, rank))
        direct = problems.train_with(DiLoCo(p := problems.odd_parameters(), 3, own), p, rank, STEPS)
        assert all(map(torch.equal, trace, direct))


def test_its_last_step_is_kept_only_where_a_penalty_reads_it():
    for gap in ("none", "norm", "elementwise"):
        for nesterov in (False, True):
            co2 = replace(BASE, gap=gap, nesterov=nesterov).build(problems.odd_parameters())
            assert ("outer_step" in co2.state) is (nesterov and gap != "none")
