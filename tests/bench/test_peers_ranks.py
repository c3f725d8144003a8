"""The methods that torch brings, on real processes, against sums by hand, and how a model is cut into fragments."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.peers.adapters import PEERS, Task, Trainer, split
from core.testing import run_distributed

STEPS, TAU = 7, 3


def linear(size: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size, bias=False))


def gradient(rank: int, step: int, terms: int = 1, size: int = 8) -> Tensor:
    """[size, size], of rank `terms`, different on every worker; the right factors are the same on all."""
    left = torch.randn(terms, size, generator=torch.Generator().manual_seed(100 * rank + step))
    right = torch.randn(terms, size, generator=torch.Generator().manual_seed(7))
    return left.t() @ right


def start(name: str) -> tuple[nn.Parameter, Trainer]:
    model = linear()
    task = Task(model, torch.optim.SGD(model.parameters(), lr=0.1), TAU, 30.0)
    return model[0].weight, PEERS[name].start(task)  # pyright: ignore[reportReturnType]


def averaging(rank: int, name: str) -> tuple[Tensor, int]:
    weight, trainer = start(name)
    for step in range(STEPS):
        weight.grad = gradient(rank, step)
        trainer.optimizer.step()
        trainer.after_step(last=step == STEPS - 1)
    trainer.finish()
    return weight.detach(), trainer.stats()["rounds"]


def test_models_are_averaged_every_tau_steps():
    workers = [linear()[0].weight.detach().clone() for _ in range(2)]
    for step in range(STEPS):
        workers = [w - 0.1 * gradient(rank, step) for rank, w in enumerate(workers)]
        if step + 1 in (1, 4, 7):
            workers = [(workers[0] + workers[1]) / 2] * 2
    for (weight, rounds), expected in zip(on_ranks()["torch_post_local"], workers, strict=True):
        torch.testing.assert_close(weight, expected)
        assert rounds == 3


def power(rank: int, terms: int) -> Tensor:
    weight, trainer = start("torch_powersgd")
    for step in range(STEPS):
        wanted = gradient(rank, step, terms)
        (trainer.model(torch.eye(8)) * wanted.t()).sum().backward()  # so that the weight's gradient is `wanted`
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return weight.detach()


@pytest.mark.parametrize("terms", [1, 3])
def test_powersgd_is_exact_for_gradients_of_its_rank(terms: int):
    """Gradients of rank 3 lose something at once, and both workers lose the same."""
    expected = linear()[0].weight.detach().clone()
    for step in range(STEPS):
        expected -= 0.1 * (gradient(0, step, terms) + gradient(1, step, terms)) / 2
    first, second = on_ranks()[f"power {terms}"]
    torch.testing.assert_close(first, second)
    error = (first - expected).abs().max().item()
    assert error < 1e-5 if terms == 1 else error > 1e-3


def everything(rank: int, _: int) -> dict[str, Any]:
    found: dict[str, Any] = {"torch_post_local": averaging(rank, "torch_post_local")}
    return found | {f"power {terms}": power(rank, terms) for terms in (1, 3)}


@functools.cache
def on_ranks() -> dict[str, tuple[Any, Any]]:
    """What each worker found, by name. One start of two workers serves all tests: starting takes longest."""
    first, second = run_distributed(everything, 2)
    return {name: (first[name], second[name]) for name in first}


def test_fragments_are_about_equal_and_a_tied_parameter_belongs_to_one():
    """Layers of 20, 20, 30 and 30 parameters: 40 and 60."""
    layers = [nn.Linear(*size, bias=False) for size in ((4, 5), (4, 5), (6, 5), (6, 5), (4, 5))]
    layers[4].weight = layers[0].weight
    parts = split(nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))), 2)
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [40, 60]
    assert [module for part in parts for module in part] == layers[:4]  # pyright: ignore
