"""The choice of tau and of its wire: on times given by hand, and on real processes."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core.tau
from core import CO2, CO2Config, CompressionConfig
from core.buckets import copy
from core.hooks import ReductionInfo, Requests
from core.state import of_rank, under_rank
from core.stats import DeferredNumber, RoundStats
from core.tau import CALIBRATION_TAU, NUMBERS, SETTLE, AdaptiveTau, TauTuner
from core.testing.link import ThrottledLink
from core.testing.reference import Reference
from tests import problems
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import LR, flat, gradient, sgd_step


def feed(tuner: TauTuner, n: int, step: float, allreduce: float) -> None:
    for _ in range(n):
        tuner.receive(0, [step, step / 2], [allreduce, allreduce * 1.5])


def test_calibration_leaves_out_the_first_round_and_then_decides():
    tuner = TauTuner(192)
    assert tuner.tau == CALIBRATION_TAU
    assert tuner.receive(1, [9.0, 9.0], [9.0, 9.0]) is None  # the warm-up
    assert tuner.receive(2, [0.04, 0.03], [0.9, 0.8]) is None
    decision = tuner.receive(3, [0.04, 0.03], [0.8, 0.9])
    assert decision is not None and tuner.tau == decision.new == 25  # 1.25 x 0.8 / 0.04: slowest step, last launch
    assert (decision.round, decision.old, decision.step_seconds, decision.allreduce_seconds) == (3, 2, 0.04, 0.8)
    assert "0.8 s" in decision.reason and "0.04 s" in decision.reason and "25 steps" in decision.reason


def test_the_first_times_raise_tau_and_count_no_further():
    tuner = TauTuner(192)
    first = tuner.receive(1, [0.1], [0.8])
    assert first is not None and tuner.tau == 10
    assert tuner.receive(2, [0.04], [0.8]) is None  # one measurement is not enough
    assert tuner.receive(3, [0.04], [0.8]) is not None and tuner.tau == 25
    given = TauTuner(192, given=3)
    assert given.receive(1, [0.1], [0.8]) is None and given.tau == 3


def test_what_a_gpu_has_not_passed_is_told_a_round_later():
    tuner, places = TauTuner(192, given=9), torch.zeros(NUMBERS)
    before = RoundStats(step_seconds=0.1, allreduce_seconds=0.3, boundary_seconds=0.2, exposed_seconds=0.15)
    now = RoundStats(step_seconds=unready(), allreduce_seconds=0.4)
    tuner.write_times(now, before, 0, places)
    torch.testing.assert_close(places, torch.tensor([0.1, 0.3, 0.05]))


def unready() -> DeferredNumber:
    class Event:
        def query(self) -> bool:
            return False

    return DeferredNumber(Event(), float)


def test_a_state_of_other_settings_does_not_override_them():
    chosen, wide = TauTuner(192), TauTuner(192, compressions=NARROW_FORMATS)
    for tuner in (chosen, wide):
        feed(tuner, 5, 0.04, 0.3)
    given = TauTuner(192, given=8)
    given.load_state_dict(chosen.state_dict())
    assert given.tau == 8
    other = TauTuner(192, compressions={"int4": 0.5})
    other.load_state_dict(wide.state_dict())
    assert (other.compression, other.decisions) == ("int4", [])
    older = {name: value for name, value in wide.state_dict().items() if name != "_received"}
    assert "no '_received', so an older version wrote it" in problems.refusal(given.load_state_dict, older)


def test_the_ranks_of_a_node_share_a_place_and_their_times_are_their_mean():
    tuned = AdaptiveTau("auto", TauTuner(192))
    tuned.method = SimpleNamespace(rounds=1, is_log_rank=False, allreduce=SimpleNamespace(is_elastic=False))  # pyright: ignore[reportAttributeAccessIssue]
    place = [8 * t for t in (0.04, 0.8)] + [0.0] * (NUMBERS - 2)  # the sum over a node's 8 ranks
    tuned.on_reduced_scalars({"times": place * 2}, ReductionInfo(1, total_world_size=16, workers=2, generation=0))
    tuned.on_round_end()
    assert tuned.decision is not None
    assert (tuned.decision.step_seconds, tuned.decision.allreduce_seconds) == pytest.approx((0.04, 0.8))


def test_rounds_without_numbers_are_no_measurements():
    tuner = TauTuner(192)
    for _ in range(9):
        assert tuner.receive(1, [0.0, 0.1], [0.0, 0.0]) is None
        assert tuner.receive(1, [0.0, 0.0], [0.2, 0.1]) is None
    assert tuner.tau == CALIBRATION_TAU and not tuner.decisions


def test_tau_follows_the_link_and_the_steps_but_not_the_noise():
    tuner = TauTuner(192)
    feed(tuner, 10, 0.04, 0.8)
    assert tuner.tau == 25
    feed(tuner, 10, 0.04, 0.85)  # within the margin
    feed(tuner, 10, 0.045, 0.8)
    feed(tuner, 2, 0.04, 8.0)  # a hiccup: the median of five rounds does not move
    feed(tuner, 10, 0.04, 0.8)
    assert tuner.tau == 25 and len(tuner.decisions) == 1
    feed(tuner, 10, 0.04, 1.6)  # a slower link
    assert tuner.tau == 50
    feed(tuner, 10, 0.16, 1.6)  # slower steps
    assert tuner.tau == 13
    assert [(d.old, d.new) for d in tuner.decisions] == [(2, 25), (25, 50), (50, 13)]


def test_the_cap_says_what_stays_exposed():
    tuner = TauTuner(tau_max=10)
    feed(tuner, 9, 0.04, 0.8)
    assert tuner.tau == 10 and len(tuner.decisions) == 1
    assert "25 steps would outlast it" in tuner.decisions[0].reason
    assert "tau_max=10 leaves 0.4 s a round exposed" in tuner.decisions[0].reason
    assert tuner.decisions[0].exposed_share == pytest.approx(0.5)
    assert TauTuner(tau_max=2).tau == 2


def test_a_given_tau_is_its_own_cap_in_the_log():
    """recommended(steps=N) has a tau_max of N / 20, below tau."""
    assert CO2Config.recommended(steps=200, tau=24).tau_max == 10
    cut = TauTuner(10, given=24, cuts=True)
    feed(cut, 9, 0.1, 2.05)
    assert cut.fragments == 8 and cut.decisions[-1].reason.endswith("25 steps would outlast it, tau=24 leaves 0 s a "
                                                                    "round exposed")  # fmt: skip


def receives(tuner: TauTuner, n: int, allreduce: float, boundary: float = 0.0, step: float = 0.1) -> None:
    for _ in range(n):
        tuner.receive(0, [step, step], [allreduce, allreduce], [boundary, 0.0])


NARROW_FORMATS = {"int8": 1.0, "float32": 4.0}


def test_a_wide_format_is_tried_where_its_mean_would_be_fresh_and_kept_where_it_is():
    tuner = TauTuner(192, compressions=NARROW_FORMATS)
    receives(tuner, 3, 0.02)
    assert (tuner.compression, tuner.tau) == ("float32", 1), "1.25 x 4 x 0.02 / 0.1: as its bytes let expect"
    assert (tuner.decisions[-1].compression, tuner.decisions[-1].exposed_share) == ("float32", 0.0)
    assert tuner.decisions[-1].allreduce_seconds == pytest.approx(0.08)
    assert (
        "with int8 the all-reduce takes 0.02 s and a local step 0.1 s: float32 is tested" in tuner.decisions[-1].reason
    )
    receives(tuner, SETTLE, 0.02)  # what was sent before still travels
    receives(tuner, 1, 5.0)  # the first of the new ones
    resumed = TauTuner(192, compressions=NARROW_FORMATS)
    resumed.load_state_dict(tuner.state_dict())
    for one in (tuner, resumed):
        receives(one, 2, 0.09)
        assert (one.compression, one.tau) == ("float32", 2)
        receives(one, 9, 0.8)
        assert (one.compression, one.tau) == ("float32", 10), "it is tried once"


def test_a_wide_format_that_needs_more_steps_is_given_up():
    tuner = TauTuner(192, compressions=NARROW_FORMATS)
    receives(tuner, 3, 0.02)
    receives(tuner, SETTLE + 3, 0.2)
    assert (tuner.compression, tuner.tau) == ("int8", 1)
    assert tuner.decisions[-1].reason.endswith("it needs 3 steps, and int8 needs 1, so int8 is used again")
    receives(tuner, SETTLE + 9, 0.02)
    assert (tuner.compression, tuner.tau) == ("int8", 1)


def test_where_a_wide_format_cannot_be_fresh_it_is_not_tried():
    tuner = TauTuner(192, compressions=NARROW_FORMATS)
    receives(tuner, 9, 0.2)
    assert (tuner.compression, tuner.tau) == ("int8", 3)


def test_the_recommended_settings_choose_the_format_and_a_given_tau_holds():
    config = replace(CO2Config.recommended(), tau=24)
    co2 = CO2([nn.Parameter(torch.zeros(3))], config)
    assert config.compression == CompressionConfig("auto")
    assert co2.tau == 24 and not isinstance(co2.sync_schedule, AdaptiveTau), "one worker has nothing to choose"


def test_a_boundarys_own_work_keeps_tau_from_being_too_small():
    """It would be paid after every step where the all-reduce takes no time."""
    tuner = TauTuner(192)
    for _ in range(6):
        tuner.receive(0, [0.04, 0.03], [0.001, 0.001], [0.01, 0.003])
    assert tuner.tau == 5  # 0.01 / (0.05 x 0.04)
    assert "a boundary's own work 0.01 s: 5 steps keep that at 5%" in tuner.decisions[-1].reason
    resumed = TauTuner(192)
    resumed.load_state_dict(tuner.state_dict())
    for _ in range(6):
        tuner.receive(0, [0.04], [0.8], [0.01])
        resumed.receive(0, [0.04], [0.8], [0.01])
    assert tuner.tau == resumed.tau == 25


AUTO = CO2Config(tau="auto", outer_momentum=0.4, clip=None)


def paced(method: Any, params: list[nn.Parameter], rank: int, steps: int, step_seconds: float = 0.004) -> list[int]:
    """Trains, each step at least `step_seconds`; the tau of each round that closed."""
    taus = []
    for step in range(steps):
        sgd_step(params, rank, step)
        time.sleep(step_seconds * (1 + rank / 4))  # rank 2 is half as slow again
        if method.step():
            taus.append(method.stats.tau)
    return taus


@on_ranks(3)
def test_all_workers_decide_alike_and_train_as_the_reference_does_with_those_taus(rank: int):
    params = problems.odd_parameters()
    co2 = CO2(params, AUTO, link=ThrottledLink(0.1))  # some 0.06 s an all-reduce
    start, taus = flat(params), paced(co2, params, rank, 120)
    taus.append(co2.tau)  # of the round that is not over at the end; finish() may change tau again
    co2.finish()
    decisions = co2.hook(AdaptiveTau).tuner.decisions
    assert total_world_size((taus, decisions)) == [(taus, decisions)] * 3 and alike(flat(params))
    assert taus[0] == 2 and max(taus) > 4
    for d in decisions:  # it covers the all-reduce, and the steps are those of the slowest worker
        assert d.new * d.step_seconds >= 1.25 * d.allreduce_seconds * 0.999
        assert d.step_seconds >= 0.006 and d.allreduce_seconds >= 0.05
    torch.testing.assert_close(flat(params), replay(taus, start, 120))


def replay(taus: list[int], x: Tensor, steps: int) -> Tensor:
    c = AUTO
    ref = Reference(x.expand(3, -1).clone(), taus[0], c.outer_lr, c.outer_momentum, c.gap, c.clip)
    workers = torch.arange(3, dtype=torch.float64)[:, None]
    rest = iter(taus[1:])
    for step in range(steps):
        ref.x.sub_(LR * gradient(ref.x, workers, step))
        if ref.local_step():
            ref.tau = next(rest)
    ref.finish()
    return ref.x[0]


class Timed(ThrottledLink):
    """Attributes: took, the seconds that what was sent last lies on the link."""

    took = 0.0

    def reserve(self, nbytes: float) -> float:
        self.took = nbytes / self.bytes_per_second
        return super().reserve(nbytes)


def tell_times(co2: CO2, link: Timed, step_seconds: float) -> None:
    """From here on this worker tells times that no load of the machine changes: of its steps the given ones, of what
    landed last the link's."""
    tuner = co2.hook(AdaptiveTau).tuner
    write_times = tuner.write_times

    def fixed(stats: RoundStats, before: RoundStats, rank: int, places: Tensor) -> None:
        measured = float(stats.allreduce_seconds)
        assert not measured or measured >= 0.999 * link.took
        stats = replace(stats, step_seconds=step_seconds, allreduce_seconds=measured and link.took)
        write_times(stats, replace(before, boundary_seconds=0.0, merge_seconds=0.0, exposed_seconds=0.0), rank, places)

    tuner.write_times = fixed


@on_ranks(2)
def test_where_means_merge_on_arrival_rounds_close_at_the_same_steps_from_the_first_on(rank: int):
    """Rank 1's steps take more than twice as long: the steps at which rounds closed, and all heard of a stop."""
    params = problems.odd_parameters()
    config = CO2Config(tau="auto", merge="keep_local", delay="auto", gap="none", outer_momentum=0.0)
    link, requests = Timed(0.06), Requests("stop")  # some 0.1 s an all-reduce
    co2 = CO2(params, config, link=link, hooks=[requests])
    tell_times(co2, link, 0.003 + 0.004 * rank)
    closed, stopped, step = [], [], 0
    while not (stopped and len(closed) > stopped[0] + 2):
        sgd_step(params, rank, step)
        time.sleep(0.003 + 0.004 * rank)
        if co2.step():
            assert co2.at_boundary
            closed.append((step, co2.tau, co2.sync_schedule.decision))
            if rank == 0 and len(closed) == 3:
                requests.ask("stop")
        stopped = stopped or ([len(closed), step] if "stop" in requests.granted else [])
        step += 1
    co2.finish()
    assert total_world_size((closed, stopped)) == [(closed, stopped)] * 2
    steps = [step for step, *_ in closed]
    assert steps[:3] == [1, 3, 5] and stopped[1] in steps
    assert max(tau for _, tau, _ in closed) > CALIBRATION_TAU and any(d for *_, d in closed)


@on_ranks(2)
def test_a_run_may_be_saved_before_tau_is_chosen(rank: int):
    """At a boundary; and one that goes on from there."""
    params, other, ends = problems.odd_parameters(), problems.odd_parameters(), list[Tensor]()
    co2, resumed = (CO2(p, CO2Config.recommended()) for p in (params, other))
    for step in range(2 * CALIBRATION_TAU):
        sgd_step(params, rank, step)
        co2.step()
    assert not co2.hook(AdaptiveTau).tuner.decisions
    resumed.load_state_dict(co2.state_dict())
    with torch.no_grad():
        copy(other, params)
    for trained, method in ((params, co2), (other, resumed)):
        sgd_step(trained, rank, 6)
        method.step()
        method.finish()
        ends.append(flat(trained))
    assert torch.equal(*ends)


def shapes(state: dict[str, Any]) -> dict[str, list[torch.Size]]:
    return {name: [t.shape for t in flats] for name, flats in (state["state"] | state["residual"]).items()}


@pytest.mark.parametrize(
    ("mbit", "compression", "decided"),
    [(64.0, "float32", ["float32"]), (20.0, "int4", ["float32", "int4"])],
    ids=["fast", "between"],
)
@on_ranks(2)
def test_a_format_is_chosen_with_tau_alike_on_all_workers_and_kept_in_a_checkpoint(rank, mbit, compression, decided):
    """16 kB, or 2 kB in int4, by steps of 4 ms: int4 to begin with; float32 where its mean comes within a step, and
    tried where its bytes let expect that. The run goes on from a checkpoint in other objects."""
    core.tau.COST = 1.0
    config = CO2Config(tau="auto", outer_momentum=0.0, compression=CompressionConfig("auto"))
    params, link, sent = [nn.Parameter(torch.linspace(-1, 1, 4000))], Timed(mbit), []
    co2 = CO2(params, config, link=link)
    tell_times(co2, link, 0.004)
    paced(co2, params, rank, 4, 0.0)
    fresh = of_rank(co2.state_dict())
    while len(sent) < 20:
        paced(co2, params, rank, co2.tau - co2.local_steps, 0.0)
        sent.append(co2.stats.bytes_sent)
    state = of_rank(co2.state_dict())
    resumed_params = [nn.Parameter(params[0].detach().clone())]
    resumed = CO2(resumed_params, config, link=ThrottledLink(mbit))
    resumed.load_state_dict(under_rank(state))
    steps = co2.tau
    for method, of in ((co2, params), (resumed, resumed_params)):
        for step in range(steps):
            sgd_step(of, rank, step)
            method.step()
    assert torch.equal(params[0], resumed_params[0])
    if compression == "float32":
        other = CO2([nn.Parameter(params[0].detach().clone())], replace(config, compression=CompressionConfig("int8")))
        said = problems.refusal(other.load_state_dict, under_rank(state | {"in_flight": True}))
        assert said.startswith("the checkpoint holds an all-reduce in float32, and int8 cannot go on with it")
    paced(co2, params, rank, 3 * rank, 0.0)  # rank 1 takes more steps
    co2.finish(), resumed.finish()
    compressions = [d.compression for d in co2.hook(AdaptiveTau).tuner.decisions]
    assert alike(flat(params)) and total_world_size((sent, compressions)) == [(sent, compressions)] * 2
    assert (fresh["reducer"], state["reducer"]) == ("int4", compression) and compressions[: len(decided)] == decided, (
        compressions
    )
    assert shapes(state) == shapes(fresh), "of a checkpoint and of a new object, into which DCP loads it"
    assert bool(co2.reducer.held) == (compression == "int4") and (sent[-1] > 2 * sent[0]) == (compression == "float32")


def test_another_number_of_workers_measures_anew():
    tuner = TauTuner(192, compressions=NARROW_FORMATS)
    feed(tuner, 20, 0.04, 0.3)
    tuner.compression, tuner._untested = "float32", []
    tuner.measure_again()
    assert tuner.compression == "float32" and tuner._untested == [f for f in NARROW_FORMATS if f != "float32"]
    before = len(tuner.decisions)
    feed(tuner, 20, 0.04, 1.0)
    assert tuner.compression != "float32" and len(tuner.decisions) > before


def test_a_resumed_run_keeps_tau_below_its_own_limit():
    first, shorter = TauTuner(192), TauTuner(80)
    feed(first, 12, 0.1, 7.84)
    assert first.tau > 80
    shorter.load_state_dict(first.state_dict())
    assert shorter.tau == 80


def choosing(*, merged: bool) -> CO2:
    """A worker with tau auto after 5 of 20 steps. The round's average has raised tau if it was merged."""
    co2 = CO2([nn.Parameter(torch.ones(3))], CO2Config.recommended(steps=100_000))
    tuner = co2.hook(AdaptiveTau).tuner
    tuner.tau = 20
    co2.sync_schedule.begin(co2.rounds)
    for _ in range(5):
        co2.trained[0].data.add_(0.1)
        co2.step()
    tuner.tau = 50 if merged else 20
    return co2


@pytest.mark.parametrize("merged", [True, False])
def test_a_round_that_is_resumed_ends_alike_on_workers_that_have_merged_and_have_not(merged: bool):
    resumed = CO2([nn.Parameter(torch.ones(3))], CO2Config.recommended(steps=100_000))
    resumed.load_state_dict(choosing(merged=merged).state_dict())
    assert (resumed.tau, resumed.hook(AdaptiveTau).tuner.tau) == (20, 50 if merged else 20)


def test_a_round_that_is_resumed_times_its_own_steps():
    first, resumed = (CO2([nn.Parameter(torch.ones(3))], CO2Config.paper(10)) for _ in range(2))
    for _ in range(5):
        first.trained[0].data.add_(0.1)
        first.step()
    resumed.load_state_dict(first.state_dict())
    time.sleep(1)  # loading takes its time
    for _ in range(5):
        time.sleep(0.01)
        resumed.trained[0].data.add_(0.1)
        resumed.step()
    assert resumed.rounds == 1 and 0.01 <= float(resumed.stats.step_seconds) < 0.1
