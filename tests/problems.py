"""Small problems with several workers, shared by the tests of core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from core import CO2Config, make_method
from core.reference import Reference

LR = 0.1


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
    trace = []
    for step in range(steps):
        sgd_step(params, rank, step)
        if method.step():
            trace.append(flat(params))
    method.finish()
    method.close()
    return [*trace, flat(params)]


def train_reference(config: CO2Config, world_size: int, steps: int, x: Tensor, worker: int = 0) -> list[Tensor]:
    """What `train("co2", ...)` must return on a worker; all start from x [n]. Without own parts all get the same."""
    c = config
    later = {"policy": c.policy, "mix": c.mix, "taylor": c.taylor, "nesterov": c.nesterov}
    outer = c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip, c.clip_by, c.delay
    ref = Reference(x.expand(world_size, -1).clone(), *outer, **later)
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
