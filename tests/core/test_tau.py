"""The choice of tau, on times given by hand."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core import CO2, CO2Config, UserError, make_method
from core.adaptive.tau import CALIBRATION_TAU, NUMBERS, SETTLE, WAITS, TauTuner, Tuned, smallest_tau
from core.assembly.config import WireConfig
from core.rounds import Heard
from core.stats import Coming, RoundStats


@pytest.mark.parametrize(
    ("allreduce", "step", "margin", "tau"),
    [(1.0, 0.1, 0.0, 10), (1.0, 0.1, 0.25, 13), (0.96, 0.04, 0.25, 30), (0.001, 0.04, 0.25, 1), (0.3, 0.1, 0.0, 3)],
)
def test_the_smallest_tau_that_covers_the_allreduce(allreduce: float, step: float, margin: float, tau: int):
    assert smallest_tau(allreduce, step, margin) == tau
    assert tau * step >= (1 + margin) * allreduce - 1e-9
    assert tau == 1 or (tau - 1) * step < (1 + margin) * allreduce


def tell(tuner: TauTuner, n: int, step: float, allreduce: float) -> None:
    for _ in range(n):
        tuner.hear(0, [step, step / 2], [allreduce, allreduce * 1.5])


def test_calibration_leaves_out_the_first_round_and_then_decides():
    tuner = TauTuner(192)
    assert tuner.tau == CALIBRATION_TAU
    assert tuner.hear(1, [9.0, 9.0], [9.0, 9.0]) is None  # the warm-up
    assert tuner.hear(2, [0.04, 0.03], [0.9, 0.8]) is None
    decision = tuner.hear(3, [0.04, 0.03], [0.8, 0.9])
    assert decision is not None and tuner.tau == decision.new == 25  # 1.25 x 0.8 / 0.04: slowest step, last launch
    assert (decision.round, decision.old, decision.step_seconds, decision.allreduce_seconds) == (3, 2, 0.04, 0.8)
    assert "0.8 s" in decision.reason and "0.04 s" in decision.reason and "25 steps" in decision.reason


def test_the_steps_after_which_a_mean_should_be_there_are_the_last_senders():
    tuner = TauTuner(192, given=9)
    assert tuner.needed is None
    tell(tuner, 2, 0.04, 0.3)  # of the first nothing is known
    assert tuner.needed == 10  # 1.25 x 0.3 / 0.04, the slowest worker's step and the all-reduce of the last to send
    tell(tuner, 9, 0.04, 0.001)
    assert tuner.needed == 1
    resumed = TauTuner(192, given=9)
    resumed.load_state_dict(tuner.state_dict())
    assert resumed.needed == 1


def test_a_new_wire_is_expected_to_scale_with_its_bytes():
    tuner = TauTuner(192, 1.5, WIRES)
    for number in (1, 2, 3):
        tuner.hear(number, [0.04], [0.0099])
    assert tuner.wire == "float32" and tuner.needed == 2  # 1.25 x 4 x 0.0099 / 0.04


def drift(slow: float, hiccup: float, workers: int = 16, rounds: int = 200) -> tuple[TauTuner, float, float]:
    """Workers that wait where their tuners say, by a simulation: steps of 0.1 s, the first worker's `slow` times that,
    one in 500 takes `hiccup` seconds more; an all-reduce of 0.03 s, tau 12. A tuner, the share of the time that
    the least waiting worker waits in the first rounds that wait, and in the last ones."""
    draw, tau = random.Random(0), 12
    tuners = [TauTuner(192, given=tau) for _ in range(workers)]
    ends, landed, told, waits = [0.0] * workers, 0.0, None, []
    before = [RoundStats() for _ in tuners]
    for number in range(rounds):
        places, waited = torch.zeros(NUMBERS, workers), []
        for rank, tuner in enumerate(tuners):
            step = 0.1 * (slow if rank == 0 else 1.0)
            steps = [step + hiccup * (draw.random() < 0.002) for _ in range(tau)]
            due = min(tau, tuner.needed or tau)
            waited.append(max(0.0, landed - ends[rank] - sum(steps[:due])))
            ends[rank] += sum(steps) + waited[-1]
            stats = RoundStats(step_seconds=step, allreduce_seconds=0.03 * (number > 0), exposed_seconds=waited[-1])
            stats.merged_after = due
            mine = torch.zeros(NUMBERS * workers)
            tuner.tell(stats, before[rank], rank, mine)
            before[rank] = stats
            places += mine.view(workers, NUMBERS).T
        for tuner in tuners if told is not None else []:
            tuner.hear(number, *told.tolist())
        told, landed = places, max(ends) + 0.03
        waits.append(waited)
    first, last = (min(map(sum, zip(*some, strict=True))) / (tau * 0.1 * 16) for some in (waits[5:21], waits[-16:]))
    assert len({tuner.needed for tuner in tuners}) == 1
    return tuners[0], first, last


def test_a_slow_worker_is_waited_for_at_once_and_uneven_steps_later():
    tuner, first, last = drift(slow=1.5, hiccup=0.0)
    assert (tuner.needed, first, last) == (1, 0.0, 0.0), "it waits for nobody"
    tuner, first, last = drift(slow=1.0, hiccup=2.0)
    assert tuner.needed > 3 and first > 0.1 and last < 0.6 * first
    resumed = TauTuner(192, given=12)
    resumed.load_state_dict(tuner.state_dict())
    assert resumed.needed == tuner.needed
    for _ in range(20 * WAITS):  # steps are even again
        tuner.hear(0, [0.1], [0.03])
    assert tuner.needed == 1


def test_what_a_gpu_has_not_passed_is_told_a_round_later_and_evaluations_are_not_waiting():
    tuner, places = TauTuner(192, given=9), torch.zeros(NUMBERS)
    before = RoundStats(step_seconds=0.1, allreduce_seconds=0.3, boundary_seconds=0.2, exposed_seconds=0.15)
    now = RoundStats(step_seconds=unready(), allreduce_seconds=0.4)
    tuner.tell(now, before, 0, places)
    torch.testing.assert_close(places, torch.tensor([0.1, 0.3, 0.05, 0.0]))
    before.merged_after = 1
    tuner.tell(now, before, 0, places)
    assert places[3].item() == pytest.approx(0.075)  # of two rounds


def unready() -> Coming:
    class Event:
        def query(self) -> bool:
            return False

    return Coming(Event(), float)


def test_a_state_of_other_settings_does_not_override_them():
    chosen, wide = TauTuner(192), TauTuner(192, wires=WIRES)
    for tuner in (chosen, wide):
        tell(tuner, 5, 0.04, 0.3)
    given = TauTuner(192, given=8)
    given.load_state_dict(chosen.state_dict())
    assert given.tau == 8 and given.needed == 10
    other = TauTuner(192, wires={"int4": 0.5})
    other.load_state_dict(wide.state_dict())
    assert (other.wire, other.needed, other.decisions) == ("int4", None, [])


def test_the_ranks_of_a_node_share_a_place_and_their_times_are_their_mean():
    tuned = Tuned(TauTuner(192))
    tuned.method = SimpleNamespace(rounds=1)  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(3):
        place = [8 * t for t in (0.04, 0.8)] + [0.0] * (NUMBERS - 2)  # the sum over a node's 8 ranks
        tuned.hear({"times": place * 2}, Heard(1, everybody=16, workers=2))
    tuned.end()
    assert tuned.decision is not None
    assert (tuned.decision.step_seconds, tuned.decision.allreduce_seconds) == pytest.approx((0.04, 0.8))


def test_rounds_without_numbers_are_no_measurements():
    tuner = TauTuner(192)
    for _ in range(9):
        assert tuner.hear(1, [0.0, 0.1], [0.0, 0.0]) is None
        assert tuner.hear(1, [0.0, 0.0], [0.2, 0.1]) is None
    assert tuner.tau == CALIBRATION_TAU and not tuner.decisions


def test_tau_follows_the_link_and_the_steps_but_not_the_noise():
    tuner = TauTuner(192)
    tell(tuner, 10, 0.04, 0.8)
    assert tuner.tau == 25
    tell(tuner, 10, 0.04, 0.85)  # within the margin
    tell(tuner, 10, 0.045, 0.8)
    tell(tuner, 2, 0.04, 8.0)  # a hiccup: the median of five rounds does not move
    tell(tuner, 10, 0.04, 0.8)
    assert tuner.tau == 25 and len(tuner.decisions) == 1
    tell(tuner, 10, 0.04, 1.6)  # a slower link
    assert tuner.tau == 50
    tell(tuner, 10, 0.16, 1.6)  # slower steps
    assert tuner.tau == 13
    assert [(d.old, d.new) for d in tuner.decisions] == [(2, 25), (25, 50), (50, 13)]


def test_the_cap_says_what_stays_exposed():
    tuner = TauTuner(tau_max=10)
    tell(tuner, 9, 0.04, 0.8)
    assert tuner.tau == 10 and len(tuner.decisions) == 1
    assert "25 steps would outlast it" in tuner.decisions[0].reason
    assert "tau_max=10 leaves 0.4 s a round exposed" in tuner.decisions[0].reason
    assert TauTuner(tau_max=2).tau == 2


def test_the_first_decision_is_told_even_if_nothing_changes():
    tuner = TauTuner(192)
    tell(tuner, 5, 0.1, 0.15)
    assert [(d.old, d.new) for d in tuner.decisions] == [(2, 2)]


def test_a_resumed_tuner_goes_on_alike():
    a, b = TauTuner(192), TauTuner(192)
    tell(a, 7, 0.04, 0.8)
    b.load_state_dict(a.state_dict())
    for tuner in (a, b):
        tell(tuner, 4, 0.04, 1.6)
    assert a.state_dict() == b.state_dict() and a.tau == 50


@pytest.mark.parametrize("name", ["local", "slowmo"])
def test_methods_that_hide_nothing_refuse_auto(name: str):
    with pytest.raises(UserError, match="hides no communication"):
        make_method(name, nn.Linear(2, 2), co2=CO2Config(tau="auto"))


def test_bad_settings_are_refused():
    with pytest.raises(UserError, match="tau='automatic': give a whole number of local steps, 1 or more, or auto"):
        CO2Config(tau="automatic")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="tau_max=0"):
        CO2Config(tau="auto", tau_max=0)


@pytest.mark.parametrize(
    "setting", [{"co2": CO2Config(wire=WireConfig("auto"))}, {"shard": True}, {"offload": True}], ids=str
)
@pytest.mark.parametrize("name", ["ddp", "local", "slowmo", "overlap_local"])
def test_the_other_methods_do_not_take_settings_of_co2_in_silence(name: str, setting: dict):
    with pytest.raises(UserError, match="is CO2's own"):
        make_method(name, nn.Linear(2, 2), **setting)


def hears(tuner: TauTuner, n: int, allreduce: float, boundary: float = 0.0, step: float = 0.1) -> None:
    for _ in range(n):
        tuner.hear(0, [step, step], [allreduce, allreduce], [boundary, 0.0])


WIRES = {"int8": 1.0, "float32": 4.0}


def test_a_wide_wire_is_tried_where_its_mean_would_be_fresh_and_kept_where_it_is():
    tuner = TauTuner(192, wires=WIRES)
    hears(tuner, 3, 0.02)
    assert (tuner.wire, tuner.tau) == ("float32", 1), "1.25 x 4 x 0.02 / 0.1: as its bytes let expect"
    assert (tuner.decisions[-1].wire, tuner.decisions[-1].exposed_share) == ("float32", 0.0)
    assert tuner.decisions[-1].allreduce_seconds == pytest.approx(0.08)
    assert "over int8 the mean takes 0.02 s and a local step 0.1 s: float32 is tried" in tuner.decisions[-1].reason
    hears(tuner, SETTLE, 0.02)  # what was sent before still travels
    hears(tuner, 1, 5.0)  # the first of the new ones
    resumed = TauTuner(192, wires=WIRES)
    resumed.load_state_dict(tuner.state_dict())
    for one in (tuner, resumed):
        hears(one, 2, 0.09)
        assert (one.wire, one.tau) == ("float32", 2)
        hears(one, 9, 0.8)
        assert (one.wire, one.tau) == ("float32", 10), "it is tried once"


def test_a_wide_wire_is_kept_where_it_needs_as_few_steps_though_its_mean_is_not_fresh():
    """A boundary's own work asks for five steps anyway."""
    tuner = TauTuner(192, wires=WIRES)
    hears(tuner, 3, 0.09, 0.025)
    assert (tuner.wire, tuner.tau) == ("float32", 5)
    hears(tuner, SETTLE + 3, 0.36, 0.025)
    assert (tuner.wire, tuner.tau) == ("float32", 5)


def test_a_wide_wire_that_needs_more_steps_is_given_up():
    tuner = TauTuner(192, wires=WIRES)
    hears(tuner, 3, 0.02)
    hears(tuner, SETTLE + 3, 0.2)
    assert (tuner.wire, tuner.tau) == ("int8", 1)
    assert tuner.decisions[-1].reason.endswith("3 steps needed, over int8 1, which is taken again")
    hears(tuner, SETTLE + 9, 0.02)
    assert (tuner.wire, tuner.tau) == ("int8", 1)


def test_where_a_wide_wire_cannot_be_fresh_it_is_not_tried_and_a_cap_says_what_is_exposed():
    tuner = TauTuner(192, wires=WIRES)
    hears(tuner, 9, 0.2)
    assert (tuner.wire, tuner.tau) == ("int8", 3)
    capped = TauTuner(4)
    hears(capped, 9, 0.8)
    assert capped.decisions[-1].exposed_share == pytest.approx(0.5)


def test_with_a_given_tau_the_wire_alone_is_chosen():
    tuner = TauTuner(192, wires=WIRES, given=24)
    hears(tuner, 3, 0.02)
    assert (tuner.wire, tuner.tau) == ("float32", 24)
    hears(tuner, SETTLE + 3, 0.08)
    assert (tuner.wire, tuner.tau, len(tuner.decisions)) == ("float32", 24, 1)
    slow = TauTuner(192, wires=WIRES, given=24)
    hears(slow, 9, 0.2)
    assert (slow.wire, slow.tau, slow.decisions) == ("int8", 24, [])


def test_the_recommended_settings_choose_the_wire_and_a_given_tau_holds():
    config = replace(CO2Config.recommended(4), tau=24)
    co2 = CO2([nn.Parameter(torch.zeros(3))], config)
    assert config.wire == WireConfig("auto")
    assert (co2.tau, co2.pacing.tuned) == (24, None), "one worker has nothing to choose"
    with pytest.raises(UserError, match="wire.format='auto' needs unshared outer state"):
        make_method("co2", nn.Linear(2, 2), co2=CO2Config(tau="auto", wire=WireConfig("auto")), shard=True)


def test_a_boundarys_own_work_keeps_tau_from_being_too_small():
    """It would be paid after every step where the all-reduce takes no time."""
    tuner = TauTuner(192)
    for _ in range(6):
        tuner.hear(0, [0.04, 0.03], [0.001, 0.001], [0.01, 0.003])
    assert tuner.tau == 5  # 0.01 / (0.05 x 0.04)
    assert "a boundary's own work 0.01 s: 5 steps keep that at 5%" in tuner.decisions[-1].reason
    resumed = TauTuner(192)
    resumed.load_state_dict(tuner.state_dict())
    for _ in range(6):
        tuner.hear(0, [0.04], [0.8], [0.01])
        resumed.hear(0, [0.04], [0.8], [0.01])
    assert tuner.tau == resumed.tau == 25
