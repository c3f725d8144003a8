"""A slower worker takes fewer local steps, counts by them, and nobody waits for it."""

import time
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core.co2
from core import CO2Config, make_method
from core.adaptive.pace import WINDOW, BySpeed
from core.adaptive.tau import TauTuner
from core.flight import Flight
from core.riders import Heard
from core.testing import run_distributed
from tests.problems import LR, Settings, flat, gradient, odd_parameters, reference, refusal, sgd_step


def hears(by_speed: BySpeed, *seconds: float) -> None:
    by_speed.hear({"step_seconds": seconds}, Heard(0, len(seconds), len(seconds)))


def paced(*seconds: float, rank: int) -> BySpeed:
    by_speed = BySpeed(rank, len(seconds))
    hears(by_speed, *seconds)
    assert by_speed.steps(24) == 24, "what is heard counts from the round's end on"
    by_speed.end()
    return by_speed


def test_steps_are_in_proportion_to_speed():
    assert [paced(0.1, 0.2, 0.15, rank=r).steps(24) for r in range(3)] == [24, 12, 16]
    assert paced(0.1, 9.0, rank=1).steps(24) == 2, "a round's first step is not timed"
    assert [paced(0.1, 9.0, rank=1).steps(tau) for tau in (1, 2)] == [1, 2]


def test_one_slow_round_does_not_count():
    by_speed, again = paced(0.1, 0.1, rank=1), BySpeed(1, 2)
    for seconds in (0.1, 5.0, 0.1):
        hears(by_speed, 0.1, seconds)
        by_speed.end()
    assert by_speed.steps(24) == 24
    again.load_state_dict(by_speed.state_dict(), of_others=False)
    for _ in range(WINDOW):
        for one in (by_speed, again):
            hears(one, 0.1, 0.3)
            one.end()
    assert by_speed.steps(24) == again.steps(24) == 8


def test_nothing_is_decided_before_all_have_told():
    assert paced(0.0, 0.1, rank=0).steps(24) == 24
    method = core.co2.CO2([nn.Parameter(torch.ones(2))], flight=one_of_two, riders=[by_speed := BySpeed(0, 2)])
    for seconds in (0.25, 0.0):  # then a round of one step, which was not timed
        method.scalars.set("step_seconds", torch.ones(2))
        method.stats.step_seconds = seconds
        by_speed.pack()
        assert method.scalars["step_seconds"].tolist() == [0.25, 0.0]


def one_of_two(device: torch.device) -> Flight:
    flight = Flight(device)
    flight.places = 2
    return flight


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
    ref, workers = reference(s, 2, flat(odd_parameters()))
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
    for name in ("local", "slowmo", "ddp", "overlap_local", "delayed"):
        assert "by_speed" in refusal(make_method, name, nn.Linear(2, 2), co2=CO2Config(tau=2, steps="by_speed"))
