"""torch's PowerSGD on real processes, against sums by hand, and how a model is cut into fragments."""

import torch
from torch import Tensor, nn

from bench.peers.adapters import Task, powersgd, split
from core.testing import run_distributed

STEPS = 7


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False))


def gradient(rank: int, step: int, terms: int) -> Tensor:
    """[8, 8], of rank `terms`, different on every worker; the right factors are the same on all."""
    left = torch.randn(terms, 8, generator=torch.Generator().manual_seed(100 * rank + step))
    right = torch.randn(terms, 8, generator=torch.Generator().manual_seed(7))
    return left.t() @ right


def trained(rank: int, _: int) -> list[Tensor]:
    """The weights after training over PowerSGD of rank 1, with gradients of rank 1 and of rank 3."""
    found = []
    for terms in (1, 3):
        model = linear()
        trainer = powersgd(Task(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, 30.0), rank=1)
        for step in range(STEPS):
            wanted = gradient(rank, step, terms)
            (trainer.model(torch.eye(8)) * wanted.t()).sum().backward()  # so that the weight's gradient is `wanted`
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        found.append(model[0].weight.detach())
    return found


def test_powersgd_is_exact_for_gradients_of_its_rank():
    """Gradients of rank 3 lose something at once, and both workers lose the same."""
    for terms, first, second in zip((1, 3), *run_distributed(trained, 2), strict=True):
        expected = linear()[0].weight.detach().clone()
        for step in range(STEPS):
            expected -= 0.1 * (gradient(0, step, terms) + gradient(1, step, terms)) / 2
        torch.testing.assert_close(first, second)
        error = (first - expected).abs().max().item()
        assert error < 1e-5 if terms == 1 else error > 1e-3


def test_fragments_are_about_equal_and_a_tied_parameter_belongs_to_one():
    """Layers of 20, 20, 30 and 30 parameters: 40 and 60."""
    layers = [nn.Linear(*size, bias=False) for size in ((4, 5), (4, 5), (6, 5), (6, 5), (4, 5))]
    layers[4].weight = layers[0].weight
    parts = split(nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))), 2)
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [40, 60]
    assert [module for part in parts for module in part] == layers[:4]  # pyright: ignore
