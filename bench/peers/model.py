"""The model that bench/peers trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.pace import PacedLinear, Pacer

HIDDEN_LAYERS = 5
LAYERS = HIDDEN_LAYERS + 1
LR, MOMENTUM = 0.05, 0.9


def make_pacer(step_seconds: float) -> Pacer:
    """Stretches forward and backward of the model to `step_seconds`, so that workers do not fight for the cores."""
    return Pacer(step_seconds, LAYERS)


def build_model(width: int, pacer: Pacer | None = None) -> nn.Sequential:
    """A perceptron of 8 x 8 pixels -> 10 logits with HIDDEN_LAYERS layers of `width`, He initialisation.

    pacer: gives every layer an equal part of the backward pass's time, from restart() on.
    """
    sizes = [64, *[width] * HIDDEN_LAYERS, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for number, shape in enumerate(zip(sizes[:-1], sizes[1:], strict=True), start=1):
        forward_parts = LAYERS if number == LAYERS else 0
        layer = PacedLinear(*shape, pacer, forward_parts) if pacer else nn.Linear(*shape)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(params: Any, lr: float = LR) -> torch.optim.Optimizer:
    """The inner optimiser of every method."""
    return torch.optim.SGD(params, lr=lr, momentum=MOMENTUM)
