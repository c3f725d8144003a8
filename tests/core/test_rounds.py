"""What surrounds the algorithm: construction, buffers, statistics."""

import time
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import CO2, CO2Config, LocalSGD, ShardedCO2, UserError, make_method
from core.methods import METHODS
from core.testing import run_distributed
from tests import problems
from tests.problems import Settings, refusal, take_steps

LOCAL_METHODS = tuple(m for m in METHODS if m != "ddp")


# -- construction ---------------------------------------------------------------------------------------------


def start_apart(rank: int, world_size: int) -> list[list[Tensor]]:
    """Every worker comes with other values; the last parameter is frozen, one buffer counts in integers."""
    results = []
    for name in LOCAL_METHODS:
        params = [nn.Parameter(p.detach() + rank) for p in problems.odd_parameters()[:-1]]
        params[-1].requires_grad_(False)
        model = nn.ParameterList(params)
        model.register_buffer("mean", torch.full((2,), float(rank), dtype=torch.bfloat16))
        model.register_buffer("count", torch.tensor(rank + 5))
        make_method(name, model, co2=CO2Config(tau=2))
        results.append([t.detach().clone() for t in [*params, *model.buffers()]])
    return results


def test_everything_starts_as_on_rank_0():
    results = run_distributed(start_apart, 3)
    expected = [*(p.detach() for p in problems.odd_parameters()[:-1]), torch.zeros(2), torch.tensor(5)]
    for of_rank in results:
        for of_method in of_rank:
            for ours, want in zip(of_method, expected, strict=True):
                assert torch.equal(ours.to(want.dtype), want)


MISMATCHES: dict[str, tuple[list[int], int, float]] = {  # sizes, tau, outer_lr of rank 2; the others have (3, 4), 2, 1
    "shape": ([3, 5], 2, 1.0),
    "count": ([3], 2, 1.0),
    "tau": ([3, 4], 3, 1.0),
    "outer_lr": ([3, 4], 2, 0.5),
}


def build_unequal(rank: int, world_size: int) -> dict[str, str]:
    messages = {}
    for what, odd in MISMATCHES.items():
        sizes, tau, alpha = odd if rank == 2 else ([3, 4], 2, 1.0)
        params = [nn.Parameter(torch.zeros(n)) for n in sizes]
        messages[what] = refusal(CO2, params, CO2Config(tau=tau, outer_lr=alpha))
    return messages | {"local tau": refusal(LocalSGD, [nn.Parameter(torch.zeros(3))], tau=2 + (rank == 2))}


def test_unequal_workers_are_refused_with_the_rank_named():
    for messages in run_distributed(build_unequal, 3):
        assert all("rank 2" in text and "rank 1" not in text for text in messages.values())
        assert "(4,)" in messages["shape"] and "(5,)" in messages["shape"]
        assert "2 tensors, against 1" in messages["count"]
        assert "'tau': 2" in messages["tau"] and "'tau': 3" in messages["tau"]
        assert "0.5" in messages["outer_lr"]
        assert "tau=2" in messages["local tau"] and "tau=3" in messages["local tau"]


def frozen_parameters(rank: int, world_size: int) -> tuple[bool, bool]:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)]
    co2 = CO2(params, CO2Config(tau=1))
    params[1].data.fill_(10.0 + rank)  # whatever the user does to it later is the user's
    take_steps(co2, params, rank, range(3))
    co2.finish()
    return bool((params[1] == 10.0 + rank).all()), bool((params[0] != 1).all())


def test_frozen_parameters_are_left_alone_after_the_broadcast():
    assert run_distributed(frozen_parameters, 2) == [(True, True)] * 2


def in_a_group(rank: int, world_size: int) -> float | None:
    """Ranks 1 and 2 train without rank 0, which never builds anything; rank 1 is then the one that all start from."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    p = nn.Parameter(torch.full((1,), 10.0 * rank))
    co2 = Settings(tau=1, outer_momentum=0.0, gap="none", clip=None, delay=0).build([p], group=group)
    with torch.no_grad():
        p.sub_(rank)
    co2.step()
    co2.finish()
    return p.item()


def test_a_group_trains_by_itself():
    assert run_distributed(in_a_group, 3) == [None, 8.5, 8.5]


# -- BatchNorm ------------------------------------------------------------------------------------------------

EPS = 2.0**-40  # which float64 has room for beside a number of the size of 1, and float32 has not


def batch_norm(rank: int, world_size: int) -> dict[tuple[str, bool, bool], dict[str, list[float]]]:
    """All methods, buffers averaged or not, finish() called or not."""
    return {c: running_mean(rank, *c) for c in product(METHODS, (True, False), (True, False))}


def running_mean(rank: int, name: str, average: bool, finish: bool) -> dict[str, list[float]]:
    """The statistics are set by hand: on worker r to r + 10 t in round t."""
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("wide", wide := torch.zeros((), dtype=torch.float64))
    _, method = make_method(name, norm, co2=CO2Config(tau=1), average_buffers=average)
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    seen = []
    for t in range(3):
        norm.running_mean.fill_(rank + 10.0 * t)
        norm.num_batches_tracked += 1 + rank
        wide.fill_(rank + EPS)
        method.step()
        seen.append(norm.running_mean[0].item())
    if finish:
        method.finish()
    count = [norm.num_batches_tracked.item()]
    return {"seen": seen, "last": norm.running_mean.tolist(), "count": count, "wide": [wide.item()]}


@pytest.fixture(scope="module")
def statistics_of() -> list[dict[tuple[str, bool, bool], dict[str, list[float]]]]:
    return run_distributed(batch_norm, 2)


@pytest.mark.parametrize("name", ["local", "slowmo"])
def test_buffers_are_averaged_at_every_boundary(name: str, statistics_of: Any):
    for result in statistics_of:
        assert result[name, True, False]["seen"] == [0.5, 10.5, 20.5]


@pytest.mark.parametrize("name", ["co2", "delayed", "overlap_local"])
def test_delayed_buffers_arrive_one_round_late(name: str, statistics_of: Any):
    for rank, result in enumerate(statistics_of):
        assert result[name, True, False]["seen"] == [rank, 0.5, 10.5]


@pytest.mark.parametrize("name", METHODS)
def test_finish_leaves_the_mean_of_the_newest_buffers(name: str, statistics_of: Any):
    for rank, result in enumerate(statistics_of):
        assert result[name, True, True]["last"] == [20.5, 20.5]
        assert result[name, True, True]["wide"] == [0.5 + EPS]
        assert result[name, True, True]["count"] == [3 * (1 + rank)], "integer buffers are never averaged"


@pytest.mark.parametrize("name", METHODS)
def test_buffers_stay_local_when_not_passed(name: str, statistics_of: Any):
    for rank, result in enumerate(statistics_of):
        assert result[name, False, True]["seen"] == [rank, 10.0 + rank, 20.0 + rank]
        assert result[name, False, True]["last"] == [20.0 + rank] * 2


# -- statistics -----------------------------------------------------------------------------------------------


def statistics(rank: int, world_size: int, config: Settings) -> list[dict[str, float]]:
    """Two elements; worker r's displacement in rounds 0, 1, 2 has the means (3, 4), (0, 2), (1, 1)."""
    assert dist.get_world_size() == 2
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


def test_statistics_of_each_round():
    """beta = 1/2, alpha = 1/2, clip 3.5; Lambda by element with c = sqrt(2) in the third round."""
    config = Settings(tau=1, outer_momentum=0.5, outer_lr=0.5, clip=3.5)
    results = run_distributed(statistics, 2, config)
    for empty, second, third in results:
        assert empty["pseudo_gradient_norm"] == empty["bytes_sent"] == 0.0
        assert (second["round"], third["round"]) == (1, 2)
        assert second["pseudo_gradient_norm"] == 5.0
        assert (second["disagreement"], third["disagreement"]) == (5.0, 2.0)  # one worker moves, the other stays
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


def test_statistics_with_one_gap_and_a_clip():
    config = Settings(tau=1, outer_momentum=0.0, outer_lr=0.5, gap="norm", clip=2.5)
    _, second, third = run_distributed(statistics, 2, config)[0]
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda net: net, "parameters: one Sequential is given: "),
        (lambda net: net[0].weight, "parameters: one Parameter is given: "),
        (lambda net: net.named_parameters(), "parameters: a tuple is among them: "),
        (lambda net: [*net.parameters(), None], "parameters: a NoneType is among them: "),
    ],
)
@pytest.mark.parametrize("build", [CO2, ShardedCO2, lambda given: LocalSGD(given, 2)])
def test_what_are_no_tensors_is_refused_in_one_line(build: Any, given: Any, said: str):
    with pytest.raises(UserError, match=f"^{said}[^\n]*$"):
        build(given(nn.Sequential(nn.Linear(2, 2))))
