"""A slower worker takes fewer local steps, counts by them, and nobody waits for it."""

import time
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.reference import LateReference
from core import CO2Config, UserError, make_method
from core.adaptive.pace import WINDOW, Pace
from core.adaptive.tau import TauTuner
from core.stats import RoundStats
from core.testing import run_distributed
from tests.problems import LR, Settings, flat, gradient, odd_parameters, sgd_step


def paced(*seconds: float, rank: int) -> Pace:
    pace = Pace(rank, len(seconds))
    pace.hear(seconds)
    assert pace.steps(24) == 24, "what is heard counts from the round's end on"
    pace.follow()
    return pace


def test_steps_are_in_proportion_to_speed():
    assert [paced(0.1, 0.2, 0.15, rank=r).steps(24) for r in range(3)] == [24, 12, 16]
    assert paced(0.1, 9.0, rank=1).steps(24) == 2, "a round's first step is not timed"
    assert [paced(0.1, 9.0, rank=1).steps(tau) for tau in (1, 2)] == [1, 2]


def test_one_slow_round_does_not_count():
    pace = paced(0.1, 0.1, rank=1)
    for seconds in (0.1, 5.0, 0.1):
        pace.hear([0.1, seconds])
        pace.follow()
    assert pace.steps(24) == 24
    again = Pace(1, 2)
    again.load_state_dict(pace.state_dict())
    for _ in range(WINDOW):
        for p in (pace, again):
            p.hear([0.1, 0.3])
            p.follow()
    assert pace.steps(24) == again.steps(24) == 8


def test_nothing_is_decided_before_all_have_told():
    pace = Pace(0, 2)
    pace.hear([0.0, 0.1])
    pace.follow()
    assert pace.steps(24) == 24
    places = torch.ones(2)
    pace.tell(RoundStats(step_seconds=0.25), RoundStats(), places)
    pace.tell(RoundStats(), RoundStats(), places)  # a round of one step, which was not timed
    assert places.tolist() == [0.25, 0.0]


def test_tau_auto_goes_by_the_fastest_worker_then():
    for by_speed, tau in ((False, 5), (True, 10)):
        tuner = TauTuner(192, by_speed=by_speed)
        for number in range(4):
            tuner.hear(number, [0.5, 1.0], [4.0, 4.0])
        assert tuner.tau == tau


FAST, TAU, ROUNDS = 0.02, 8, 10  # seconds of the faster worker's step


def two_speeds(rank: int, world_size: int, s: Settings, shard: bool) -> dict[str, Any]:
    """As a train script goes: step counts those that are left out, too."""
    params = odd_parameters()
    config = CO2Config(**{**vars(s.co2), "steps": "by_speed"})
    _, method = make_method("co2", nn.ParameterList(params), co2=config, shard=shard)
    seen: dict[str, Any] = {"steps": [], "trace": []}
    step, due = 0, time.perf_counter()
    while step < TAU * ROUNDS:
        due = max(due, time.perf_counter() - FAST) + FAST * (1 + rank)
        sgd_step(params, rank, step)
        time.sleep(max(0.0, due - time.perf_counter()))
        step += 1
        if method.step():
            step += method.pacing.skipped
            seen["steps"].append(method.stats.local_steps)
            seen["trace"].append(flat(params))
    method.finish()
    return seen | {"end": flat(params)}


def replay(s: Settings, steps: list[list[int]]) -> tuple[list[Tensor], Tensor]:
    """The reference, with so many steps [workers][rounds] of each worker."""
    delay = None if s.delay == "boundary" else s.delay
    ref = LateReference(
        flat(odd_parameters()).expand(2, -1).clone(), s.tau, s.outer_lr, s.outer_momentum, s.gap, s.clip, delay=delay,
        merge=s.merge, kappa=s.mix,
    )  # fmt: skip
    workers = torch.arange(2, dtype=torch.float64)[:, None]
    for number in range(ROUNDS):
        mine = torch.tensor([taken[number] for taken in steps])
        ref.weights = mine.double()
        for k in range(TAU):
            moved = ref.x - LR * gradient(ref.x, workers, number * TAU + k)
            ref.x.copy_(torch.where((k < mine)[:, None], moved, ref.x))
            ref.local_step()
    rounds = [rows[0] for rows in ref.restarts]
    ref.finish()
    return rounds, ref.x[0]


WAYS = [(Settings(tau=TAU), False), (Settings(tau=TAU), True), (Settings(tau=TAU, merge="keep", gap="none"), False)]


@pytest.mark.parametrize(("s", "shard"), WAYS, ids=["paper", "shard", "keep"])
def test_a_worker_half_as_fast_takes_fewer_steps_and_counts_by_them(s: Settings, shard: bool):
    results = run_distributed(two_speeds, 2, s, shard)
    steps = [result["steps"] for result in results]
    assert len(steps[0]) == len(steps[1]) == ROUNDS
    assert steps[0][:1] == steps[1][:1] == [TAU] and median(steps[0][4:]) == TAU
    assert median(steps[1][4:]) <= 0.75 * TAU, steps  # half, on a busy machine about that
    rounds, end = replay(s, steps)
    for result in results:
        torch.testing.assert_close(result["end"], end, rtol=1e-9, atol=1e-9)
    if s.merge == "outer":
        for ours, want in zip(results[0]["trace"], rounds, strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)


def test_what_does_not_know_it_refuses_it():
    with pytest.raises(UserError, match="steps='fair'"):
        CO2Config(steps="fair")  # type: ignore[arg-type]
    for name in ("local", "slowmo", "ddp", "overlap_local", "delayed"):
        with pytest.raises(UserError, match="by_speed"):
            make_method(name, nn.Linear(2, 2), co2=CO2Config(tau=2, steps="by_speed"))
