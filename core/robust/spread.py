"""How far the workers are apart, from one number more in each reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rounds import Rider
from .guard import Guard


class Spread(Rider):
    """Notes in RoundStats.disagreement how far the workers' parameters were from their mean, the root of the mean
    square of the distances, when they sent what has landed in the round: mean_i ||x^i - mean||^2.

    What worker i sends is d^i = x - x^i with one x on all, so this is mean_i ||d^i||^2 - ||mean d||^2, weighted as the
    mean is; the guard, which comes before, knows ||d^i||. The difference of two squares: a disagreement below a
    thousandth of the pseudo-gradient's norm is rounding, and over narrow wires what they round is in it. For methods
    that send differences from equal outer iterates at the boundary, as CO2 does; docs/theory.md predicts its size.
    """

    shared = {"squares": 1}

    def __init__(self, guard: Guard):
        self._guard = guard
        self._square: Tensor | None = None  # mean_i ||d^i||^2 of what has landed, 0-d

    @torch.no_grad()
    def pack(self) -> None:
        m = self.method
        if m.differences and not m.sends_later:
            weight = m.scalars["weight"]
            square = self._guard.size.square().to(weight)
            m.scalars.set("squares", torch.where(weight > 0, weight * square, 0.0))

    @torch.no_grad()
    def landed(self) -> None:
        weight, square = self.method.scalars["weight"].double(), self.method.scalars["squares"].double()
        self._square = torch.where(weight > 0, square / weight, 0.0)

    @torch.no_grad()
    def end(self) -> None:
        stats = self.method.stats
        mean = stats.pseudo_gradient_norm
        if self._square is not None and isinstance(mean, Tensor) and not self.method.sends_later:
            stats.disagreement = (self._square - mean.to(self._square).square()).clamp(min=0).sqrt()
        self._square = None
