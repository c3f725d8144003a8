"""CO2 with every wire format, on real processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import UserError
from core.assembly.config import WireConfig
from core.testing import run_distributed
from tests import problems
from tests.core.test_quantized import NARROW, ROUNDS, WAYS, templates, written
from tests.problems import Mean, Settings

BASE = Settings(tau=2, outer_momentum=0.4, outer_lr=0.5, clip=0.1)
CONFIGS = [BASE, *(replace(BASE, wire=w, error_feedback=f) for w, f in WAYS)]
AT_ONCE = [replace(c, gap="none", delay=0) for c in CONFIGS if c.wire in ("float32", "float16", "int4")]
WITHIN = {"float32": 0.0, "bfloat16": 3e-3, "float16": 4e-4, "int8": 1e-2, "int4": 0.15, "int2": 1.2}


def released(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """A bucket's mean rounded a few times and then exact, with what was held back: all that has landed, and the exact
    means added up."""
    lossy, _ = templates()
    mean = Mean(lossy, {"steps": 1, "weight": 1}, WireConfig("int4").reducer)
    landed = [torch.zeros_like(b.payload, dtype=torch.float64) for b in mean.buckets]
    for round in range(ROUNDS + 1):
        for i, bucket in enumerate(mean.buckets):
            bucket.payload[:] = written(rank, round, i, bucket.numel, bucket.flat.dtype)
        mean.scalars.set("steps", 1.0)
        mean.scalars.set("weight", 1.0)
        if round == ROUNDS:
            mean.reducer.release()
            for bucket in mean.buckets:
                dist.all_reduce(bucket.payload.div_(world_size))
        else:
            mean.launch()
            mean.wait()
        for total, bucket in zip(landed, mean.buckets, strict=True):
            total += bucket.payload
    exact = []
    for i, bucket in enumerate(mean.buckets):
        sent = [written(r, n, i, bucket.numel, bucket.flat.dtype) for r in range(world_size) for n in range(ROUNDS + 1)]
        exact.append(torch.stack(sent).double().sum(0) / world_size)
    return list(zip(landed, exact, strict=True))


def test_another_wire_sends_what_error_feedback_holds_back():
    for result in run_distributed(released, 3):
        for landed, exact in result:
            torch.testing.assert_close(landed, exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def finals(rank: int, world_size: int) -> list[list[Tensor]]:
    return [problems.train_co2(problems.odd_parameters(), rank, 11, c) for c in (*CONFIGS, *AT_ONCE)]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_workers_agree_bit_for_bit_and_stay_near_float32(world_size: int):
    """With and without delay; every setting gives parameters of its own."""
    results = run_distributed(finals, world_size)
    for configs, begin in ((CONFIGS, 0), (AT_ONCE, len(CONFIGS))):
        runs = [r[begin : begin + len(configs)] for r in results]
        for i, config in enumerate(configs):
            for run in runs:
                assert all(torch.equal(a, b) for a, b in zip(run[i], runs[0][i], strict=True)), config
            error = max((a - b).abs().max().item() for a, b in zip(runs[0][i], runs[0][0], strict=True))
            assert error <= WITHIN[config.wire], config
            for j in range(i):
                assert (runs[0][i][-1] - runs[0][j][-1]).abs().max() > 1e-6, f"{config} and {configs[j]} do the same"


def move(rank: int) -> Tensor:
    """int4's scale, a seventh of the first element, rounds the others to nothing."""
    return torch.tensor([rank + 1.0] + [0.031 + 0.0117 * rank**1.7] * 19, dtype=torch.float64)


MOVES = 28


def constant_moves(rank: int, world_size: int, rests: bool, feedbacks: tuple[bool, ...]) -> list[Any]:
    """With each delay and with and without error feedback; see moved_constantly."""
    configs = [replace(PLAIN, delay=delay, error_feedback=feedback) for delay in (0, 1) for feedback in feedbacks]
    return [moved_constantly(rank, world_size, config, rests) for config in configs]


def moved_constantly(rank: int, world_size: int, config: Settings, rests: bool) -> tuple[Tensor, float, list[Tensor]]:
    """MOVES rounds of `move`: parameters, their largest distance from the exact mean, state.

    rests: finish() now and then, which sends means of nothing.
    """
    p = nn.Parameter(torch.zeros(20, dtype=torch.float64))
    exact = sum(move(r) for r in range(world_size)) / world_size
    co2 = config.build([p])
    worst = 0.0
    for round in range(MOVES):
        with torch.no_grad():
            p.sub_(move(rank))
        co2.step()
        if rests and round % 10 == 9:
            co2.finish()
        arrived = round + 1 - config.delay
        worst = worst if rests else max(worst, (p.detach() + arrived * exact).abs().max().item())
    co2.finish()
    return p.detach().clone(), worst, [f.clone() for fs in co2.reducer.state.values() for f in fs]


PLAIN = Settings(
    tau=1, outer_momentum=0.0, outer_lr=1.0, gap="none", clip=None, allow_unstable=True, delay=0, wire="int4"
)


def test_error_feedback_keeps_the_drift_bounded():
    """By half a step at each encoding, a step being a seventh of the largest. Else the mean, 0.03685, never arrives."""
    drifts = [drift for _, drift, _ in run_distributed(constant_moves, 2, False, (True, False))[0]]
    for delay, (bounded, unbounded) in enumerate((drifts[:2], drifts[2:])):
        assert bounded <= 2 * (1.5 / 7 / 2) * 1.1  # the feedback makes the largest a little larger
        assert unbounded == pytest.approx((MOVES - delay) * 0.03685, rel=1e-6)


def test_nothing_is_lost_not_even_where_empty_means_are_thrown_away():
    """What arrived and what is held back are the sum of all moves: finish() sends means that nobody uses."""
    for results in zip(*run_distributed(constant_moves, 3, True, (True,)), strict=True):
        own = sum(r[2][0][:20] for r in results) / 3
        of_means = results[0][2][1][:20]  # all 20 elements are in worker 0's chunk
        assert own.abs().max() > 1e-3 and of_means.abs().max() > 1e-3, "both hold something back"
        total = MOVES * sum(move(r) for r in range(3)) / 3
        torch.testing.assert_close(own + of_means - results[0][0], total, rtol=0, atol=1e-11)
        assert all(torch.equal(r[0], results[0][0]) for r in results)


def poisoned(rank: int, world_size: int) -> list[Tensor]:
    ends = []
    for wire in NARROW:
        p = nn.Parameter(torch.zeros(2000))
        co2 = replace(PLAIN, wire=wire).build([p])
        with torch.no_grad():
            p.sub_(torch.linspace(0, 1, 2000))
            p[1300] = float("nan") if rank == 1 else 1.0
        co2.step()
        ends.append(p.detach().clone())
    return ends


def test_one_workers_nan_reaches_nobody():
    """The mean is that of the two others, who sent the same."""
    want = -torch.linspace(0, 1, 2000)
    want[1300] = 1.0
    half_a_level = {"int2": 1 / 2}
    for result in run_distributed(poisoned, 3):
        for wire, p in zip(NARROW, result, strict=True):
            torch.testing.assert_close(p, want, rtol=0, atol=1.1 * half_a_level.get(wire, 0.073))


# -- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"wire": "float32"}, {"wire": "int8", "error_feedback": False}])
def test_a_checkpoint_of_another_wire_is_refused(other: dict[str, Any]):
    methods = [replace(BASE, **o).build([nn.Parameter(torch.zeros(3))]) for o in ({"wire": "int8"}, other)]
    for writer, reader in (methods, methods[::-1]):
        with pytest.raises(UserError, match="checkpoint.*error_feedback"):
            reader.load_state_dict(writer.state_dict())
