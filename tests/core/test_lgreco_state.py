"""L-GreCo in one process: what it holds back, resuming, when it decides, and its dynamic programme."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from core import CO2, CO2Config, UserError
from core.compression.lgreco.choices import BINS, RAW, Decider, Layer, LGrecoConfig, allocate, total
from tests.core.test_lgreco import SETTINGS, SHAPES, built, lgreco, mean_of, written
from tests.problems import Mean
from training.data.samples import generator


def of_layers(mean: Mean) -> Sequence[Tensor]:
    """The layers' elements in the payload."""
    return mean.buckets[0].payload.split([layer.numel for layer in mean.reducer.layers])


def train(mean: Mean, rounds: range, scale: Any = 1.0) -> None:
    for round in rounds:
        bucket = mean.buckets[0]
        bucket.payload.copy_(torch.cat([written(0, round, i, bucket.flat.dtype) for i in range(len(SHAPES))]))
        for i, view in enumerate(of_layers(mean)):
            view.mul_(scale if isinstance(scale, float) else scale(i, round))
        mean.reduce()


def state_of(mean: Mean) -> list[torch.Tensor]:
    return [flat for flats in mean.reducer.state.values() for flat in flats]


@pytest.mark.parametrize("like", ["int4", "top0.01", "rank4"])
def test_a_layer_that_is_not_finite_keeps_its_choice_and_the_others_go_on(like: str):
    mean = built(like, LGrecoConfig(every=1, first=1))
    train(mean, range(2))
    before = list(mean.reducer.chosen)
    train(mean, range(2, 3), lambda i, round: float("nan") if i == 4 else 10.0**i)
    bad = [bool(v.isnan().any()) for v in of_layers(mean)]
    assert bad[4], "what is not finite is seen by all"
    train(mean, range(3, 4))  # decides
    assert mean.reducer.chosen[4] == before[4] and mean.reducer.allocation.number == 3
    assert like == "rank4" or list(mean.reducer.chosen) != before
    assert "layers 4 are not finite and keep what they have" in mean.reducer.allocation.reason


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_low_rank_goes_on_after_a_first_round_of_nothing_or_nan(bad: float):
    """Also of a matrix whose first rows nobody uses, as an embedding's: there the unit vectors that orth makes of zeros
    find nothing, ever."""
    mean = mean_of(lgreco("rank2", rule="uniform"), [(100, 20)])
    matrix = torch.zeros(100, 20)
    matrix[4:] = torch.randn(96, 1, generator=generator(1)) @ torch.randn(1, 20, generator=generator(2))
    for sent in (torch.full_like(matrix, bad), matrix):
        mean.buckets[0].payload.copy_(sent.view(-1))
        mean.reduce()
        for flat in state_of(mean):
            flat.nan_to_num_(0.0, 0.0, 0.0)  # as ddp's hook does
    torch.testing.assert_close(mean.buckets[0].payload.view(100, 20), matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s[0])
def test_nothing_is_lost_over_switches_nor_where_nobody_moved(setting: Any):
    """What landed and what is held back are the sum of all differences; means of nothing are thrown away."""
    mean, sums, got = built(*setting), 0.0, 0.0
    for round in range(8):
        if round % 3 == 2:
            mean.buckets[0].payload.zero_()
            mean.reduce(0.0)
            continue
        train(mean, range(round, round + 1))
        got = got + mean.buckets[0].payload
        sums = sums + torch.cat([written(0, round, i) for i in range(len(SHAPES))])
    mean.reducer._switch([RAW] * len(SHAPES))  # all that is held back of means joins the worker's own
    torch.testing.assert_close(got + held(mean), sums, rtol=1e-9, atol=1e-9)


def held(mean: Mean) -> torch.Tensor:
    """What error feedback holds back, all of it the worker's own, in the payload's order."""
    return torch.cat([*mean.reducer._layouts[0].held.values()])


def test_another_settings_checkpoint_is_refused_in_one_line():
    def co2(like: str) -> CO2:
        return CO2([torch.nn.Parameter(torch.ones(40, 30))], CO2Config(tau=1, compression=lgreco(like, first=1)))

    first = co2("rank2")
    first.step(), first.step()
    for like in ("rank4", "int4"):
        with pytest.raises(UserError, match="and the compression that wrote it$"):
            co2(like).load_state_dict(first.state_dict())


@pytest.mark.parametrize("like", ["int4", "top0.05", "rank2"])
def test_dtypes_together_send_what_each_alone_does(like: str):
    """A model with 16-bit and float32 parameters, and buffers in a dtype of which there is no parameter."""
    kinds = {torch.bfloat16: [(24, 40), (300,)], torch.float32: [(60, 20)]}
    compression = lgreco(like, rule="uniform").reducer
    buffers = [torch.zeros(5, dtype=torch.float64)]

    def landed(dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        tensors = [torch.zeros(s, dtype=d) for d in dtypes for s in kinds[d]]
        mean = Mean(tensors, {"steps": 1, "weight": 1}, compression, buffers=buffers)
        for round in range(3):
            for bucket in mean.buckets:
                bucket.payload.copy_(torch.randn(bucket.numel, generator=generator(bucket.numel, round)))
                bucket.values.fill_(round + 0.5)
            mean.reduce()
        assert (mean.buckets[-1].values == 2.5).all()
        return [b.payload.clone() for b in mean.buckets if b.numel]

    first, second = landed(list(kinds))
    assert torch.equal(first, *landed([torch.bfloat16])) and second.any()
    assert like == "rank2" or torch.equal(second, *landed([torch.float32]))  # Q is drawn by the layer's number


def test_decisions_come_at_fixed_reductions_twice_as_far_apart_up_to_every():
    for every, first, expected in ((100, 10, [10, 20, 40, 80, 160, 260, 360]), (20, 30, [*range(30, 400, 20)])):
        decider = Decider([Layer(0, 1200, 40, 30, 4)], "int4", LGrecoConfig(every=every, first=first), 2)
        assert [n for n in range(400) if decider.decides(n)] == expected
        summed = [n for n in range(390) if decider.sums(n)]
        assert summed == [n for n in range(390) if any(d - 9 <= n <= d for d in expected)]


def test_every_fragment_decides_in_the_same_rounds():
    late = {"merge": "keep_local", "delay": 1, "gap": "none", "outer_momentum": 0.0, "fragments": 2}
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator(1))) for shape in ((60, 40), (900,))]
    co2 = CO2(params, CO2Config(tau=2, compression=lgreco("int4", every=2, first=2), **late))
    for step in range(12):
        for p in params:
            p.data.add_(torch.randn(p.shape, generator=generator(step)))
        co2.step()
    co2.finish()
    assert [fragment.reducer.allocation.number for fragment in co2.fragments] == [6, 6]


def table(seed: int, layers: int, choices: int) -> tuple[Tensor, Tensor, list[int]]:
    """Errors that fall as sizes grow, layers that differ by orders of magnitude; the uniform choice, in the middle."""
    draw = torch.Generator().manual_seed(seed)
    scale = 10 ** (4 * torch.rand(layers, 1, generator=draw, dtype=torch.float64))
    errors = scale * torch.rand(layers, choices, generator=draw, dtype=torch.float64).sort(1, descending=True).values
    scale = 10 ** (3 * torch.rand(layers, 1, generator=draw, dtype=torch.float64))
    sizes = (scale * torch.rand(layers, choices, generator=draw, dtype=torch.float64).sort(1).values).ceil()
    return errors, sizes, [choices // 2] * layers


def optimum(errors: Tensor, sizes: Tensor, budget: float) -> float:
    """The least size within the budget, by trying everything."""
    e, z = errors.new_zeros(1), sizes.new_zeros(1)
    for layer in range(len(errors)):
        e = (e[:, None] + errors[layer]).view(-1)
        z = (z[:, None] + sizes[layer]).view(-1)
    fits = e <= budget * (1 + 1e-12)
    return float(z[fits].min()) if fits.any() else float("inf")


@pytest.mark.parametrize("bins", [BINS, 100])
def test_against_brute_force(bins: int):
    """300 tables: the budget is kept, the size lies between two optima, never more than uniform."""
    pick, exact = random.Random(bins), 0
    for seed in range(300):
        layers, choices = pick.randint(1, 5), pick.randint(2, 5)
        errors, sizes, uniform = table(seed, layers, choices)
        found = allocate(errors, sizes, uniform, bins=bins)
        least, size = optimum(errors, sizes, total(errors, uniform)), total(sizes, found)
        within = optimum(errors, sizes, total(errors, uniform) * (1 - layers / bins))
        assert least <= size <= min(within, total(sizes, uniform))
        assert total(errors, found) <= total(errors, uniform) * (1 + 1e-9)
        exact += size == least
    assert exact > (270 if bins == BINS else 120)


def test_a_layer_of_zeros_gets_the_least_bytes_and_a_budget_of_zero_stays_one():
    errors = torch.tensor([[0.0, 0.0, 0.0], [9.0, 5.0, 1.0]])
    sizes = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert allocate(errors, sizes, [1, 1]) == [0, 1]
    assert allocate(errors * 0, sizes, [1, 1]) == [0, 0]
    exact = torch.tensor([[3.0, 0.0], [2.0, 0.0]])
    assert allocate(exact, sizes[:, :2], [1, 1]) == [1, 1]


def test_totals_depend_on_no_order():
    """Processors add the terms of a tensor in orders of their own; workers have to come to the same budget."""
    terms = torch.tensor([[1e16], [1.0], [1.0]], dtype=torch.float64)
    for order in itertools.permutations(range(3)):
        assert total(terms[list(order)], [0, 0, 0]) == 1e16 + 2


@pytest.mark.parametrize("unit", [1e308, 1e307, 1e-300, 5e-324 * 2**20])
def test_no_size_of_the_errors_matters(unit: float):
    """Two errors of 1e308 have a sum that no float64 holds."""
    errors = torch.tensor([[4.0, 2.0, 1.0], [4.0, 2.0, 1.0]], dtype=torch.float64) / 4
    sizes = torch.tensor([[1.0, 4.0, 5.0], [8.0, 9.0, 10.0]])
    found = allocate(errors, sizes, [1, 1])
    assert allocate(errors * unit, sizes, [1, 1]) == found
    assert allocate(errors * unit, sizes.double() / 10 * unit, [1, 1]) == found
    least = torch.full((2, 1), unit, dtype=torch.float64)
    assert allocate(least, least, [0, 0]) == [0, 0]
