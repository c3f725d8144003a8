"""The compressed mean on real processes against a simulation in one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import core.wires.quantized
from core.assembly.config import WireConfig
from core.testing import run_distributed
from core.wires.formats import BLOCK, decode, encode, nbytes
from tests.problems import Mean
from training.data import generator

NARROW: tuple[Any, ...] = ("bfloat16", "float16", "int8", "int4", "int2")
WAYS = [(wire, feedback) for wire in NARROW for feedback in (True, False)]
ROUNDS = 3
# numel of the encoded tensors, then of the exact ones, by dtype: several blocks, part of one, none
LAYOUT = {
    torch.float64: ([1500, 3], [7]),
    torch.float32: ([5], []),
    torch.bfloat16: ([700], [1, 2]),
    torch.float16: ([], [4]),
}


def templates() -> tuple[list[Tensor], list[Tensor]]:
    lossy = [torch.zeros(n, dtype=d) for d, (sizes, _) in LAYOUT.items() for n in sizes]
    return lossy, [torch.zeros(n, dtype=d) for d, (_, sizes) in LAYOUT.items() for n in sizes]


def written(rank: int, round: int, bucket: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=generator(rank, round, bucket), dtype=dtype) * 10.0**-bucket


def means(rank: int, world_size: int, segment: int) -> list[list[Tensor]]:
    core.wires.quantized.SEGMENT = segment
    return [of_rounds(rank, world_size, *way) for way in WAYS]


def of_rounds(rank: int, world_size: int, wire: Any, feedback: bool) -> list[Tensor]:
    """What the buffers hold after each round, bucket by bucket, and the state."""
    lossy, exact = templates()
    reducer = WireConfig(wire, feedback).reducer
    mean = Mean(lossy, {"rank": 1, "steps": 1, "weight": 1}, reducer, buffers=exact)
    seen = []
    for round in range(ROUNDS):
        for i, bucket in enumerate(mean.buckets):
            numel = len(bucket.flat) - len(bucket.scalars)
            bucket.flat[:numel] = written(rank, round, i, numel, bucket.flat.dtype)
        mean.scalars.set("rank", 0.1 * rank)
        mean.reduce()
        seen += [b.flat[: len(b.flat) - len(b.scalars)].clone() for b in mean.buckets]
        seen.append(mean.buckets[0].scalars.clone())
    sender = mean.reducer
    row = sum(nbytes(wire, chunk) for chunk in sender.chunks)
    row += sum(rest * b.flat.element_size() for rest, b in zip(sender.rests, mean.buckets, strict=True))
    assert mean.flight.bytes_sent == (world_size - 1) * (2 * row + 3 * 8)
    mean.close()
    return [*seen, *(flat for flats in sender.state.values() for flat in flats)]


def simulate(world_size: int, wire: str, feedback: bool) -> list[Tensor]:
    """of_rounds for all workers at once: without processes, chunks of bytes or segments. States are not returned."""
    n, seen = world_size, []
    kinds = list(LAYOUT.items())
    wide = [torch.float64 if d == torch.float64 else torch.float32 for d, _ in kinds]
    padded = [-(-sum(sizes) // (n * BLOCK)) * n * BLOCK for _, (sizes, _) in kinds]
    errors = [[torch.zeros(size, dtype=w) for size, w in zip(padded, wide, strict=True)] for _ in range(n + 1)]

    def send(x: Tensor, error: Tensor) -> Tensor:
        total = x + error if feedback else x
        decoded = decode(encode(total, wire), wire, x.dtype)
        error.copy_(total - decoded)
        return decoded

    for round in range(ROUNDS):
        for i, (_, (sizes, rests)) in enumerate(kinds):
            size, rest = sum(sizes), sum(rests)
            rows = [written(r, round, i, size + rest, wide[i]) for r in range(n)]
            got = [send(pad(rows[r][:size], (0, padded[i] - size)), errors[r][i]) for r in range(n)]
            mean = send(sum(got) / n, errors[n][i])
            seen.append(torch.cat([mean[:size], sum(row[size:] for row in rows) / n]))
        seen.append(torch.tensor([sum(0.1 * r for r in range(n)) / n, 1.0, 1.0], dtype=wide[0]))
    return seen


@pytest.mark.parametrize(
    ("world_size", "segment"), [(2, 1 << 18), (3, 256), pytest.param(4, 512, marks=pytest.mark.slow)]
)
def test_equals_a_simulation_bit_for_bit(world_size: int, segment: int):
    """Every dtype, several blocks and parts of one, empty and exact tensors, a tail; the segments change nothing."""
    results = run_distributed(means, world_size, segment)
    for i, way in enumerate(WAYS):
        expected = simulate(world_size, *way)
        for rank in range(world_size):
            for number, (a, b) in enumerate(zip(results[rank][i], expected)):  # noqa: B905  the state follows
                assert torch.equal(a, b), f"{way}, rank {rank}, tensor {number}"
        assert len(results[0][i]) == len(expected) + (8 if way[1] else 0), "no feedback, no memory for it"


def test_one_worker_alone_sees_the_same_as_one_in_a_group():
    alone = means(0, 1, 1 << 18)
    for way, a, b in zip(WAYS, alone, run_distributed(means, 1, 1 << 18)[0], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), way
        assert not torch.equal(a[0], written(0, 0, 0, 1510, torch.float64)), "one worker rounds too"
