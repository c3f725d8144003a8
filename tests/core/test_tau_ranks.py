"""tau="auto" on real processes: all workers decide alike, at the same boundary, inside the all-reduce they have."""

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import core.adaptive.tau
from core import CO2, CO2Config, make_method
from core.adaptive.tau import CALIBRATION_TAU, Tuned
from core.flat import copy
from core.robust.requests import Requests
from core.stats import RoundStats
from core.testing import run_distributed
from core.testing.link import ThrottledLink
from tests import problems
from tests.problems import LR, flat, gradient, sgd_step
from tests.reference import LateReference

AUTO = CO2Config(tau="auto", outer_momentum=0.4, clip=None)
BYTES = 4 * problems.flat(problems.odd_parameters()).numel()


def paced(method: Any, params: list[nn.Parameter], rank: int, steps: int, step_seconds: float = 0.004) -> list[int]:
    """Trains, each step at least `step_seconds`; the tau of each round that closed."""
    taus = []
    for step in range(steps):
        sgd_step(params, rank, step)
        time.sleep(step_seconds * (1 + rank / 4))  # rank 2 is half as slow again
        if method.step():
            taus.append(method.stats.tau)
    return taus


def auto_training(rank: int, world_size: int) -> dict[str, Any]:
    params = problems.odd_parameters()
    co2 = CO2(params, AUTO, link=ThrottledLink(0.1))  # some 0.06 s an all-reduce
    start = flat(params)
    taus = paced(co2, params, rank, 120)
    taus.append(co2.tau)  # of the round that is not over at the end; finish() may change tau again
    co2.finish()
    return {
        "start": start,
        "taus": taus,
        "end": flat(params),
        "decisions": co2.rider(Tuned).tuner.decisions,
        "launched": co2.flight.launched,
        "works": co2.rounds,
    }


def test_all_workers_decide_alike_and_train_as_the_reference_does_with_those_taus():
    results = run_distributed(auto_training, 3)
    first = results[0]
    for other in results[1:]:
        assert other["taus"] == first["taus"] and other["decisions"] == first["decisions"]
        assert torch.equal(other["end"], first["end"])
    assert first["taus"][0] == 2 and max(first["taus"]) > 4
    for d in first["decisions"]:  # it covers the all-reduce, and the steps are those of the slowest worker
        assert d.new * d.step_seconds >= 1.25 * d.allreduce_seconds * 0.999
        assert d.step_seconds >= 0.006 and d.allreduce_seconds >= 0.05
    torch.testing.assert_close(first["end"], replay(first["taus"], first["start"], 120))


def replay(taus: list[int], x: Tensor, steps: int) -> Tensor:
    c = AUTO
    ref = LateReference(x.expand(3, -1).clone(), taus[0], c.outer_lr, c.outer_momentum, c.gap, c.clip)
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
    tuner = co2.rider(Tuned).tuner
    tell = tuner.tell

    def told(stats: RoundStats, before: RoundStats, rank: int, places: Tensor) -> None:
        measured = float(stats.allreduce_seconds)
        assert not measured or measured >= 0.999 * link.took
        stats = replace(stats, step_seconds=step_seconds, allreduce_seconds=measured and link.took)
        tell(stats, replace(before, boundary_seconds=0.0, merge_seconds=0.0, exposed_seconds=0.0), rank, places)

    tuner.tell = told


def changing_link(rank: int, world_size: int) -> tuple[list[tuple[int, int]], int]:
    params = problems.odd_parameters()
    link = Timed(1.0)
    co2 = CO2(params, AUTO, link=link)
    tell_times(co2, link, 0.002 * (1 + rank))
    paced(co2, params, rank, 30)
    link.bytes_per_second /= 10
    paced(co2, params, rank, 90)
    sent = co2.stats.bytes_sent
    co2.finish()
    return [(d.old, d.new) for d in co2.rider(Tuned).tuner.decisions], sent


def test_a_link_that_slows_down_makes_rounds_longer():
    """By the slower worker's steps of 4 ms; where a median over five rounds turns, it does so at once."""
    one, two = run_distributed(changing_link, 2)
    assert one == two
    decisions, sent = one
    fast, slow = (math.ceil(1.25 * sent / (mbit * 125e3) / 0.004) for mbit in (1.0, 0.1))
    assert slow >= 3 * fast and decisions == [(2, fast), (fast, slow)]


def capped_or_overlap(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    core.adaptive.tau.COST = 1.0
    params = problems.odd_parameters()
    co2 = CO2(params, replace(AUTO, tau_max=6), link=ThrottledLink(0.1))
    capped = paced(co2, params, rank, 60)
    co2.finish()
    model = nn.ParameterList(problems.odd_parameters())
    _, overlap = make_method("overlap_local", model, co2=AUTO, link=ThrottledLink(0.1))
    taus = paced(overlap, list(model.parameters()), rank, 100)
    overlap.finish()
    return capped, taus


def test_tau_max_caps_and_overlap_local_sgd_has_it_too():
    (capped, overlap), others = run_distributed(capped_or_overlap, 2)
    assert (capped, overlap) == others
    assert max(capped) == 6 and max(overlap) > 6


def uneven_and_resumed(rank: int, world_size: int) -> list[Any]:
    params = problems.odd_parameters()
    co2 = CO2(params, AUTO, link=ThrottledLink(0.1))
    paced(co2, params, rank, 30 + 9 * rank)  # rank 1 takes more steps
    co2.finish()
    state = co2.state_dict()
    again = CO2(problems.odd_parameters(), AUTO, link=ThrottledLink(0.1))
    again.load_state_dict(state)
    assert again.tau == co2.tau and again.rider(Tuned).state_dict() == co2.rider(Tuned).state_dict()
    return [flat(params), co2.tau]


def test_uneven_workers_end_together_and_the_tuner_is_in_the_checkpoint():
    (end, tau), (other_end, other_tau) = run_distributed(uneven_and_resumed, 2)
    assert torch.equal(end, other_end) and tau == other_tau


def merging_on_arrival(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1's steps take more than twice as long: the steps at which rounds closed, and all heard of a stop."""
    params = problems.odd_parameters()
    config = CO2Config(tau="auto", merge="mix", delay="auto", gap="none", outer_momentum=0.0)
    link = Timed(0.06)  # some 0.1 s an all-reduce
    requests = Requests("stop")
    co2 = CO2(params, config, link=link, riders=[requests])
    tell_times(co2, link, 0.003 + 0.004 * rank)
    closed, stopped, step = [], [], 0
    while not (stopped and len(closed) > stopped[0] + 2):
        sgd_step(params, rank, step)
        time.sleep(0.003 + 0.004 * rank)
        if co2.step():
            assert co2.at_boundary
            closed.append((step, co2.tau, co2.pacing.decision))
            if rank == 0 and len(closed) == 3:
                requests.ask("stop")
        stopped = stopped or ([len(closed), step] if "stop" in requests.granted else [])
        step += 1
    co2.finish()
    return {"closed": closed, "stopped": stopped}


def test_where_means_merge_on_arrival_rounds_close_at_the_same_steps_from_the_first_on():
    zero, one = run_distributed(merging_on_arrival, 2)
    assert zero == one
    steps = [step for step, *_ in zero["closed"]]
    assert steps[:3] == [1, 3, 5] and zero["stopped"][1] in steps
    assert max(tau for _, tau, _ in zero["closed"]) > CALIBRATION_TAU and any(d for *_, d in zero["closed"])


def saved_while_calibrating(rank: int, world_size: int) -> list[Tensor]:
    """Where a run that is saved at a boundary before tau is chosen comes to, and one that goes on from there."""
    ends: list[Tensor] = []
    params, other = problems.odd_parameters(), problems.odd_parameters()
    co2, resumed = (CO2(p, CO2Config.recommended(world_size)) for p in (params, other))
    for step in range(2 * CALIBRATION_TAU):
        sgd_step(params, rank, step)
        co2.step()
    assert not co2.rider(Tuned).tuner.decisions
    resumed.load_state_dict(co2.state_dict())
    with torch.no_grad():
        copy(other, params)
    for trained, method in ((params, co2), (other, resumed)):
        sgd_step(trained, rank, 6)
        method.step()
        method.finish()
        ends.append(flat(trained))
    return ends


def test_a_run_may_be_saved_before_tau_is_chosen():
    for end, resumed in run_distributed(saved_while_calibrating, 2):
        assert torch.equal(end, resumed)


def unlike_steps(rank: int, world_size: int) -> list[tuple[int, int | None]]:
    """Rank 1's steps take twice as long: after how many steps each mean was merged, and should be there, by round."""
    params = problems.odd_parameters()
    config = CO2Config(tau=9, merge="mix", delay="auto", gap="none", outer_momentum=0.0)
    link = Timed(0.6)
    co2 = CO2(params, config, link=link)
    tell_times(co2, link, 0.006 + 0.006 * rank)
    merged = []
    for step in range(90):
        needed = co2.rider(Tuned).tuner.needed
        time.sleep(0.006 + 0.006 * rank)
        sgd_step(params, rank, step)
        if co2.step():
            merged.append((co2.stats.merged_after, needed))
    co2.finish()
    return merged


def test_a_faster_worker_waits_where_the_link_has_had_its_time():
    """Else its means come when the slower one has sent, some five of its steps later, or a round."""
    zero, one = run_distributed(unlike_steps, 2)
    for merged in (zero, one):
        assert [needed for _, needed in merged[:3]] == [None, None, None]
        assert all(needed and after <= needed <= 3 for after, needed in merged[4:]), merged
    assert max(after for after, _ in zero[4:]) == zero[-1][1], "it waited"
