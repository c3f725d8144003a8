"""Schedules by hand, and that CO2 follows them."""

import pytest
import torch
from torch import nn

from core import CO2, CO2Config, UserError
from core.schedules import QuadraticTau, from_text, ramp_tau, warm_up_momentum


def test_momentum_warms_up_in_equal_steps():
    follow = warm_up_momentum(0.4, rounds=4)
    assert [follow(n)["outer_momentum"] for n in range(6)] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_tau_doubles_up_to_its_end():
    follow = ramp_tau(12, first=3)
    assert [follow(n)["tau"] for n in (0, 1, 2, 3, 999)] == [3, 6, 12, 12, 12]


def test_the_quadratic_rule_takes_the_rate_where_a_round_begins():
    """lr 1 to step 5, then 0.25, then 0: tau = (1 / lr)^2 within 2 and 20."""
    follow = QuadraticTau(lambda step: 1.0 if step < 6 else 0.25 if step < 30 else 0.0, scale=1.0, least=2, most=20)
    assert [follow(n)["tau"] for n in (3, 0, 1, 2, 4, 5)] == [16, 2, 2, 2, 16, 20]  # asked in any order


def test_the_command_lines_words_make_schedules_that_go_together():
    config = CO2Config(tau=8, outer_momentum=0.4, sync_steps=3)
    assert from_text((), config, lambda step: 1.0) is None
    both = from_text(("warm_up_momentum:2", "ramp_tau:3"), config, lambda step: 1.0)
    assert both is not None
    assert [dict(both(n)) for n in range(3)] == [
        {"outer_momentum": 0.0, "tau": 3},
        {"outer_momentum": 0.2, "tau": 6},
        {"outer_momentum": 0.4, "tau": 8},
    ]
    steps: list[int] = []
    rule = from_text(("quadratic:0.5:2",), config, lambda step: steps.append(step) or 0.1)
    assert rule is not None and [rule(n)["tau"] for n in range(2)] == [25, 25]
    assert steps == [3, 28], "the first round begins after the synchronous steps"


def test_co2_follows_a_schedule_of_tau():
    co2 = CO2([nn.Parameter(torch.ones(2))], CO2Config(tau=12), schedule=ramp_tau(12, first=3))
    assert [step for step in range(1, 40) if co2.step()] == [3, 9, 21, 33]


def test_impossible_schedules_are_refused():
    for build, named in (
        (lambda: ramp_tau(3, first=4), "first=4"),
        (lambda: warm_up_momentum(0.5, 0), "rounds=0"),
        (lambda: QuadraticTau(lambda step: 1.0, scale=0.0, least=1), "scale=0.0"),
        (lambda: QuadraticTau(lambda step: 1.0, scale=1.0, least=9, most=3), "least=9"),
    ):
        with pytest.raises(UserError, match=named):
            build()


def test_a_schedule_that_turns_the_order_of_a_round_round_is_refused():
    """Merge mix two steps after the sending; where tau comes down to two, that would be the boundary after it."""
    config = CO2Config(tau=4, merge="mix", delay=2, gap="none", outer_momentum=0.0)
    co2 = CO2([nn.Parameter(torch.ones(2))], config, schedule=lambda number: {"tau": 4 if number < 1 else 2})
    with pytest.raises(UserError, match="tau=2 after tau=4, with merge='mix' and delay=2: [^\n]*$"):
        for _ in range(4):
            co2.step()
    keeps = CO2([nn.Parameter(torch.ones(2))], CO2Config(tau=4, merge="keep", delay=2), schedule=ramp_tau(4, first=2))
    assert [step for step in range(1, 11) if keeps.step()] == [2, 6, 10]
