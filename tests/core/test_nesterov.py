"""Nesterov's outer step with every merge and delay, on real processes against the executable specification.

tests/core/test_resume.py resumes it, tests/core/test_reference.py has its limits, tests/core/test_outer.py its formula.
"""

from dataclasses import replace
from pathlib import Path
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
from tests.on_ranks import alike, on_ranks
from tests.problems import LR, Settings, assert_traces_equal, check_grid, flat, gradient, sgd_step, train_reference

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


@pytest.mark.parametrize("gap", ["none", "norm", "elementwise"])
@on_ranks(2)
def test_merged_as_soon_as_it_arrives(rank: int, gap: Any):
    """Every average has arrived before the next local step, which is delay 1."""
    params = problems.odd_parameters()
    start, settings = flat(params), replace(KEEP, gap=gap, delay="auto")
    co2, trace, merged = settings.build(params), [], []
    for step in range(STEPS):
        sgd_step(params, rank, step)
        co2.allreduce.drain()
        if co2.step():
            trace.append(flat(params))
            merged.append(co2.stats.merged_after)
    co2.finish()
    co2.close()
    expected = train_reference(replace(settings, delay=1), 2, STEPS, start, rank)
    assert_traces_equal([*trace, flat(params)], expected)
    assert alike(flat(params)) and merged[1:] == [1, 1]


@on_ranks(2)
def test_with_a_late_peer(rank: int, tmp_path: Path):
    """Rank 1 comes to its second boundary only after rank 0 has gone a local step past it, and waits in the next."""
    gate, params = tmp_path / "gate", problems.odd_parameters()
    start, settings = flat(params), replace(KEEP, gap="norm", delay=2)
    co2, trace = settings.build(params), []
    for step in range(STEPS):
        sgd_step(params, rank, step)
        if rank == 1 and step == 7:
            problems.wait_for(gate)
        if co2.step():
            trace.append(flat(params))
        if rank == 0 and step == 8:
            assert not co2.allreduce.done(), "the peer has not sent, yet the average is there"
            gate.touch()
    co2.finish()
    co2.close()
    assert_traces_equal([*trace, flat(params)], train_reference(settings, 2, STEPS, start, rank))
    assert alike(flat(params))


@on_ranks(2)
def test_workers_that_end_after_unlike_steps_are_equal(rank: int):
    params = problems.odd_parameters()
    co2 = replace(KEEP, gap="elementwise", delay=2).build(params)
    problems.take_steps(co2, params, rank, range(5 + 6 * rank))
    co2.finish()
    co2.close()
    assert alike(flat(params), *co2._x, *co2._m, *co2._directions)


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
