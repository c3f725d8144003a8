"""L-GreCo on real processes against all workers in one, what it may choose from, and CO2 with it."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2Config, make_method
from core.compression.lgreco.choices import Choice, Layer, LGrecoConfig, curve, family, parse, sent_bytes, uniform
from core.config import CompressionConfig
from core.testing import run_distributed
from tests.core.lgreco_reference import Reference
from tests.core.test_gradient_compression import LGRECO, net, step
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import Mean, flat
from training.data.samples import generator

SHAPES = [(48, 80), (600,), (32, 16, 3, 3), (7,), (120, 40), (3, 360)]
ROUNDS = 7
SETTINGS = [
    ("int4", LGrecoConfig(every=2, first=2)),
    ("int4", LGrecoConfig(every=3, first=1)),
    ("top0.01", LGrecoConfig(every=2, first=1)),
    ("rank4", LGrecoConfig(every=2, first=2)),
    ("top0.05", LGrecoConfig(every=2, first=1)),
    ("rank2", LGrecoConfig(rule="uniform", every=2, first=2)),
]


def written(rank: int, round: int, layer: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Layers of very unlike sizes and spectra, and other ones in later rounds."""
    shape = SHAPES[layer]
    noise = torch.randn(shape, generator=generator(rank, round, layer), dtype=dtype)
    scale = 10.0 ** ((layer + round // 3) % 3 - 1)
    if layer % 2 == 0:
        column = torch.randn(shape[0], 1, generator=generator(9, layer), dtype=dtype)
        noise = 0.05 * noise.view(shape[0], -1) + column
    return scale * noise.reshape(-1)


def reducers(rank: int, world_size: int) -> list[list[Tensor]]:
    return [of_rounds(rank, *setting) for setting in SETTINGS]


def mean_of(compression: CompressionConfig, shapes: Any, dtype: torch.dtype = torch.float32, buffers: int = 0) -> Mean:
    """The mean of tensors of these shapes, beside a buffer of so many elements."""
    tensors, more = [torch.zeros(s, dtype=dtype) for s in shapes], [torch.zeros(buffers, dtype=dtype)]
    return Mean(tensors, {"steps": 1, "weight": 1}, compression.reducer, buffers=more if buffers else [])


def lgreco(like: str, **settings: Any) -> CompressionConfig:
    return CompressionConfig("lgreco", like=like, lgreco=LGrecoConfig(**settings))


def built(like: str, config: LGrecoConfig, dtype: torch.dtype = torch.float64) -> Mean:
    return mean_of(CompressionConfig("lgreco", like=like, lgreco=config), SHAPES, dtype, buffers=5)


def once(mean: Mean, rank: int, round: int, steps: float = 1.0) -> Tensor:
    """One reduction; what lands."""
    bucket = mean.buckets[0]
    bucket.payload.copy_(torch.cat([written(rank, round, i, bucket.flat.dtype) for i in range(len(SHAPES))]))
    bucket.values.fill_(rank + 0.5)
    return mean.reduce(steps).clone()


def of_rounds(rank: int, like: str, config: LGrecoConfig) -> list[Any]:
    """What lands in each round, the buffers' mean, and the values of what is sent."""
    mean, seen = built(like, config), []
    for round in range(ROUNDS):
        landed = once(mean, rank, round)
        chosen = torch.tensor([c.value for c in mean.reducer.chosen], dtype=torch.float64)
        seen.append([landed, mean.buckets[0].values.clone(), chosen])
    mean.close()
    return seen


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_equals_all_workers_in_one_process(world_size: int):
    results = run_distributed(reducers, world_size)
    for number, (like, config) in enumerate(SETTINGS):
        expected, switches = Reference(SHAPES, world_size, like, config, torch.float64), set()
        for round in range(ROUNDS):
            rows = [torch.stack([written(r, round, i) for r in range(world_size)]) for i in range(len(SHAPES))]
            chosen = torch.tensor([c.value for c in expected.chosen], dtype=torch.float64)
            landed = torch.cat(expected.reduce(rows))
            switches.add(tuple(chosen.tolist()))
            first = results[0][number][round]
            torch.testing.assert_close(first[0], landed, rtol=1e-9, atol=1e-9)
            assert torch.equal(first[2], chosen)
            for result in results:
                assert torch.equal(result[number][round][0], first[0]), "decoded alike, bit for bit"
                assert torch.equal(result[number][round][1], torch.full((5,), world_size / 2, dtype=torch.float64))
        assert len(switches) > 1 or config.rule == "uniform", f"{like} {config}: nothing was ever chosen anew"


@pytest.mark.parametrize("workers", [1, 3])
@on_ranks()
def test_int4_everywhere_is_int4(rank: int, workers: int):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        ours = built("int4", LGrecoConfig(rule="uniform"), dtype)
        plain = mean_of(CompressionConfig("int4"), SHAPES, dtype, buffers=5)
        for round in range(3):
            landed = [once(mean, rank, round) for mean in (ours, plain)]
        assert torch.equal(*landed) and torch.equal(ours.buckets[0].rest, plain.buckets[0].rest)
        assert ours.allreduce.bytes_sent == plain.allreduce.bytes_sent
        ours.close(), plain.close()


LARGE = [(400, 300), (300, 250), (5000,), (64, 32, 3, 3)]


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_bytes_sent_are_those_allocated(rank: int, workers: int):
    """Of each family, by the stages' count, which another test holds to the kernel's."""
    for like in ("int4", "top0.01", "rank4"):
        mean = mean_of(lgreco(like, first=2), LARGE)
        for round in range(3):  # decides from the second
            draw = torch.randn(mean.buckets[0].numel, generator=generator(rank, round))
            mean.buckets[0].payload.copy_(draw * torch.linspace(0.01, 3, len(draw)) ** 3)
            mean.reduce()
        told = mean.reducer.allocation
        assert mean.allreduce.bytes_sent == pytest.approx(told.bytes, rel=0.02) and told.bytes <= told.uniform_bytes
        mean.close()


@on_ranks(2)
def test_low_rank_lands_nearly_alike_on_unlike_processors(rank: int):
    """Worker 1 factors matrices with other roundings. The workers' mean has fewer ranks than are sent; their own
    differences, which cancel in it, have all. Where a column of P is but rounding, that is unlike, and what each worker
    finds along it, too."""
    if rank == 1:
        qr = torch.linalg.qr
        torch.linalg.qr = lambda x: tuple(t.to(x.dtype) for t in qr(x.double()))
    mean = mean_of(lgreco("rank4", rule="uniform"), [(100, 60)])
    for round in range(4):
        draw = generator(round)
        low = torch.randn(100, 2, generator=draw) @ torch.randn(2, 60, generator=draw)
        own = torch.randn(100, 60, generator=draw) * (1 - 2 * rank)
        mean.buckets[0].payload.copy_((low + own).view(-1))
        ours, theirs = total_world_size(mean.reduce().clone())
        assert (ours - theirs).norm() < 1e-4 * ours.norm()
    mean.close()


def test_costs_by_hand():
    """A matrix 40 x 30, float32, four workers: 1.5 messages of what is reduced, three of what is gathered."""
    layer = Layer(0, 1200, 40, 30, 4)
    costs = {"int4": 1200 * 132 / 256 * 1.5, "int2": 1200 * 68 / 256 * 1.5}
    for name, bytes in (costs | {"rank4": 4 * 70 * 4 * 1.5, "top0.01": 12 * 8 * 3}).items():
        assert sent_bytes(layer, parse(name), 4) == pytest.approx(bytes)
    assert sent_bytes(layer, Choice("raw"), 4) == 4800 * 1.5
    assert sent_bytes(layer, parse("top0.01"), 1) == 96, "one worker decides as one of two"


def test_curves_by_hand():
    """diag(4, 3, 2, 1): rank r leaves the root of the squares of the rest; top-k what the smallest add up to."""
    matrix = torch.zeros(40, 30, dtype=torch.float64)
    matrix[range(4), range(4)] = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    layer = Layer(0, 1200, 40, 30, 8)
    raw, exact = Choice("raw"), pytest.approx

    def errors(values: Tensor, *choices: Choice) -> list[float]:
        return curve(values.view(-1), layer, choices, [True] * len(choices), seed=0).tolist()

    assert errors(matrix, raw, Choice("top", 2 / 1200), Choice("top", 1e-9)) == exact([0.0, 5**0.5, 14**0.5], abs=1e-12)
    # int2: all four lie in the first block, whose step is 4: 3 becomes 4, 2 (half a step, to even) and 1 become 0
    assert errors(matrix, raw, parse("int2")) == exact([0.0, 6**0.5], abs=1e-12)
    of_ranks = errors(matrix, raw, Choice("rank", 1), Choice("rank", 3))
    assert of_ranks == exact([0.0, 14**0.5, 1.0], abs=2e-3)
    assert of_ranks[1] >= 14**0.5 - 1e-12 and of_ranks[2] >= 1 - 1e-12, "iterations find no more than is there"
    for choice in (parse("int2"), Choice("rank", 3), Choice("top", 2 / 1200)):
        assert all(math.isnan(error) for error in errors(matrix * float("nan"), raw, choice))
        assert curve(matrix.view(-1), layer, [raw, choice], [True, False], seed=0).tolist() == [0, 0]


def test_choices_of_each_family():
    of_int4, of_rank4 = (",".join(map(str, family(parse(like)))) for like in ("int4", "rank4"))
    assert of_int4 == "as it is,int4,int2,int8"
    assert of_rank4 == "as it is,rank4,rank2,rank3,rank5,rank6,rank7,rank8"
    tops = [c.value for c in family(parse("top0.01")) if c.kind == "top"]
    assert sorted(tops) == pytest.approx([0.01 * 10 ** (i / 4 - 1) for i in range(9)])
    assert max(c.value for c in family(parse("rank40"), 48)) == 48, "no more than the highest that a layer has"
    reducer = built("rank4", LGrecoConfig()).reducer
    small = reducer.layers[3]
    assert str(uniform(small, parse("rank4"))) == "as it is", "a vector has no rank"
    choices, offered = reducer.decider.choices, reducer.decider.offered.tolist()
    assert offered[3] == [str(c) == "as it is" for c in choices]
    assert not offered[0][0] and any(offered[0]), "nor is a matrix sent as it is"


def made(config: CO2Config) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), make_method("co2", model, co2=config, timeout=30.0)[1]


def go(run: tuple[nn.Sequential, torch.optim.Optimizer, Any], rank: int, steps: range, bad: Any = None) -> Any:
    """Local steps; the method. bad: the rank and the step after which parameters are no numbers."""
    model, optimizer, co2 = run
    for number in steps:
        step(model, optimizer, rank, number)
        if (rank, number) == bad:
            model[3].weight.data[2:4] = float("nan")
        co2.step()
    return co2


def ended(run: tuple[nn.Sequential, torch.optim.Optimizer, Any]) -> tuple[Tensor, list[str]]:
    """Parameters, and the last choices."""
    run[2].finish()
    seen = flat(run[0].parameters()), [str(c) for c in run[2].reducer.chosen]
    run[2].close()
    return seen


@on_ranks(2, timeout=120)
def test_one_workers_nan_reaches_nobody(rank: int):
    """A worker's parameters are no numbers in the second round, which decides."""
    for like in ("int4", "rank2", "top0.05"):
        run = made(CO2Config(tau=2, compression=LGRECO[like]))
        number = go(run, rank, range(14), bad=(1, 3)).reducer.allocation.number
        ours, chosen = ended(run)
        assert alike(ours) and ours.isfinite().all() and total_world_size(chosen) == [chosen] * 2 and number > 2


@on_ranks(2)
def test_co2_resumes_with_its_allocation(rank: int):
    """Before the first decision, and after some."""
    for like, at in product(("int4", "rank2", "top0.05"), (2, 8)):
        first, second = (made(CO2Config(tau=2, compression=LGRECO[like])) for _ in range(2))
        go(first, rank, range(at))
        for to, saved in zip(second, [part.state_dict() for part in first], strict=True):
            to.load_state_dict(saved)
        for run in (first, second):
            go(run, rank, range(at, 20))
        (ours, chosen), (theirs, same) = ended(first), ended(second)
        assert torch.equal(ours, theirs) and chosen == same, (like, at)
