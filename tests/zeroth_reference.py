"""The executable specification of zeroth-order training, all workers in one process, apart from order.py."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

Direction = Callable[[int, int, int], Tensor]  # z of (step, direction, tensor), of the tensor's shape


def mezo(weights: list[Tensor], loss: Callable[[int], float], z: Direction, lr: float, eps: float, steps: int) -> None:
    """MeZO's Algorithm 1 in place (arXiv 2305.17333): W + eps z, then W - eps z, back to W, and the step.

    loss(step): at the weights as they are. Going back rounds, so that the weights drift.
    """

    def move(step: int, by: float) -> None:
        for i, w in enumerate(weights):
            w.add_(z(step, 0, i), alpha=by)

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
    directions: int = 1,
    delay: int = 0,
    weight_decay: float = 0.0,
) -> list[Tensor]:
    """The weights after `steps` steps, all that is delayed applied.

    loss(weights, step, group): the sum over the group's samples, and their number. Direction j of k is measured on the
    data of the groups d with floor(d k / groups) = j, or where there are more directions, of group floor(j groups / k).
    A step's update is applied `delay` steps later, at the rate of its own step.
    """
    waiting: list[tuple[int, list[float]]] = []

    def apply(step: int, g: list[float]) -> None:
        if not all(math.isfinite(number) for number in g):
            return
        for i, w in enumerate(weights):
            mean = sum(g[j] * z(step, j, i) for j in range(directions)) / directions
            decayed = w if w.ndim >= 2 else 0 * w
            weights[i] = w - lr(step) * (mean + weight_decay * decayed)

    for step in range(steps):
        g = []
        for j in range(directions):
            own = [d for d in range(groups) if d * directions // groups == j] or [j * groups // directions]
            means = []
            for sign in (1, -1):
                moved = [w + sign * eps * z(step, j, i) for i, w in enumerate(weights)]
                sums = [loss(moved, step, d) for d in own]
                means.append(sum(s for s, _ in sums) / sum(n for _, n in sums))
            g.append((means[0] - means[1]) / (2 * eps))
        waiting.append((step, g))
        if len(waiting) > delay:
            apply(*waiting.pop(0))
    for late in waiting:
        apply(*late)
    return weights
