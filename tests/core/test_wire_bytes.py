"""What a round costs on the network: as counted here, by the emulated link, and by the kernel."""

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.groups import ring_bytes
from core.testing import run_distributed
from core.testing.link import ThrottledLink
from core.wires.formats import WIRES
from tests.core.test_quantized_co2 import PLAIN
from training.data import generator

BLOCKS = {"bfloat16": 512, "float16": 516, "int8": 260, "int4": 132, "int2": 68}
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
    for wire in WIRES:
        link = CountingLink()
        p = nn.Parameter(torch.zeros(numel))
        co2 = replace(PLAIN, wire=wire).build([p], link=link)
        with torch.no_grad():
            p.add_(torch.randn(numel, generator=generator(rank)))
        co2.step()  # connections are made
        link.reserved.clear()
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()  # nobody starts before all have read
        co2.step()
        dist.barrier()
        counted[wire] = co2.stats.bytes_sent, sum(link.reserved), loopback_bytes() - before
        co2.finish()
        co2.close()
    return counted


def loopback_bytes() -> int:
    """Sent over lo in this network namespace since it was made."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_bytes_sent_by_hand(world_size: int):
    """Blocks of 256 cost 512, 516, 260, ... 68 bytes; twice (n - 1) / n of them; and 8 + n scalars a peer: finished,
    steps, weight, two checksums and their squares, the square of what is sent, and a verdict of each."""
    numel = 10_000
    blocks = -(-numel // (256 * world_size))  # a worker
    others = world_size - 1
    for counted in run_distributed(bytes_of_a_round, world_size, numel):
        assert counted["float32"][0] == ring_bytes(4 * (numel + 8 + world_size), world_size)
        for wire, size in BLOCKS.items():
            assert counted[wire][0] == counted[wire][1] == others * (2 * blocks * size + (8 + world_size) * 4)


COUNT = """
from core.testing import run_distributed
from tests.core.test_wire_bytes import bytes_of_a_round
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
    for wire in WIRES:
        ours = sum(r[wire][0] for r in results)
        seen[wire] = results[0][wire][2]
        assert seen[wire] == pytest.approx(ours, rel=0.1), f"{wire}: counted here, and by the kernel"
    for wire, size in BLOCKS.items():
        assert seen[wire] / seen["float32"] == pytest.approx(size / 1024, rel=0.1)
