"""What the checks train: a few tensors of unlike layouts that move by a formula, the same on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core import CO2, CO2Config, DelayedCO2, DelayedConfig, LGrecoConfig, OverlapLocalSGD, ShardedCO2, WireConfig

STEPS = 26
SETTINGS = {
    "paper": CO2Config(tau=4),
    "gap norm, no clip": CO2Config(tau=4, clip=None, gap="norm"),
    "gap inner": CO2Config(tau=4, gap="inner"),
    "delay 0": CO2Config(tau=4, gap="none", delay=0),
    "delay 0, momentum": CO2Config(tau=4, gap="none", delay=0, outer_momentum=0.5, outer_lr=0.4),
    "mix": CO2Config(tau=4, merge="mix"),
    "mix, delay 2": CO2Config(tau=4, merge="mix", delay=2),
    "keep, delay 2": CO2Config(tau=4, merge="keep", delay=2),
    "keep, delay 0": CO2Config(tau=4, merge="keep", delay=0, gap="none"),
}
RECOMMENDED = CO2Config(
    4, outer_momentum=0.0, gap="none", merge="keep", delay=2
)  # at a fixed step, so that runs compare


@dataclass
class Problem:
    """params: of unlike shapes and strides; one buffer, as BatchNorm has."""

    params: list[nn.Parameter]
    buffers: list[Tensor]


def problem(device: str, dtype: torch.dtype = torch.float32, width: int = 96, layers: int = 3) -> Problem:
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


Make = Callable[[Problem], Any]


def train(
    make: Make, device: str, dtype: torch.dtype = torch.float32, rank: int = 0, steps: int = STEPS
) -> list[Tensor]:
    """The parameters at the end, in float64 on the host."""
    p = problem(device, dtype)
    method = make(p)
    for step in range(steps):
        move(p.params, step, rank)
        method.step()
    method.finish()
    method.close()
    return [t.detach().double().cpu() for t in p.params]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest relative difference of a tensor; infinite where a number is not finite."""
    pairs = [(a.double().cpu(), b.double().cpu()) for a, b in zip(ours, theirs, strict=True)]
    if not all(t.isfinite().all() for pair in pairs for t in pair):
        return float("inf")
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs)


def near(ours: Sequence[Tensor], theirs: Sequence[Tensor], most: float) -> str:
    found = distance(ours, theirs)
    assert found <= most, f"relative difference {found:.3g}, at most {most:g}"
    return f"relative difference {found:.2g}"


def co2(config: CO2Config) -> Make:
    return lambda p: CO2(p.params, config, buffers=p.buffers)


def lgreco(like: str) -> WireConfig:
    return WireConfig("lgreco", like=like, lgreco=LGrecoConfig(rule="uniform", every=2, first=1))


METHODS: dict[str, Make] = {
    "co2": co2(CO2Config(tau=4)),
    "recommended": co2(RECOMMENDED),
    "mix": co2(CO2Config(tau=4, merge="mix", delay=2)),
    "int8": co2(CO2Config(tau=4, wire=WireConfig("int8"))),
    "int4": co2(CO2Config(tau=4, wire=WireConfig("int4"))),
    "lgreco": co2(CO2Config(tau=4, wire=lgreco("int4"))),
    "sharded": lambda p: ShardedCO2(p.params, CO2Config(tau=4), shard=True, buffers=p.buffers),
    "overlap_local": lambda p: OverlapLocalSGD(p.params, 4, buffers=p.buffers),
    "nesterov": lambda p: DelayedCO2(p.params, CO2Config(tau=4), DelayedConfig(nesterov=True), buffers=p.buffers),
}
