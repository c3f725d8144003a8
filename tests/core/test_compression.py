"""Wire formats by hand, the compressed mean against a simulation, CO2 with each, and the bytes that they send."""

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.testing._internal.distributed.fake_pg import FakeStore

import core.compression.quantized
from core import UserError
from core.comm import ring_bytes
from core.compression.formats import BLOCK, INTS, UNIFORM_FORMATS, decode, encode, nbytes
from core.config import CompressionConfig
from core.testing import run_distributed
from core.testing.link import ThrottledLink
from tests.dispatch import Operations
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import Mean, Settings
from training.data.samples import generator

NARROW: tuple[Any, ...] = UNIFORM_FORMATS[1:]
INT = {"int8": 8, "int4": 4}
BITS = {"bfloat16": 16.0} | {compression: bits + 1 / 8 for compression, bits in INT.items()}  # an element


def block(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """[256]: the values, then zeros."""
    x = torch.zeros(BLOCK, dtype=dtype)
    x[: len(values)] = torch.tensor(values, dtype=dtype)
    return x


def through(x: Tensor, compression: str) -> Tensor:
    return decode(encode(x, compression), compression, x.dtype)


@pytest.mark.parametrize("compression", NARROW)
def test_bytes(compression: str):
    assert nbytes(compression, 512) == 512 * BITS[compression] / 8 == len(encode(torch.ones(512), compression))
    assert encode(torch.ones(0), compression).shape == (0,) and through(torch.ones(0), compression).shape == (0,)
    with pytest.raises(AssertionError, match="100 elements"):
        nbytes(compression, 100)


def test_int4_bytes_by_hand():
    """Scale 14 / 7 = 2, so 14, -3, 5, 2.9 are 7, -1.5, 2.5, 1.45: to nearest, ties to even, 7, -2, 2, 1."""
    payload = encode(block(14.0, -3.0, 5.0, 2.9), "int4")
    assert payload[:4].view(torch.float32).item() == 2.0
    assert payload[4:9].tolist() == [0x80 + 15, 0x80 + 6, 0x80 + 10, 0x80 + 9, 0x80 + 8]  # 8 stands for 0
    assert decode(payload, "int4")[:5].tolist() == [14.0, -4.0, 4.0, 2.0, 0.0]
    x = torch.zeros(BLOCK)
    x[130] = -7.0  # the other half: the upper four bits of byte 2
    assert encode(x, "int4")[4:8].tolist() == [0x88, 0x88, 0x18, 0x88]
    assert torch.equal(through(x, "int4"), x)


@pytest.mark.parametrize(("compression", "levels"), [("int2", 1), ("int4", 7)])
def test_every_level_at_every_place_comes_back(compression: str, levels: int):
    """With a scale of 1 whole numbers are exact: packed and unpacked they are themselves."""
    q = torch.randint(-levels, levels + 1, (200, BLOCK), generator=generator(0)).float()
    q[:, 0] = levels
    assert torch.equal(through(q.view(-1), compression), q.view(-1))
    assert len(encode(q.view(-1), compression)) == 200 * (4 + 32 * int(compression[3]))


def test_int8_bytes_by_hand():
    payload = encode(torch.cat([block(-63.5, 63.5, 0.2, 0.3, -0.3), block(0.0), block(254.0, 3.0)]), "int8")
    blocks = payload.view(3, 260)
    assert blocks[:, :4].clone().view(torch.float32).flatten().tolist() == [0.5, 0.0, 2.0]
    assert blocks[0, 4:10].view(torch.int8).tolist() == [-127, 127, 0, 1, -1, 0]
    values = decode(payload, "int8").view(3, BLOCK)
    assert values[0, :5].tolist() == [-63.5, 63.5, 0.0, 0.5, -0.5]
    assert not values[1].any() and values[2, :2].tolist() == [254.0, 4.0]


def bound(x: Tensor, compression: str) -> Tensor:
    """The largest allowed error."""
    top = x.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    return top / (2 ** INT[compression] - 2) if compression in INT else x.abs() * 2**-8


@pytest.mark.parametrize("compression", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_stays_within_the_format(compression: str, dtype: torch.dtype):
    """Blocks of sizes from 1e-30 to 1e30, values inside a block over twelve orders of magnitude."""
    x = torch.randn(61, BLOCK, generator=generator(0), dtype=dtype)
    x = x * 10 ** (torch.rand(61, BLOCK, generator=generator(2), dtype=dtype) * 12 - 12)
    x = (x * 10 ** torch.arange(-30, 31, dtype=dtype)[:, None]).view(-1)
    tiny = 1e-38 if compression == "bfloat16" else 0.0  # of smaller numbers it keeps fewer digits, as float32 does
    assert ((through(x, compression) - x).abs() <= bound(x, compression) * (1 + 1e-5) + tiny).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("compression", NARROW)
def test_what_is_not_finite_stays_so(compression: str, bad: float):
    x = torch.randn(3 * BLOCK, generator=generator(0))
    x[300] = bad
    finite = through(x, compression).isfinite().view(3, BLOCK)
    assert finite[0].all() and finite[2].all()
    assert not finite[1, 44] if compression == "bfloat16" else not finite[1].any()


@pytest.mark.parametrize("compression", NARROW)
def test_a_float64_beyond_float32_does_not_become_finite(compression: str):
    assert not through(block(1e300, 1.0, dtype=torch.float64), compression)[0].isfinite()
    assert torch.equal(through(block(1e-300, dtype=torch.float64), compression), torch.zeros(BLOCK).double())


@pytest.mark.parametrize("compression", INTS)
def test_the_scale_of_zeros_has_no_sign(compression: str):
    """Whether maximum(0, -0) is 0 or -0 is the device's choice: the bytes must not depend on it."""
    plus, minus = encode(torch.zeros(BLOCK), compression), encode(-torch.zeros(BLOCK), compression)
    assert plus[:4].tolist() == minus[:4].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("compression", NARROW)
def test_nothing_is_divided_by_a_plain_number(compression: Any):
    """CUDA multiplies by its rounded reciprocal, so that its bytes and means would not be a CPU's."""
    mean = Mean(
        [torch.ones(700)], {"steps": 1, "weight": 1}, CompressionConfig(compression).reducer, buffers=[torch.ones(5)]
    )
    with Operations(lambda func, args, *_: args[1] if func.name().startswith("aten::div") else None) as divisors:
        mean.reducer._average(mean.reducer._outgoing())
    assert len(divisors.seen) > 2 and all(isinstance(d, Tensor) for d in divisors.seen), divisors.seen


def test_another_backend_is_refused_with_the_reason():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(UserError) as caught:
            CompressionConfig("int8").check([torch.zeros(3)], None)
    finally:
        dist.destroy_process_group()
    text = "compression.format='int8' over fake backend for cpu tensors: only gloo and nccl are supported, or use "
    text += "compression.format float32"
    assert str(caught.value) == text


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
    core.compression.quantized.SEGMENT = segment
    return [of_rounds(rank, world_size, compression) for compression in NARROW]


def of_rounds(rank: int, world_size: int, compression: Any) -> list[Tensor]:
    """What the buffers hold after each round, bucket by bucket, and the state."""
    lossy, exact = templates()
    reducer = CompressionConfig(compression).reducer
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
    row = sum(nbytes(compression, chunk) for chunk in sender.chunks)
    row += sum(rest * b.flat.element_size() for rest, b in zip(sender.rests, mean.buckets, strict=True))
    assert mean.allreduce.bytes_sent == (world_size - 1) * (2 * row + 3 * 8)
    mean.close()
    return [*seen, *(flat for flats in sender.state.values() for flat in flats)]


def simulate(world_size: int, compression: str) -> list[Tensor]:
    """of_rounds for all workers at once: without processes, chunks of bytes or segments. States are not returned."""
    n, seen = world_size, []
    kinds = list(LAYOUT.items())
    wide = [torch.float64 if d == torch.float64 else torch.float32 for d, _ in kinds]
    padded = [-(-sum(sizes) // (n * BLOCK)) * n * BLOCK for _, (sizes, _) in kinds]
    errors = [[torch.zeros(size, dtype=w) for size, w in zip(padded, wide, strict=True)] for _ in range(n + 1)]

    def send(x: Tensor, error: Tensor) -> Tensor:
        total = x + error
        decoded = decode(encode(total, compression), compression, x.dtype)
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
    ("world_size", "segment"),
    [(2, 256), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((2, 1 << 18), (3, 256), (4, 512)))],
)
def test_equals_a_simulation_bit_for_bit(world_size: int, segment: int):
    """Every dtype, several blocks and parts of one, empty and exact tensors, a tail; the segments change nothing."""
    results = run_distributed(means, world_size, segment)
    for i, compression in enumerate(NARROW):
        expected = simulate(world_size, compression)
        for rank in range(world_size):
            for number, (a, b) in enumerate(zip(results[rank][i], expected)):  # noqa: B905  the state follows
                assert torch.equal(a, b), f"{compression}, rank {rank}, tensor {number}"
        assert len(results[0][i]) == len(expected) + 8


def test_one_worker_alone_sees_the_same_as_one_in_a_group():
    alone = means(0, 1, 1 << 18)
    for compression, a, b in zip(NARROW, alone, run_distributed(means, 1, 1 << 18)[0], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), compression
        assert not torch.equal(a[0], written(0, 0, 0, 1510, torch.float64)), "one worker rounds too"


def move(rank: int) -> Tensor:
    """int4's scale, a seventh of the first element, rounds the others to nothing."""
    return torch.tensor([rank + 1.0] + [0.031 + 0.0117 * rank**1.7] * 19, dtype=torch.float64)


MOVES = 28
PLAIN = Settings(
    tau=1, outer_momentum=0.0, outer_lr=1.0, gap="none", clip=None, allow_unstable=True, delay=0, compression="int4"
)


@on_ranks(3)
def test_nothing_is_lost_not_even_where_empty_means_are_thrown_away(rank: int):
    """What arrived and what is held back are the sum of all moves: finish() sends means that nobody uses."""
    for delay in (0, 1):
        p = nn.Parameter(torch.zeros(20, dtype=torch.float64))
        co2 = replace(PLAIN, delay=delay).build([p])
        for round in range(MOVES):
            with torch.no_grad():
                p.sub_(move(rank))
            co2.step()
            if round % 10 == 9:
                co2.finish()
        co2.finish()
        held = total_world_size([f[:20].clone() for fs in co2.reducer.state.values() for f in fs])
        own, of_means = sum(errors[0] for errors in held) / 3, held[0][1]  # all elements are in worker 0's chunk
        assert own.abs().max() > 1e-3 and of_means.abs().max() > 1e-3, "both hold something back"
        total = MOVES * sum(map(move, range(3))) / 3
        torch.testing.assert_close(own + of_means - p.detach(), total, rtol=0, atol=1e-11)
        assert alike(p.detach())


@on_ranks(3)
def test_one_workers_nan_reaches_nobody(rank: int):
    """The mean is that of the two others, who sent the same."""
    want = -torch.linspace(0, 1, 2000)
    want[1300] = 1.0
    for compression in NARROW:
        p = nn.Parameter(torch.zeros(2000))
        co2 = replace(PLAIN, compression=compression).build([p])
        with torch.no_grad():
            p.sub_(torch.linspace(0, 1, 2000))
            p[1300] = float("nan") if rank == 1 else 1.0
        co2.step()
        torch.testing.assert_close(p.detach(), want, rtol=0, atol=1.1 * 0.073)  # half a level


BLOCKS = {"bfloat16": 512, "int8": 260, "int4": 132}
LARGE = 1 << 20  # elements, of which headers and padding are next to nothing


class CountingLink(ThrottledLink):
    def __init__(self) -> None:
        super().__init__(1e9)
        self.reserved: list[float] = []

    def reserve(self, nbytes: float) -> float:
        self.reserved.append(nbytes)
        return super().reserve(nbytes)


def bytes_of_a_round(rank: int, world_size: int, numel: int = LARGE) -> dict[str, tuple[int, float, int]]:
    """By wire format: bytes_sent, what the emulated link saw, and what the kernel sent over lo, of all workers."""
    counted = {}
    for compression in UNIFORM_FORMATS:
        link = CountingLink()
        p = nn.Parameter(torch.zeros(numel))
        co2 = replace(PLAIN, compression=compression).build([p], link=link)
        with torch.no_grad():
            p.add_(torch.randn(numel, generator=generator(rank)))
        co2.step()  # connections are made
        link.reserved.clear()
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()  # nobody starts before all have read
        co2.step()
        dist.barrier()
        counted[compression] = co2.stats.bytes_sent, sum(link.reserved), loopback_bytes() - before
        co2.finish()
        co2.close()
    return counted


def loopback_bytes() -> int:
    """Sent over lo in this network namespace since it was made."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_sent_by_hand(world_size: int):
    """Blocks of 256 cost 512, 260 or 132 bytes; twice (n - 1) / n of them; and 8 + n scalars a peer: finished,
    steps, weight, two checksums and their squares, the square of what is sent, and a verdict of each."""
    numel = 10_000
    blocks = -(-numel // (256 * world_size))  # a worker
    others = world_size - 1
    for counted in run_distributed(bytes_of_a_round, world_size, numel):
        assert counted["float32"][0] == ring_bytes(4 * (numel + 8 + world_size), world_size)
        for compression, size in BLOCKS.items():
            sent = others * (2 * blocks * size + (8 + world_size) * 4)
            assert counted[compression][:2] == (sent, sent)


COUNT = """
from core.testing import run_distributed
from tests.core.test_compression import bytes_of_a_round
print(run_distributed(bytes_of_a_round, 3))
"""


@pytest.mark.root
def test_the_kernel_counts_the_same_bytes():
    """In a network namespace of its own, so that nobody else is counted."""
    inside = ["sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, COUNT]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(["unshare", "-rn", *inside], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    results = ast.literal_eval(run.stdout)
    seen = {}
    for compression in UNIFORM_FORMATS:
        ours = sum(r[compression][0] for r in results)
        seen[compression] = results[0][compression][2]
        assert seen[compression] == pytest.approx(ours, rel=0.1), f"{compression}: counted here, and by the kernel"
    for compression, size in BLOCKS.items():
        assert seen[compression] / seen["float32"] == pytest.approx(size / 1024, rel=0.1)
