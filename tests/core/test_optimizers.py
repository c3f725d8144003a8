"""Which optimizers train one model with CO2: the table of docs/from_ddp.md."""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from core import CO2, CO2Config
from core.testing import run_distributed
from tests.imports import ROOT

WORKERS, STEPS = 2, 60
Build = Callable[[nn.Module], list[Optimizer]]


def one(kind: Callable[..., Optimizer], **settings: Any) -> Build:
    return lambda model: [kind(model.parameters(), **settings)]


def with_muon(model: nn.Module) -> list[Optimizer]:
    """Muon takes matrices only."""
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    return [muon, torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)]


OPTIMIZERS: dict[str, Build] = {
    "SGD": one(torch.optim.SGD, lr=0.02, momentum=0.9),
    "Adam": one(torch.optim.Adam, lr=0.01),
    "AdamW": one(torch.optim.AdamW, lr=0.01),
    "NAdam": one(torch.optim.NAdam, lr=0.01),
    "RAdam": one(torch.optim.RAdam, lr=0.02),
    "Adamax": one(torch.optim.Adamax, lr=0.02),
    "Adagrad": one(torch.optim.Adagrad, lr=0.05),
    "Adadelta": one(torch.optim.Adadelta, lr=1.0),
    "Adafactor": one(torch.optim.Adafactor, lr=0.05),
    "RMSprop": one(torch.optim.RMSprop, lr=0.003),
    "Rprop": one(torch.optim.Rprop, lr=0.003),
    "ASGD": one(torch.optim.ASGD, lr=0.1, t0=1e9),
    "Muon": with_muon,
}


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + number))
    return inputs, inputs.square().sum(1, keepdim=True) / 4


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) - targets).square().mean()


def held_out(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(loss(model, *batch(number, 9))) for number in range(20)) / 20


def train(model: nn.Module, optimizers: Iterable[Optimizer], rank: int, after: Callable[[], Any]) -> None:
    for number in range(STEPS):
        model.zero_grad()
        loss(model, *batch(number, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
        after()


def trained(rank: int, world_size: int) -> dict[str, tuple[Tensor, float, float, float]]:
    """By optimizer: the parameters after finish(), and the held-out loss before, with CO2, and with DDP."""
    torch.manual_seed(0)
    start, found = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), {}
    for name, build in OPTIMIZERS.items():
        model, other = copy.deepcopy(start), copy.deepcopy(start)
        co2 = CO2(model.parameters(), CO2Config.recommended(world_size, STEPS, tau=3))
        train(model, build(model), rank, co2.step)
        co2.finish()
        co2.close()
        train(DistributedDataParallel(other), build(other), rank, lambda: None)
        ends = torch.cat([p.detach().flatten() for p in model.parameters()])
        found[name] = ends, held_out(start), held_out(model), held_out(other)
    return found


def test_each_optimizer_trains_one_model_about_as_well_as_ddp():
    first, second = run_distributed(trained, WORKERS, timeout=240)
    for name, (ends, before, ours, ddp) in first.items():
        assert torch.equal(ends, second[name][0]), f"{name}: the workers' models differ"
        assert ours < 1.3 * ddp < 0.5 * before, (name, before, ours, ddp)


def zero(rank: int, world_size: int) -> Tensor:
    """One step of SGD with lr 1 from 0, where every gradient of rank r is r + 1."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0)
    for p in params:
        p.grad = torch.full_like(p, rank + 1.0)
    optimizer.step()
    return torch.stack([p.detach() for p in params])


def test_zero_redundancy_optimizer_trains_each_parameter_with_its_owners_gradient_alone():
    """So that it needs DDP, and with CO2 loses what the other workers have computed."""
    for ends in run_distributed(zero, WORKERS):
        assert sorted(ends[:, 0].tolist()) == [-2.0, -1.0], "the mean would be -1.5"


def test_the_page_names_what_is_tested():
    (table,) = re.findall(r"(?m)^\| optimizer \|.*\n(?:\|.*\n)+", (ROOT / "docs/from_ddp.md").read_text())
    yes = [row for row in table.splitlines()[2:] if row.split("|")[2].strip().startswith("yes")]
    assert sorted(name for row in yes for name in re.findall(r"`(\w+)`", row.split("|")[1])) == sorted(OPTIMIZERS)
    assert "| `ZeroRedundancyOptimizer` | no" in table
