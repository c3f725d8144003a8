"""Schedules by hand, that CO2 follows them, and what a change of tau does to the outer step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, CompressionConfig, UserError
from core.baselines.local import OverlapLocalSGD, SlowMo, SlowMoConfig
from core.config import Schedule, build_args, tuner_for
from core.outer import carried
from core.tau import AdaptiveTau
from core.testing.reference import Reference
from tests import problems
from tests.on_ranks import alike, on_ranks
from tests.problems import LR, Settings, assert_traces_equal, flat, gradient, train_with


def ramp_tau(tau: int, first: int = 1) -> Schedule:
    """Local steps a round: first, twice that, and so on up to tau."""
    return lambda number: {"tau": min(tau, first << number)}


@pytest.mark.parametrize(
    ("config", "schedule", "closes"),
    [
        (CO2Config(tau=12), ramp_tau(12, first=3), [3, 9, 21, 33]),
        (CO2Config(tau=4, merge="keep_local", delay=2), ramp_tau(4, first=2), [2, 6, 10]),
        (CO2Config(tau=2), lambda number: {"tau": 3} if number == 1 else {}, [2, 5, 7, 9, 11]),
    ],
)
def test_co2_follows_a_schedule_of_tau(config: CO2Config, schedule: Schedule, closes: list[int]):
    """It says of each round what differs in it from the config, of that round alone: a run that goes on from a
    checkpoint asks only for those to come."""
    co2 = CO2([nn.Parameter(torch.ones(2))], config, schedule=schedule)
    assert [step for step in range(1, closes[-1] + 2) if co2.step()] == closes


def test_the_choice_of_a_format_knows_the_tau_of_now():
    config = CO2Config(tau=12, gap="none", merge="keep_local", compression=CompressionConfig("auto"))
    ramp = (3, 6, 12)
    built = build_args(config, {}, lambda number: {"tau": ramp[number]})
    assert not isinstance(built["sync_schedule"], AdaptiveTau), "one worker alone has no format to choose"
    tuner = tuner_for(config, 2)
    assert tuner is not None
    pacing = AdaptiveTau(lambda number: ramp[number], tuner)
    for number, tau in enumerate(ramp):
        pacing.begin(number)
        assert pacing.tau == tuner.tau == tau


def test_a_schedule_that_turns_the_order_of_a_round_round_is_refused():
    """A delay of tau is a whole round. Where tau grows to four, it would be within one."""
    config = CO2Config(tau=2, delay=2, gap="none", outer_lr=0.5, outer_momentum=0.0)
    co2 = CO2([nn.Parameter(torch.ones(2))], config, schedule=lambda number: {"tau": 2 if number < 1 else 4})
    with pytest.raises(UserError, match="delay=2: merge restart would discard the local steps [^\n]*$"):
        for _ in range(4):
            co2.step()


BLOCKING = CO2Config(tau=4, gap="none", clip=None, delay=0)


def descend(method: Any, p: Tensor, steps: int) -> list[float]:
    """Local steps of 1 downwards; where each round's merge has led."""
    ends = []
    for _ in range(steps):
        with torch.no_grad():
            p -= 1.0
        if method.step():
            ends.append(p.item())
    return ends


def with_taus(method: Any, *taus: int) -> Any:
    """So many local steps a round, again and again; the first number is that of the method."""
    method.sync_schedule._given = lambda number: taus[number % len(taus)]
    return method


def test_a_leap_of_tau_does_not_overshoot():
    """Each local step takes a twentieth of the error; tau leaps from 4 to 96, which solve it. Four steps' momentum,
    24 / 2 times as long, would lead about twice as far behind the minimum as the error was."""
    ref = Reference(torch.ones(1, 1, dtype=torch.float64), 4, gap="none", phi=None, delay=0)
    for number in range(6):
        ref.tau = 4 if number < 2 else 96
        ref.run(lambda x, _: x, 0.05, ref.tau)
    before, leap, *after = (abs(x.item()) for x in ref.outer[2:])
    assert 0.3 < before < 0.8 and leap < before and max(after) < before
    assert carried(0.5, 2.0) == carried(0.5, 24.0) == 1.0 and carried(0.5, 0.5) == 0.25


def test_momentum_shrinks_with_tau_and_a_checkpoint_holds_its_length():
    """tau 4, 2, 2: m = 4, then 0.5 x 2 / 4 x 4 + 2 = 3, and 0.5 x 3 + 2 = 3.5. The state is taken where a round of 2 is
    to follow a momentum of rounds of 4, by another object."""
    taus = {0: 4, 1: 2, 2: 2}
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    first = CO2([p], BLOCKING, schedule=lambda number: {"tau": taus[min(number, 2)]})
    assert descend(first, p, 4) == [-4]
    resumed = CO2([p], BLOCKING, schedule=lambda number: {"tau": taus[min(number, 2)]})
    resumed.load_state_dict(first.state_dict())
    assert descend(resumed, p, 4) == [-7, -10.5]


def test_momenta_of_the_baselines_grow_with_tau_too():
    """SlowMo as above. Overlap-Local-SGD pulls by 0.6, and what lands was sent a round before: rounds of 1, 1, 2 steps
    send -0.4, -0.8, -1.768; z moves to -0.4, -1.08; then v = min(1, 0.7 x 2) x -0.68 + (-1.768 + 1.08)."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    slowmo = with_taus(SlowMo([p], 1, SlowMoConfig(outer_momentum=0.5)), 1, 2)
    assert descend(slowmo, p, 1) == [-1]
    assert descend(slowmo, p, 2) == [-4]
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    overlap = with_taus(OverlapLocalSGD([p], 1), 1, 1, 2, 2)
    descend(overlap, p, 2)
    descend(overlap, p, 2)
    assert overlap._v[0].item() == pytest.approx(-0.68)
    descend(overlap, p, 2)
    assert overlap._v[0].item() == pytest.approx(-1.368)


RAMPS = (3, 5, 4, 2, 6)  # the first as in all settings
CHANGING = [
    Settings(tau=3, gap="elementwise"),
    Settings(tau=3, gap="norm", outer_lr=0.6),
    Settings(tau=3, gap="none", delay=0),
    Settings(tau=3, gap="norm", outer_momentum=0.3, merge="keep_local", delay=1),
    Settings(tau=3, gap="none", outer_momentum=0.3, merge="keep_local", delay=1),
    Settings(tau=3, gap="elementwise", merge="keep_local"),
    Settings(tau=3, gap="elementwise", nesterov=True),
    Settings(tau=3, gap="norm", outer_momentum=0.3, merge="keep_local", delay=1, nesterov=True),
]


def changes_of(c: Settings) -> Schedule:
    """Tau, the outer step and momentum, and the clipping, all of them another in every round."""

    def changes(number: int) -> dict[str, Any]:
        share = (1.0, 0.5, 0.8, 0.7, 0.9)[min(number, 4)]
        settings = {"outer_lr": share * c.outer_lr, "outer_momentum": share**2 * c.outer_momentum, "clip": 0.3 * share}
        return {"tau": RAMPS[number % len(RAMPS)]} | settings

    return changes


def changing_reference(c: Settings, world_size: int, rank: int) -> list[Tensor]:
    ref, workers = problems.reference(c, world_size, flat(problems.odd_parameters()))
    number, trace, changes = 0, [], changes_of(c)
    for step in range(26):
        ref.tau, ref.alpha, ref.beta, ref.phi = changes(number).values()
        ref.x.sub_(LR * gradient(ref.x, workers, step))
        if ref.local_step():
            trace.append(ref.x[rank].clone())
            number += 1
    ref.finish()
    return [*trace, ref.x[rank]]


@pytest.mark.parametrize(
    "how",
    [{}, pytest.param({"shard": True}, marks=pytest.mark.slow), {"offload": True}],
    ids=["whole", "shard", "offload"],
)
@on_ranks(2, timeout=200)
def test_with_settings_that_change_all_equal_the_reference(rank: int, how: dict[str, Any]):
    shared = [c for c in CHANGING if (c.nesterov, c.merge, c.delay) == (False, "restart", "boundary")]

    def trained(c: Settings, steps: int) -> list[Tensor]:
        params, schedule = problems.odd_parameters(), changes_of(c)
        method = CO2(params, c.co2, schedule=schedule, **how) if how else c.build(params, schedule=schedule)
        return train_with(method, params, rank, steps)

    for c in shared if how else CHANGING:
        assert_traces_equal(trained(c, 26), changing_reference(c, 2, rank))
    assert alike(trained(CHANGING[0], 26 - rank)[-1]), "a worker that has finished early follows the schedule"
