"""What the tests of a GPU train: a few tensors of unlike layouts that move by a formula, the same on every device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core import CO2, CO2Config, CompressionConfig, LGrecoConfig
from core.baselines import OverlapLocalSGD

DEVICE = "cuda"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
STEPS = 26  # six rounds of four steps, and two more
CYCLES = 60_000_000  # of a sleeping kernel: some 30 ms


@dataclass
class Problem:
    """params: of unlike shapes and strides. buffers: one, as BatchNorm has."""

    params: list[nn.Parameter]
    buffers: list[Tensor]


def problem(device: str = DEVICE, dtype: torch.dtype = torch.float32, width: int = 96, layers: int = 3) -> Problem:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random, dtype=torch.float64) * 0.02).to(device, dtype)

    odd = [draw(8, 3, 5, 5).to(memory_format=torch.channels_last), draw(8), draw(40, 30).t(), draw(1)[0]]
    tensors = [*odd, *(draw(width, width) for _ in range(layers))]
    return Problem([nn.Parameter(t) for t in tensors], [draw(8)])


@torch.no_grad()
def move(tensors: Sequence[Tensor], step: int, rank: int = 0) -> None:
    """A local step of `rank`."""
    for i, p in enumerate(tensors):
        p.mul_(0.99).add_(torch.sin(p * (i + 1)) * 1e-2 * (1 + step % 3) * (1 + rank))


def go(tensors: Sequence[Tensor], method: Any, steps: Iterable[int], rank: int = 0) -> None:
    """Trains."""
    for step in steps:
        move(tensors, step, rank)
        method.step()


def end(method: Any) -> None:
    method.finish()
    method.close()


Make = Callable[[Problem], Any]


def train(make, device=DEVICE, dtype=torch.float32, rank=0, steps=STEPS) -> list[Tensor]:
    """The parameters at the end, in float64 on the host."""
    p = problem(device, dtype)
    method = make(p)
    go(p.params, method, range(steps), rank)
    end(method)
    return [t.detach().double().cpu() for t in p.params]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest relative difference of a tensor; infinite where a number is not finite."""
    pairs = [(a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(ours, theirs, strict=True)]
    if not all(t.isfinite().all() for pair in pairs for t in pair):
        return float("inf")
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs)


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def co2(**settings: Any) -> Make:
    return lambda p: CO2(p.params, CO2Config(**{"tau": 4} | settings), buffers=p.buffers)


def lgreco(like: str) -> CompressionConfig:
    return CompressionConfig("lgreco", like=like, lgreco=LGrecoConfig(rule="uniform", every=2, first=1))


# at a fixed step, so that runs compare
RECOMMENDED = {"outer_momentum": 0.0, "gap": "none", "merge": "keep_local", "delay": 2}
METHODS: dict[str, Make] = {
    "co2": co2(),
    "recommended": co2(**RECOMMENDED),
    "int8": co2(compression=CompressionConfig("int8")),
    "int4": co2(compression=CompressionConfig("int4")),
    "lgreco": lambda p: co2(compression=lgreco("int4"))(p),
    "sharded": lambda p: CO2(p.params, CO2Config(tau=4), shard=True, buffers=p.buffers),
    "overlap_local": lambda p: OverlapLocalSGD(p.params, 4, buffers=p.buffers),
    "nesterov": lambda p: CO2(p.params, CO2Config(tau=4, nesterov=True), buffers=p.buffers),
}


class Stack(nn.Module):
    """Blocks in a list, which FSDP2 shards one by one."""

    def __init__(self, width: int = 64, count: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(count)
        )
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@contextlib.contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Where calls in the block make the host wait for all that is queued, as torch's sync debug mode tells.

    It does not see Event.synchronize(), by which the step that closes a round waits until the GPU has passed the
    boundary before.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # torch says once, too, that the mode "does not yet detect all synchronizing operations"
    found += [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "called a synchronizing" in str(w.message)]
