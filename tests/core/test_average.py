"""average=: models that are evaluated and are not the parameters are equal on all workers, and as good as DDP's."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from core import (
    CO2,
    CO2Config,
    DelayedCO2,
    DelayedConfig,
    LocalSGD,
    OverlapLocalSGD,
    ShardedCO2,
    SlowMo,
    UserError,
    WireConfig,
    node_mesh,
)
from core.testing import run_distributed
from tests.core.test_optimizers import batch, held_out, loss

WORKERS, STEPS, SEEDS = 2, 120, 3


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-Free (Defazio et al. 2024), SGD or AdamW. In train mode the parameters are y, in eval mode x."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9, beta2: float | None = None, warmup: int = 10):
        super().__init__(params, {"lr": lr})
        self.beta, self.beta2, self.warmup, self.k, self.weights, self.training = beta, beta2, warmup, 0, 0.0, True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.training
        self.k += 1
        for group in self.param_groups:
            lr = group["lr"] * min(1.0, self.k / self.warmup)
            self.weights += lr**2
            c = lr**2 / self.weights
            for p in group["params"]:
                state, g = self.state[p], p.grad
                if "z" not in state:
                    state["z"], state["square"] = p.clone(), torch.zeros_like(p)
                if self.beta2 is not None:
                    state["square"].lerp_(g.square(), 1 - self.beta2)
                    g = g / ((state["square"] / (1 - self.beta2**self.k)).sqrt() + 1e-8)
                p.lerp_(state["z"], c).add_(g, alpha=lr * (self.beta * (1 - c) - 1))
                state["z"].sub_(g, alpha=lr)

    def eval(self) -> None:
        self._move(1 - 1 / self.beta, training=False)

    def train(self) -> None:
        self._move(1 - self.beta, training=True)

    @torch.no_grad()
    def _move(self, share: float, *, training: bool) -> None:
        if self.training != training:
            for p, state in self.state.items():
                p.lerp_(state["z"], share)
        self.training = training

    def z(self) -> list[Tensor]:
        return [self.state[p]["z"] for group in self.param_groups for p in group["params"]]


class Lookahead:
    """Zhang et al. 2019: every k steps the slow weights go a part of the way to the fast ones, which start there."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[Tensor], k: int = 5, alpha: float = 0.5):
        self.optimizer, self.params, self.k, self.alpha, self.steps = optimizer, params, k, alpha, 0
        self.slow = [p.detach().clone() for p in params]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.k == 0:
            for slow, p in zip(self.slow, self.params, strict=True):
                p.copy_(slow.lerp_(p, self.alpha))


class Trained(NamedTuple):
    """step: follows backward(). average: for CO2. evaluated: gives the model to evaluate, at the end."""

    step: Callable[[], Any]
    average: Any
    evaluated: Callable[[], nn.Module]


def schedule_free(model: nn.Module, **settings: Any) -> Trained:
    optimizer = ScheduleFree(model.parameters(), **settings)
    return Trained(optimizer.step, optimizer.z, lambda: (optimizer.eval(), model)[1])


def lookahead(model: nn.Module) -> Trained:
    params = list(model.parameters())
    optimizer = Lookahead(torch.optim.SGD(params, 0.02, momentum=0.9), params)

    def slow_model() -> nn.Module:
        slow = copy.deepcopy(model)
        with torch.no_grad():
            for p, value in zip(slow.parameters(), optimizer.slow, strict=True):
                p.copy_(value)
        return slow

    return Trained(optimizer.step, optimizer.slow, slow_model)


def followed(model: nn.Module, follow: Callable[[], Any], ema: nn.Module) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return Trained(lambda: (optimizer.step(), follow()), ema, lambda: ema)


def ema(model: nn.Module) -> Trained:
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    return followed(model, lambda: ema.update_parameters(model), ema)


def swa(model: nn.Module) -> Trained:
    average, steps = AveragedModel(model), iter(range(STEPS))

    def follow() -> None:
        if next(steps) >= STEPS // 2:
            average.update_parameters(model)

    return followed(model, follow, average)


def timm_ema(version: str, model: nn.Module) -> Trained:
    import training.prepared  # noqa: F401 - lets timm import beside a CPU build of torch

    # isort: split
    import timm.utils

    ema = getattr(timm.utils, version)(model, decay=0.95)
    return followed(model, lambda: ema.update(model), ema)


KINDS: dict[str, Callable[[nn.Module], Trained]] = {
    "schedule-free SGD": partial(schedule_free, lr=0.5),
    "schedule-free AdamW": partial(schedule_free, lr=0.03, beta2=0.99),
    "Lookahead": lookahead,
    "EMA": ema,
    "SWA": swa,
    "ModelEmaV2": partial(timm_ema, "ModelEmaV2"),
    "ModelEmaV3": partial(timm_ema, "ModelEmaV3"),
}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))


def train(model: nn.Module, trained: Trained, rank: int, seed: int, after: Callable[[], Any]) -> None:
    for number in range(STEPS):
        model.zero_grad()
        loss(model, *batch(number, 100 * seed + rank)).backward()
        trained.step()
        after()


def floats(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()])


def ends(rank: int, world_size: int, kinds: list[str]) -> dict[str, list[tuple[Tensor, float, float]]]:
    """By kind and seed: the evaluated model, and its held-out loss with CO2 and with DDP."""
    found: dict[str, list[tuple[Tensor, float, float]]] = {kind: [] for kind in kinds}
    for kind in kinds:
        for seed in range(1, SEEDS + 1):
            model, other = net(seed), net(seed)
            trained = KINDS[kind](model)
            config = CO2Config.recommended(world_size, STEPS, tau=3)
            co2 = CO2(model.parameters(), config, buffers=model.buffers(), average=trained.average)
            train(model, trained, rank, seed, co2.step)
            co2.finish()
            co2.close()
            ours = trained.evaluated().eval()
            plain = KINDS[kind](other)
            train(DistributedDataParallel(other), plain, rank, seed, lambda: None)
            found[kind].append((floats(ours), held_out(ours), held_out(plain.evaluated().eval())))
    return found


@pytest.mark.parametrize("kinds", [[*KINDS][:4], [*KINDS][4:]], ids=["own", "libraries"])
def test_workers_evaluate_one_model_which_is_as_good_as_ddps(kinds: list[str]):
    first, second = run_distributed(ends, WORKERS, kinds, timeout=240)
    for kind in kinds:
        for mine, theirs in zip(first[kind], second[kind], strict=True):
            assert torch.equal(mine[0], theirs[0]), f"{kind}: the workers' evaluated models differ"
        ours, ddp = ([row[i] for row in first[kind]] for i in (1, 2))
        print(kind, ours, ddp)
