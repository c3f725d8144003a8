"""Small problems with several workers, shared by the tests of core."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core.outer
from core import CO2, CO2Config, UserError, make_method
from core.buckets import Scalars, make_buckets
from core.comm import AsyncAllReduce, Reducer
from core.config import CompressionConfig
from core.nodes import Node, sent_parts
from core.tau import SyncSchedule
from core.testing import run_distributed
from core.testing.reference import Reference

LR = 0.1
INSIDE = ("ddp", "fsdp2") if hasattr(torch.cpu.Stream, "record_event") else ("ddp",)
"""What trains inside nodes on a CPU. torch 2.6's FSDP2 needs a GPU."""


@dataclass(frozen=True)
class Settings:
    """The settings of CO2, and its compression in one flat list, to be varied by `replace`."""

    tau: Any = 48
    outer_lr: float = 1.0
    outer_momentum: float = 0.5
    gap: Any = "elementwise"
    clip: float | None = 1.0
    tau_max: int = 192
    allow_unstable: bool = False
    compression: Any = "float32"
    merge: Any = "restart"
    delay: Any = "boundary"
    nesterov: bool = False

    @property
    def co2(self) -> CO2Config:
        compression = CompressionConfig(self.compression)
        names = ("tau", "outer_lr", "outer_momentum", "gap", "clip")
        names += ("tau_max", "allow_unstable", "merge", "delay", "nesterov")
        return CO2Config(**{name: getattr(self, name) for name in names}, compression=compression)

    def build(self, params: Iterable[Tensor], **options: Any) -> CO2:
        return CO2(params, self.co2, **options)


def bare_co2(params: Iterable[Tensor], **built: Any) -> CO2:
    """CO2 by our reading of the paper's rule, put together from what LocalUpdateMethod takes: no hooks but these."""
    co2, config = CO2.__new__(CO2), CO2Config.paper()
    co2._build(params, config, None, sync_schedule=SyncSchedule(int(config.tau)), **built)
    return co2


class Mean:
    """The mean over all workers of some tensors in the background: buckets, a reducer and AsyncAllReduce together."""

    def __init__(
        self, tensors: list[Tensor], scalars: dict[str, int] | None = None, reducer: Any = None, **options: Any
    ):
        self.scalars = Scalars(scalars or {})
        self.buckets = make_buckets(tensors, options.pop("buffers", []), self.scalars.numel)
        self.scalars.attach(self.buckets[0].scalars)
        self.allreduce = AsyncAllReduce(self.buckets[0].flat.device, **options)
        workers = self.allreduce.rank, self.allreduce.world_size
        self.reducer = (reducer or Reducer)(sent_parts(Node(), self.buckets), self.scalars, *workers)
        self.done, self.close = self.allreduce.done, self.allreduce.close

    def launch(self) -> None:
        self.allreduce.launch(self.reducer.stages(self.allreduce.group, self.allreduce.launched + 1))

    def wait(self) -> None:
        self.allreduce.wait()
        for bucket in self.buckets:
            bucket.flat.mul_(self.reducer.scale)

    def reduce(self, steps: float = 1.0) -> Tensor:
        """One reduction, of a worker that counts and has taken so many steps; what lands in the first payload."""
        self.scalars.set("steps", steps)
        self.scalars.set("weight", 1.0)
        self.launch()
        self.wait()
        return self.buckets[0].payload


class SlowLink:
    """A link that takes so many seconds for each reduction."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def reserve(self, nbytes: float) -> float:  # noqa: ARG002
        return time.perf_counter() + self.seconds


def wait_for(*files: Path, seconds: float = 40.0) -> None:
    """A gate between processes: returns once others have made the files."""
    until = time.monotonic() + seconds
    while missing := [file.name for file in files if not file.exists()]:
        assert time.monotonic() < until, f"nobody made {missing[0]}"
        time.sleep(0.01)


def run_cases(fn: Callable[..., Any], world_size: int, cases: Iterable[tuple[Any, ...]], **options: Any) -> list[Any]:
    """fn(rank, world_size, *case) for each case, on processes that start once: of each case its results by rank."""
    return [*zip(*run_distributed(_cases, world_size, fn, [*cases], **options), strict=True)]


def _cases(rank: int, world_size: int, fn: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    return [fn(rank, world_size, *case) for case in cases]


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The text of the UserError that the call raises, which must be one line."""
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def odd_parameters() -> list[nn.Parameter]:
    """Shapes that tile no bucket: 0-d, empty, odd, channels_last, transposed, and the first one twice; float64."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in [(), (7,), (0,), (3, 5), (2, 3, 4, 1)]]
    values.append(
        torch.randn(2, 3, 3, 5, generator=generator, dtype=torch.float64).to(memory_format=torch.channels_last)
    )
    values.append(torch.randn(4, 3, generator=generator, dtype=torch.float64).t())
    params = [nn.Parameter(v) for v in values]
    return [*params, params[0]]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A float64 copy of all elements, [n], every tensor once."""
    unique = {id(t): t for t in tensors}.values()
    return torch.cat([t.detach().to(torch.float64).reshape(-1) for t in unique])


def gradient(x: Tensor, worker: int | Tensor, step: int) -> Tensor:
    """Works element by element, so it means the same for a parameter, a flat vector and all workers' rows."""
    return 0.5 * x + torch.sin((worker + 1) * x + step)


@torch.no_grad()
def sgd_step(params: Iterable[Tensor], worker: int, step: int, lr: float = LR) -> None:
    for p in {id(p): p for p in params if p.requires_grad}.values():
        p.sub_(lr * gradient(p, worker, step).to(p.dtype))


def take_steps(method: Any, params: Iterable[Tensor], worker: int, steps: Iterable[int]) -> None:
    """Those local steps of a loop, without its end."""
    params = list(params)
    for step in steps:
        sgd_step(params, worker, step)
        method.step()


@torch.no_grad()
def node_step(params: Iterable[Tensor], workers: list[int], step: int) -> None:
    """As `sgd_step`, with the mean gradient of a node's workers, as after their all-reduce."""
    for p in {id(p): p for p in params}.values():
        p.sub_(LR * torch.stack([gradient(p, worker, step) for worker in workers]).mean(0))


def train(name: str, params: list[nn.Parameter], rank: int, steps: int, **options: Any) -> list[Tensor]:
    """Trains with a method by name; the parameters after each closed round and after finish(), [n] each."""
    _, method = make_method(name, nn.ParameterList(params), **options)
    return train_with(method, params, rank, steps)


def train_co2(params: list[nn.Parameter], rank: int, steps: int, settings: Settings) -> list[Tensor]:
    """As `train`."""
    return train_with(settings.build(params), params, rank, steps)


def train_with(method: Any, params: list[nn.Parameter], rank: int, steps: int) -> list[Tensor]:
    return trace_of(method, lambda step: sgd_step(params, rank, step), lambda: flat(params), steps)


def trace_of(method: Any, go: Callable[[int], Any], read: Callable[[], Tensor], steps: int) -> list[Tensor]:
    """go(step): a local step. What is read after each closed round and after finish()."""
    trace = []
    for step in range(steps):
        go(step)
        if method.step():
            trace.append(read())
    method.finish()
    method.close()
    return [*trace, read()]


def reference(c: Settings, world_size: int, x: Tensor) -> tuple[Reference, Tensor]:
    """The specification with these settings, all starting from x [n]; and the workers' numbers, [workers, 1]."""
    late = {"delay": None if c.delay == "boundary" else c.delay, "merge": c.merge}
    outer = c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip
    ref = Reference(x.expand(world_size, -1).clone(), *outer, **late, nesterov=c.nesterov)
    return ref, torch.arange(world_size, dtype=torch.float64)[:, None]


def train_reference(settings: Settings, world_size: int, steps: int, x: Tensor, worker: int = 0) -> list[Tensor]:
    """What `train_co2` must return on a worker; all start from x [n]."""
    ref, workers = reference(settings, world_size, x)
    ref.run(lambda rows, step: gradient(rows, workers, step), LR, steps)
    rounds = [rows[worker] for rows in ref.restarts]
    ref.finish()
    return [*rounds, ref.x[worker].clone()]


def train_grid(rank: int, world_size: int, configs: list[Settings], steps: int, chunk: int = 16) -> list[list[Tensor]]:
    """Odd shapes (see odd_parameters) and slices of 16 elements, so that no boundary falls on a tensor's end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.outer, "SEGMENT", chunk)
        return [train_co2(odd_parameters(), rank, steps, c) for c in configs]


def check_grid(world_size: int, configs: list[Settings], steps: int) -> None:
    """Each setting on real processes, or on one worker without a process group, against the specification, round by
    round; workers are equal, bit for bit, where they restart from the outer iterate, and at the end."""
    x, alone = flat(odd_parameters()), world_size == 1
    given = world_size, configs, steps
    results = [train_grid(0, *given)] if alone else run_distributed(train_grid, *given, timeout=300)
    for i, c in enumerate(configs):
        first, *others = (traces[i] for traces in results)
        for worker, trace in enumerate((first, *others)):
            assert_traces_equal(trace, train_reference(c, world_size, steps, x, worker))
        apart = c.merge == "keep_local" and c.delay != 0
        for other in others:
            same = [torch.equal(a, b) for a, b in zip(first, other, strict=True)]
            assert same[-1] and (not same[0] if apart else all(same)), c


def assert_traces_equal(ours: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> None:
    """Equally many rounds, each equal within the tolerance."""
    assert len(ours) == len(expected)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, i=i: f"round {i}: {m}")


def small_net(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """6 inputs, 3 classes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(worker: int, step: int, size: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs [size, 6] and labels [size], a pure function of (worker, step)."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(size, 6, generator=generator, dtype=dtype), torch.randint(3, (size,), generator=generator)


def descent_of(net: nn.Module, per_node: int = 1) -> Callable[[Tensor, int], Tensor]:
    """For Reference.run: each row's gradient of the net's loss, the mean over its node's ranks, [workers, n]."""
    params = [*net.parameters()]

    def of_rows(rows: Tensor, step: int) -> Tensor:
        found = []
        for node, row in enumerate(rows):
            nn.utils.vector_to_parameters(row.clone(), params)
            losses = [loss(net, batch(node * per_node + i, step)) for i in range(per_node)]
            found.append(flat(torch.autograd.grad(torch.stack(losses).mean(), params)))
        return torch.stack(found)

    return of_rows


def loss(model: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])
