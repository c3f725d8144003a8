"""The executable specification of zeroth-order training, all workers in one process, apart from order.py."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

Direction = Callable[[int, int], Tensor]  # z of (step, tensor), of the tensor's shape


def mezo(weights: list[Tensor], loss: Callable[[int], float], z: Direction, lr: float, eps: float, steps: int) -> None:
    """MeZO's Algorithm 1 in place (arXiv 2305.17333): W + eps z, then W - eps z, back to W, and the step.

    loss(step): at the weights as they are. Going back rounds, so that the weights drift.
    """

    def move(step: int, by: float) -> None:
        for i, w in enumerate(weights):
            w.add_(z(step, i), alpha=by)

    for step in range(steps):
        move(step, eps)
        plus = loss(step)
        move(step, -2 * eps)
        minus = loss(step)
        move(step, eps)
        move(step, -lr * (plus - minus) / (2 * eps))


def train(
    weights: list[Tensor],
    loss: Callable[[list[Tensor], int, int], tuple[float, float]],
    z: Direction,
    *,
    lr: Callable[[int], float],
    eps: float,
    steps: int,
    groups: int = 1,
    weight_decay: float = 0.0,
) -> list[Tensor]:
    """The weights after `steps` steps. loss(weights, step, group): the sum over the group's samples, and their number.
    A step's update has the rate of that step."""
    for step in range(steps):
        means = []
        for sign in (1, -1):
            moved = [w + sign * eps * z(step, i) for i, w in enumerate(weights)]
            sums = [loss(moved, step, group) for group in range(groups)]
            means.append(sum(s for s, _ in sums) / sum(n for _, n in sums))
        g = (means[0] - means[1]) / (2 * eps)
        if math.isfinite(g):
            for i, w in enumerate(weights):
                decayed = w if w.ndim >= 2 else 0 * w
                weights[i] = w - lr(step) * (g * z(step, i) + weight_decay * decayed)
    return weights
