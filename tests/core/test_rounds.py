"""What surrounds the algorithm: construction, buffers, statistics, calls, uneven ends."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import core.stats
from core import CO2, CO2Config, UserError, make_method
from core.baselines import LocalSGD, OverlapLocalSGD
from core.baselines.table import METHODS
from core.stats import RoundClock, RoundStats, ready
from tests import problems
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import Settings, flat, refusal, sgd_step
from tests.quadratic import Quadratic
from training.folder.rounds import Overlap

LOCAL_METHODS = tuple(m for m in METHODS if m != "ddp")


@on_ranks(3)
def test_everything_starts_as_on_rank_0(rank: int):
    """Every worker comes with other values; the last parameter is frozen, one buffer counts in integers."""
    expected = [*(p.detach() for p in problems.odd_parameters()[:-1]), torch.zeros(2), torch.tensor(5)]
    for name in LOCAL_METHODS:
        params = [nn.Parameter(p.detach() + rank) for p in problems.odd_parameters()[:-1]]
        params[-1].requires_grad_(False)
        model = nn.ParameterList(params)
        model.register_buffer("mean", torch.full((2,), float(rank), dtype=torch.bfloat16))
        model.register_buffer("count", torch.tensor(rank + 5))
        make_method(name, model, co2=CO2Config(tau=2))
        for ours, want in zip([*params, *model.buffers()], expected, strict=True):
            assert torch.equal(ours.to(want.dtype), want), name


MISMATCHES: dict[str, tuple[list[int], int, float]] = {  # sizes, tau, outer_lr of rank 2; the others have (3, 4), 2, 1
    "shape": ([3, 5], 2, 1.0),
    "count": ([3], 2, 1.0),
    "tau": ([3, 4], 3, 1.0),
    "outer_lr": ([3, 4], 2, 0.5),
}


@on_ranks(3)
def test_unequal_workers_are_refused_with_the_rank_named(rank: int):
    messages = {}
    for what, odd in MISMATCHES.items():
        sizes, tau, alpha = odd if rank == 2 else ([3, 4], 2, 1.0)
        params = [nn.Parameter(torch.zeros(n)) for n in sizes]
        messages[what] = refusal(CO2, params, CO2Config(tau=tau, outer_lr=alpha))
    messages["local tau"] = refusal(LocalSGD, [nn.Parameter(torch.zeros(3))], tau=2 + (rank == 2))
    params = [nn.Parameter(torch.zeros(3))]
    for what, changes in (("tau or auto", {"tau": 4}), ("tau_max", {"tau_max": 9})):
        messages[what] = refusal(CO2, params, CO2Config(**{"tau": "auto"} | (changes if rank == 2 else {})))
    CO2(params, CO2Config.recommended(steps=400 - rank, tau=4)).close()  # of uneven loaders
    assert all("rank 2" in text and "rank 1" not in text for text in messages.values())
    assert "(4,)" in messages["shape"] and "(5,)" in messages["shape"]
    assert "2 tensors, against 1" in messages["count"]
    assert "tau=2" in messages["tau"] and "tau=3" in messages["tau"]
    assert "0.5" in messages["outer_lr"]
    assert "tau=2" in messages["local tau"] and "tau=3" in messages["local tau"]
    assert "tau=auto, against tau=4" in messages["tau or auto"] and "tau_max=192, " in messages["tau_max"]


@on_ranks(3)
def test_a_group_trains_by_itself(rank: int):
    """Ranks 1 and 2 train without rank 0, which never builds anything; rank 1 is then the one that all start from."""
    group = dist.new_group([1, 2])
    if rank:
        p = nn.Parameter(torch.full((1,), 10.0 * rank))
        co2 = Settings(tau=1, outer_momentum=0.0, gap="none", clip=None, delay=0).build([p], group=group)
        with torch.no_grad():
            p.sub_(rank)
        co2.step()
        co2.finish()
        assert p.item() == 8.5


EPS = 2.0**-40  # which float64 has room for beside a number of the size of 1, and float32 has not


@on_ranks(2)
def test_buffers_are_averaged_a_round_late_if_the_parameters_are(rank: int):
    """BatchNorm's statistics are set by hand: on worker r to r + 10 t in round t."""
    own = [rank + 10.0 * t for t in range(3)]
    for name in METHODS:
        norm = nn.BatchNorm1d(2)
        norm.register_buffer("wide", wide := torch.zeros((), dtype=torch.float64))
        _, method = make_method(name, norm, co2=CO2Config(tau=1))
        assert norm.running_mean is not None and norm.num_batches_tracked is not None
        seen = []
        for value in own:
            norm.running_mean.fill_(value)
            norm.num_batches_tracked += 1 + rank
            wide.fill_(rank + EPS)
            method.step()
            seen.append(norm.running_mean[0].item())
        method.finish()
        last = norm.running_mean.tolist()
        assert norm.num_batches_tracked.item() == 3 * (1 + rank), "integer buffers are never averaged"
        assert last == [20.5] * 2 and wide.item() == 0.5 + EPS, f"{name}: finish() leaves the mean of the newest"
        if name != "ddp":
            assert seen == ([0.5, 10.5, 20.5] if name in ("local", "slowmo", "diloco") else [rank, 0.5, 10.5]), name


@on_ranks(2)
def test_ddp_averages_a_buffer_that_the_model_has_replaced(rank: int):
    model = nn.Linear(1, 1)
    model.register_buffer("seen", torch.zeros(2))
    model.register_buffer("grown", torch.zeros(2))
    _, method = make_method("ddp", model)
    model.seen, model.grown = torch.full((2,), 4.0 * rank), torch.full((3,), 3.0 + rank)
    method.step()
    method.finish()
    assert model.seen.tolist() == [2.0] * 2 and model.grown.tolist() == [3.0 + rank] * 3


def statistics(rank: int, config: Settings) -> list[dict[str, float]]:
    """Two elements; worker r's displacement in rounds 0, 1, 2 has the means (3, 4), (0, 2), (1, 1)."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    co2 = config.build([p])
    rounds = []
    for mean in ((3.0, 4.0), (0.0, 2.0), (1.0, 1.0)):
        with torch.no_grad():
            p.sub_(torch.tensor(mean) * (2.0 if rank else 0.0))
        co2.step()
        rounds.append(co2.stats.as_dict())
    assert all(type(v) in (float, int) for r in rounds for v in r.values())
    return rounds


@on_ranks(2)
def test_statistics_of_each_round(rank: int):
    """beta = 1/2, alpha = 1/2, clip 3.5; Lambda by element with c = sqrt(2) in the third round. Then with one gap."""
    empty, second, third = statistics(rank, Settings(tau=1, outer_momentum=0.5, outer_lr=0.5, clip=3.5))
    assert empty["pseudo_gradient_norm"] == empty["bytes_sent"] == 0.0
    assert (second["round"], third["round"]) == (1, 2)
    assert second["pseudo_gradient_norm"] == 5.0
    assert (second["consensus_distance"], third["consensus_distance"]) == (5.0, 2.0), "one worker moves alone"
    assert (second["gap_mean"], second["gap_max"]) == (1.0, 1.0)
    assert second["clipped_share"] == 0.5  # (3, 4) -> (3, 3.5)
    assert second["momentum_norm"] == pytest.approx((3**2 + 3.5**2) ** 0.5)
    gaps = [1 + 0.5 * m / 2**0.5 for m in (3.0, 3.5)]  # Delta = (0, 2) has the RMS sqrt(2)
    assert third["pseudo_gradient_norm"] == 2.0
    assert third["gap_mean"] == pytest.approx(sum(gaps) / 2)
    assert third["gap_max"] == pytest.approx(gaps[1])
    assert third["clipped_share"] == 0.0
    assert third["momentum_norm"] == pytest.approx((1.5**2 + (1.75 + 2 / gaps[1]) ** 2) ** 0.5)
    # a ring of two sends the buffer once: 2 elements and 10 scalars of 8 bytes
    assert second["bytes_sent"] == third["bytes_sent"] == 96
    assert second["exposed_seconds"] >= 0 and second["allreduce_seconds"] > 0

    _, second, third = statistics(rank, Settings(tau=1, outer_momentum=0.0, outer_lr=0.5, gap="norm", clip=2.5))
    assert second["clipped_share"] == 1.0 and second["momentum_norm"] == pytest.approx(2.5 * 2**0.5)  # 5 before
    gap = 1 + 0.5 * 2.5 * 2**0.5 / 2.0
    assert third["gap_mean"] == third["gap_max"] == pytest.approx(gap)
    assert third["clipped_share"] == 0.0 and third["momentum_norm"] == pytest.approx(2.0 / gap)


@pytest.mark.parametrize("tau", [1, 2, 3])
def test_the_seconds_of_a_step_are_a_whole_steps(tau: int):
    """Of all but a round's first, which may follow an evaluation, unless there is no other."""
    co2 = CO2([nn.Parameter(torch.ones(2))], CO2Config(tau=tau))
    for _ in range(3 * tau):
        time.sleep(0.02)
        if co2.step():
            assert float(co2.stats.step_seconds) >= 0.02


class Event:
    """A GPU's, at the `now` at which it was made, in milliseconds."""

    now = 0.0

    def __init__(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.mark.parametrize("gpu", [False, True])
def test_a_merge_in_mid_round_is_no_part_of_a_local_step(gpu: bool, monkeypatch: pytest.MonkeyPatch):
    """On a GPU the stream may wait in it: that would pass for slow steps, and tau auto would take too few of them."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(core.stats, "mark", lambda device: Event() if gpu else Event.now / 1e3)
    clock, Event.now = RoundClock(torch.device("cpu")), 0.0
    for merge in (7000.0, 0.0):  # the second round merges at its boundary
        Event.now += 9.0  # its first step, which is not timed
        clock.steps_begin(after=1)
        Event.now += 30.0
        if merge:
            with clock.early_merge(2):
                Event.now += merge
        Event.now += 60.0
        with clock.boundary(tau=4, local_steps=4):
            Event.now += 50.0
        assert ready(clock.stats.step_seconds) and float(clock.stats.step_seconds) == pytest.approx(0.03)
        assert float(clock.stats.merge_seconds) == pytest.approx(merge / 1e3)
        assert float(clock.stats.boundary_seconds) == pytest.approx(0.05)


def round_stats(**values: float) -> dict[str, float]:
    return RoundStats(**values).as_dict()  # pyright: ignore[reportArgumentType]


def test_a_rounds_hidden_time_and_link_rate():
    stats = round_stats(allreduce_seconds=0.5, exposed_seconds=0.1, bytes_sent=1_000_000)
    assert stats["hidden_seconds"] == pytest.approx(0.4)
    assert stats["link_mbit"] == pytest.approx(16)  # 8 Mbit in half a second
    late = round_stats(allreduce_seconds=0.5, exposed_seconds=0.7)  # waited for a peer that launched late
    assert late["hidden_seconds"] == 0.0
    assert round_stats()["link_mbit"] == 0.0  # nothing has landed in the first round


def test_a_run_adds_its_rounds_up_and_resumes():
    overlap = Overlap()
    assert overlap.hidden_share == 1.0 and overlap.link_mbit == 0.0
    overlap.add(round_stats(allreduce_seconds=0.5, exposed_seconds=0.1, bytes_sent=1_000_000))
    resumed = Overlap()
    vars(resumed).update(vars(overlap))  # as training/loop/run.py keeps it
    resumed.add(round_stats(allreduce_seconds=1.5, exposed_seconds=0.5, bytes_sent=3_000_000))
    assert resumed.summary() == pytest.approx(
        {
            "rounds": 2,
            "exposed_seconds": 0.6,
            "hidden_seconds": 1.4,
            "allreduce_seconds": 2.0,
            "hidden_share": 0.7,
            "bytes_sent": 4_000_000,
            "link_mbit": 16.0,
        }
    )


QUADRATICS = ((2, 0.9), (6, 0.8), (8, 0.9))  # delay of 8 local steps, and q


@pytest.mark.slow
@on_ranks(3)
def test_under_noise_it_is_what_the_theory_says(rank: int):
    """(1 - 1/G) V / (1 - v^2), the mean square of a number's distance, over many numbers and rounds: docs/theory.md."""
    for delay, q in QUADRATICS:
        p = nn.Parameter(torch.zeros(20_000))
        late: Any = "boundary" if delay == 8 else delay
        config = CO2Config(8, merge="keep_local", delay=late, gap="none", outer_momentum=0.0, clip=None)
        co2, draw, told = CO2([p], config), torch.Generator().manual_seed(rank), []
        for _ in range(24 * 8):
            with torch.no_grad():
                p.mul_(q).add_(torch.randn(p.shape, generator=draw))
            if co2.step():
                told.append(co2.stats.as_dict()["consensus_distance"] ** 2 / p.numel())
        co2.finish()
        seen = sum(told[12:]) / 12
        assert total_world_size(seen) == [seen] * 3 and seen == pytest.approx(
            Quadratic("keep_local", q, 8, delay).apart(3), rel=0.02
        )


HIDDEN = {
    "co2": CO2Config(tau=3),
    "keep_local": CO2Config(tau=3, merge="keep_local", delay=2, gap="none"),
    "on arrival": CO2Config(tau=3, merge="keep_local", delay="auto", gap="none"),
}
ENDS: dict[str, Any] = {name: lambda p, c=c: CO2(p, c) for name, c in HIDDEN.items()} | {
    "shard": lambda p: CO2(p, CO2Config(tau=3), shard=True),
    "no delay": lambda p: CO2(p, CO2Config(tau=3, gap="none", delay=0)),
    "local": lambda p: LocalSGD(p, 3),
    "overlap_local": lambda p: OverlapLocalSGD(p, 3),
}


@on_ranks(2)
def test_a_last_step_saves_an_all_reduce_and_changes_nothing(rank: int):
    """Without and with step(last=True): after as many steps on all, after fewer on rank 0, and once more."""
    for name, build in ENDS.items():
        found: list[list[tuple[Tensor, int]]] = [[], []]
        for says in (False, True):
            params = problems.odd_parameters()
            method = build(params)
            for steps in (6, 6 + 3 * rank, 5, 3):
                for step in range(steps):
                    sgd_step(params, rank, step)
                    if name == "on arrival":
                        method.allreduce.drain()  # so that a mean is merged after the same step
                    method.step(last=says and step == steps - 1)
                method.finish()
                found[says].append((flat(params), method.rounds))
        assert alike(*(end for end, _ in found[True])), f"{name}: workers differ after finish()"
        # after 6 steps, after 6 to 9, not after 5, after 3
        for (usual, rounds), (ended, fewer), less in zip(*found, (1, 2, 2, 3), strict=True):
            assert rounds - fewer == less, (name, rounds, fewer)
            if name != "overlap_local":  # whose every boundary pulls, one without a step, too
                torch.testing.assert_close(ended, usual, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_after_the_last_needs_finish_between():
    co2 = CO2([nn.Parameter(torch.ones(3))], CO2Config(tau=1))
    co2.step(last=True)
    with pytest.raises(UserError, match=r"call finish\(\)"):
        co2.step()
    co2.finish()
    co2.step()
