"""The inner optimisers on stacked flat parameters: every worker has a row and a state of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inner:
    """An inner optimiser. SGD has no weight decay."""

    name: Literal["sgd", "adamw"]
    lr: float
    """Peak learning rate."""
    momentum: float = 0.9
    """SGD's."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    """AdamW's, of all parameters."""
    clip: float | None = None
    """The norm to which each row's gradient is clipped; None for no clipping."""

    def start(self, x: Tensor) -> InnerState:
        return InnerState(self, torch.zeros_like(x), torch.zeros_like(x) if self.name == "adamw" else None)


@dataclass
class InnerState:
    """An optimiser under way, with the formulas of torch.optim.SGD and AdamW. first, second: [workers, n]."""

    inner: Inner
    first: Tensor
    second: Tensor | None
    steps: int = 0

    def copy(self) -> InnerState:
        second = None if self.second is None else self.second.clone()
        return InnerState(self.inner, self.first.clone(), second, self.steps)

    def moments(self) -> list[tuple[Tensor, float]]:
        """What is kept from step to step, [workers, n] each, and the share of it that a step leaves."""
        if self.second is None:
            return [(self.first, self.inner.momentum)]
        return list(zip((self.first, self.second), self.inner.betas, strict=True))

    def step(self, x: Tensor, gradient: Tensor, lr: float) -> None:
        """Moves x in place. x, gradient: [workers, n]."""
        gradient = clip_rows(gradient, self.inner.clip)
        self.steps += 1
        if self.second is None:
            self.first.mul_(self.inner.momentum).add_(gradient)
            x.sub_(self.first, alpha=lr)
            return
        one, two = self.inner.betas
        x.mul_(1 - lr * self.inner.weight_decay)
        self.first.lerp_(gradient, 1 - one)
        self.second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        root = (self.second.sqrt() / math.sqrt(1 - two**self.steps)).add_(1e-8)
        x.addcdiv_(self.first, root, value=-lr / (1 - one**self.steps))


def clip_rows(gradient: Tensor, limit: float | None) -> Tensor:
    """Each row at most of norm `limit`, as torch.nn.utils.clip_grad_norm_ does it."""
    if limit is None:
        return gradient
    return gradient * (limit / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)


def cosine(step: int, total: int) -> float:
    """The learning rate of 0-based `step` as a share of the peak."""
    return 0.5 * (1 + math.cos(math.pi * step / total))
