"""Small problems with several workers, shared by the tests of core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.reference import LateReference
from core import CO2, CO2Config, make_method
from core.assembly.wire import WireConfig
from core.flat import Scalars, make_buckets
from core.methods.delayed import DelayedCO2, DelayedConfig
from core.reducer import Reducer
from core.testing.link import flight_over

LR = 0.1


@dataclass(frozen=True)
class Settings:
    """The settings of CO2, its wire format and the delayed methods in one flat list, to be varied by `replace`."""

    tau: Any = 48
    outer_lr: float = 1.0
    outer_momentum: float = 0.5
    gap: Any = "elementwise"
    clip: float | None = 1.0
    tau_max: int = 192
    allow_unstable: bool = False
    wire: Any = "float32"
    error_feedback: bool = True
    merge: Any = "outer"
    mix: float = 0.5
    delay: Any = "boundary"
    nesterov: bool = False

    @property
    def co2(self) -> CO2Config:
        wire = WireConfig(self.wire, self.error_feedback)
        names = ("tau", "outer_lr", "outer_momentum", "gap", "clip")
        names += ("tau_max", "allow_unstable", "merge", "mix", "delay")
        return CO2Config(**{name: getattr(self, name) for name in names}, wire=wire)

    @property
    def delayed(self) -> DelayedConfig:
        return DelayedConfig(self.nesterov)

    @property
    def method(self) -> str:
        return "co2" if self.delayed == DelayedConfig() else "delayed"

    def build(self, params: Iterable[Tensor], **options: Any) -> CO2:
        """CO2 itself where nothing else is asked for."""
        if self.method == "co2":
            return CO2(params, self.co2, **options)
        return DelayedCO2(params, self.co2, self.delayed, **options)


class Mean:
    """The mean over all workers of some tensors in the background: buckets, a reducer and Flight put together."""

    def __init__(
        self, tensors: list[Tensor], scalars: dict[str, int] | None = None, reducer: Any = None, **options: Any
    ):
        self.scalars = Scalars(scalars or {})
        self.buckets = make_buckets(tensors, options.pop("buffers", []), self.scalars.numel)
        self.scalars.attach(self.buckets[0].scalars)
        self.flight = flight_over(options.pop("link", None))(self.buckets[0].flat.device, **options)
        workers = self.flight.rank, self.flight.world_size
        self.reducer = reducer(self.buckets, self.scalars, *workers) if reducer else None
        self.reducer = self.reducer or Reducer([b.flat for b in self.buckets], self.flight.world_size)
        self.done, self.close = self.flight.done, self.flight.close

    def launch(self) -> None:
        self.flight.launch(self.reducer.stages(self.flight.group, self.flight.launched + 1))

    def wait(self) -> None:
        self.flight.wait()
        for bucket in self.buckets:
            bucket.flat.mul_(self.reducer.scale)

    def reduce(self, steps: float = 1.0) -> Tensor:
        """One reduction, of a worker that counts and has taken so many steps; what lands in the first payload."""
        self.scalars.set("steps", steps)
        self.scalars.set("weight", 1.0)
        self.launch()
        self.wait()
        return self.buckets[0].payload


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


def train(name: str, params: list[nn.Parameter], rank: int, steps: int, **options: Any) -> list[Tensor]:
    """Trains with a method by name; the parameters after each closed round and after finish(), [n] each."""
    _, method = make_method(name, nn.ParameterList(params), **options)
    return train_with(method, params, rank, steps)


def train_co2(params: list[nn.Parameter], rank: int, steps: int, settings: Settings) -> list[Tensor]:
    """As `train`."""
    return train_with(settings.build(params), params, rank, steps)


def train_with(method: Any, params: list[nn.Parameter], rank: int, steps: int) -> list[Tensor]:
    trace = []
    for step in range(steps):
        sgd_step(params, rank, step)
        if method.step():
            trace.append(flat(params))
    method.finish()
    method.close()
    return [*trace, flat(params)]


def train_reference(settings: Settings, world_size: int, steps: int, x: Tensor, worker: int = 0) -> list[Tensor]:
    """What `train_co2` must return on a worker; all start from x [n]."""
    c = settings
    late = {"delay": None if c.delay == "boundary" else c.delay, "merge": c.merge, "kappa": c.mix}
    outer = c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip
    ref = LateReference(x.expand(world_size, -1).clone(), *outer, **late, nesterov=c.nesterov)
    workers = torch.arange(world_size, dtype=torch.float64)[:, None]
    ref.run(lambda rows, step: gradient(rows, workers, step), LR, steps)
    rounds = [rows[worker] for rows in ref.restarts]
    ref.finish()
    return [*rounds, ref.x[worker].clone()]


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


def loss(model: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])
