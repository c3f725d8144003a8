"""The model that bench/peers trains, and the stand-in for computing on hardware of one's own."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN_LAYERS = 5
LR, MOMENTUM = 0.05, 0.9
FORWARD = 1 / 3  # of a step's computing time; backward does twice the floating point operations


class Pace:
    """Stretches a step to `seconds`: each part of it ends no earlier than its share of them after begin()."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        """A step starts now."""
        self._start = time.perf_counter()

    def wait(self, share: float) -> None:
        """Returns once `share` of the step's time has passed."""
        time.sleep(max(0.0, self._start + share * self.seconds - time.perf_counter()))


class Paced(nn.Module):
    """Passes its input on; in the backward pass holds the gradient back until `share` of the step has passed.

    Behind a layer, it makes the layer's gradients come at that time: spread over the backward pass, so that a method
    which sends gradients meanwhile can do so here.
    """

    def __init__(self, pace: Pace, share: float):
        super().__init__()
        self.pace, self.share = pace, share

    def forward(self, x: Tensor) -> Tensor:
        return _Hold.apply(x, self)  # pyright: ignore


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, paced: Paced) -> Tensor:
        ctx.paced = paced
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        ctx.paced.pace.wait(ctx.paced.share)
        return grad, None


def build_model(width: int, pace: Pace | None = None) -> nn.Sequential:
    """A perceptron of 8 x 8 pixels -> 10 logits with HIDDEN_LAYERS layers of `width`, He initialisation.

    pace: gives every layer an equal part of the backward pass's time.
    """
    sizes = [64, *[width] * HIDDEN_LAYERS, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        layer = nn.Linear(a, b)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer]
        if pace is not None:
            done = (len(sizes) - 1 - number) / (len(sizes) - 1)  # of the backward pass, this layer included
            layers += [Paced(pace, FORWARD + (1 - FORWARD) * done)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    """The inner optimiser of every method."""
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)
