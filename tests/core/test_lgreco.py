"""L-GreCo's reducer on real processes against all workers in one, and the ways of sending that it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.assembly.config import WireConfig
from core.lgreco.choices import LGrecoConfig, padded_bytes
from core.testing import run_distributed
from tests.core.lgreco_reference import Reference
from tests.problems import Mean
from training.data import generator

SHAPES = [(48, 80), (600,), (32, 16, 3, 3), (7,), (120, 40), (3, 360)]
ROUNDS = 7
SETTINGS = [
    ("int4", LGrecoConfig(every=2, first=2)),
    ("int4", LGrecoConfig(every=3, first=1)),
    ("top0.01", LGrecoConfig(every=2, first=1)),
    ("rank4", LGrecoConfig(every=2, first=2)),
    ("rank4", LGrecoConfig(every=3, first=1, lowest_rank=0.25, highest_rank=4.0)),
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


def mean_of(wire: WireConfig, shapes: Any, dtype: torch.dtype = torch.float32, buffers: int = 0) -> Mean:
    """The mean of tensors of these shapes, beside a buffer of so many elements."""
    tensors, more = [torch.zeros(s, dtype=dtype) for s in shapes], [torch.zeros(buffers, dtype=dtype)]
    return Mean(tensors, {"steps": 1, "weight": 1}, wire.reducer, buffers=more if buffers else [])


def lgreco(like: str, **settings: Any) -> WireConfig:
    return WireConfig("lgreco", like=like, lgreco=LGrecoConfig(**settings))


def built(like: str, config: LGrecoConfig, dtype: torch.dtype = torch.float64) -> Mean:
    return mean_of(WireConfig("lgreco", like=like, lgreco=config), SHAPES, dtype, buffers=5)


def once(mean: Mean, rank: int, round: int, steps: float = 1.0) -> Tensor:
    """One reduction; what lands."""
    bucket = mean.buckets[0]
    bucket.payload.copy_(torch.cat([written(rank, round, i, bucket.flat.dtype) for i in range(len(SHAPES))]))
    bucket.values.fill_(rank + 0.5)
    return mean.reduce(steps).clone()


def of_rounds(rank: int, like: str, config: LGrecoConfig) -> list[Any]:
    """What lands in each round, the buffers' mean, and the values of what is sent next."""
    mean, seen = built(like, config), []
    for round in range(ROUNDS):
        landed = once(mean, rank, round)
        chosen = torch.tensor([c.value for c in mean.reducer.chosen], dtype=torch.float64)
        seen.append([landed, mean.buckets[0].values.clone(), chosen])
    mean.close()
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_all_workers_in_one_process(world_size: int):
    """Means, choices, switches and what is held back, round after round; every rank holds the same bits."""
    results = run_distributed(reducers, world_size)
    for number, (like, config) in enumerate(SETTINGS):
        expected, switches = Reference(SHAPES, world_size, like, config, torch.float64), set()
        for round in range(ROUNDS):
            rows = [torch.stack([written(r, round, i) for r in range(world_size)]) for i in range(len(SHAPES))]
            landed = torch.cat(expected.reduce(rows))
            chosen = torch.tensor([c.value for c in expected.chosen], dtype=torch.float64)
            switches.add(tuple(chosen.tolist()))
            first = results[0][number][round]
            torch.testing.assert_close(first[0], landed, rtol=1e-9, atol=1e-9)
            assert torch.equal(first[2], chosen)
            for result in results:
                assert torch.equal(result[number][round][0], first[0]), "decoded alike, bit for bit"
                assert torch.equal(result[number][round][1], torch.full((5,), world_size / 2, dtype=torch.float64))
        assert len(switches) > 1 or config.rule == "uniform", f"{like} {config}: nothing was ever chosen anew"


# -- int4 everywhere --------------------------------------------------------------------------------------------


def int4_twice(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, int, int]]:
    """By dtype: what int4 lands after three rounds, and what lgreco does that sends int4 everywhere."""
    seen = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        ours = built("int4", LGrecoConfig(rule="uniform"), dtype)
        plain = mean_of(WireConfig("int4"), SHAPES, dtype, buffers=5)
        for round in range(3):
            landed = [once(mean, rank, round) for mean in (ours, plain)]
        landed += [ours.buckets[0].rest, plain.buckets[0].rest]
        seen.append((*landed, ours.flight.bytes_sent, plain.flight.bytes_sent))
        ours.close(), plain.close()
    return seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_int4_everywhere_is_int4(world_size: int):
    """Bit for bit, with the same bytes."""
    for result in run_distributed(int4_twice, world_size):
        for ours, plain, ours_rest, plain_rest, ours_bytes, plain_bytes in result:
            assert torch.equal(ours, plain) and torch.equal(ours_rest, plain_rest) and ours_bytes == plain_bytes


# -- bytes ------------------------------------------------------------------------------------------------------

LARGE = [(400, 300), (300, 250), (5000,), (64, 32, 3, 3)]
SMALL = [(64, 16, 3, 3), *(20 * [(64,)]), (48, 64), (10, 64), (700,), (10,)]  # most layers are less than a block


def bytes_of(rank: int, world_size: int) -> list[tuple[str, float, float, list[str]]]:
    """(like, counted, allocated, choices) of every family, of a large and a small model."""
    seen = []
    for shapes, like, config in (
        (LARGE, "int4", LGrecoConfig(first=2)),
        (LARGE, "top0.01", LGrecoConfig(first=2)),
        (LARGE, "rank4", LGrecoConfig(first=2)),
        *((SMALL, like, LGrecoConfig(first=2)) for like in ("int4", "rank4")),
    ):
        mean = mean_of(WireConfig("lgreco", like=like, lgreco=config), shapes)
        layers = mean.reducer.layers
        for round in range(3):  # in the second it decides
            chosen = list(mean.reducer.chosen)
            draw = torch.randn(mean.buckets[0].numel, generator=generator(rank, round))
            mean.buckets[0].payload.copy_(draw * torch.linspace(0.01, 3, len(draw)) ** 3)
            mean.reduce()
        allocated = sum(padded_bytes(layers, chosen, world_size))
        told = mean.reducer.allocation
        assert told is None or sum(told.bytes) == pytest.approx(allocated) and allocated <= told.uniform_bytes
        seen.append((like, mean.flight.bytes_sent, allocated, [str(c) for c in chosen]))
        mean.close()
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_sent_are_those_allocated(world_size: int):
    """By the stages' count, which test_wire_bytes.py compares with the kernel's."""
    for result in run_distributed(bytes_of, world_size):
        for like, counted, allocated, choices in result:
            assert counted == pytest.approx(allocated, rel=0.02), f"{like}: {choices}"


def unlike_workers(rank: int, world_size: int) -> list[list[str]]:
    """Worker 1's first layer is hard, worker 0's is as the others."""
    seen = []
    for hard in (0.0, 30.0):
        mean = mean_of(lgreco("int4", first=1), [(64, 64)] * 8)
        mean.buckets[0].payload.copy_(torch.randn(8 * 4096, generator=generator(0)))
        mean.buckets[0].payload[:4096] *= 1 + hard * rank
        mean.reduce()
        seen.append([str(c) for c in mean.reducer.chosen])
        mean.close()
    return seen


def test_every_workers_errors_count():
    """Released: the first worker's alone."""
    first, second = run_distributed(unlike_workers, 2)
    assert first == second
    assert first[0] != first[1] and first[1][0] > max(first[1][1:]), "the hard layer gets more bits"


def unlike_processors(rank: int, world_size: int) -> list[Tensor]:
    """Worker 1 factors matrices with other roundings. The workers' mean has fewer ranks than are sent; their own
    differences, which cancel in it, have all."""
    if rank == 1:
        qr = torch.linalg.qr
        torch.linalg.qr = lambda x: tuple(t.to(x.dtype) for t in qr(x.double()))
    mean, landed = mean_of(lgreco("rank4", rule="uniform"), [(100, 60)]), []
    for round in range(4):
        draw = generator(round)
        low = torch.randn(100, 2, generator=draw) @ torch.randn(2, 60, generator=draw)
        own = torch.randn(100, 60, generator=draw) * (1 - 2 * rank)
        mean.buckets[0].payload.copy_((low + own).view(-1))
        landed.append(mean.reduce().clone())
    mean.close()
    return landed


def test_low_rank_lands_nearly_alike_on_unlike_processors():
    """Where a column of P is but rounding, that is unlike, and what each worker finds along it, too."""
    for ours, theirs in zip(*run_distributed(unlike_processors, 2), strict=True):
        assert (ours - theirs).norm() < 1e-4 * ours.norm()
