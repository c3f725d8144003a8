"""The executable specification: Algorithm 1 of CO2 (arXiv 2401.16265) with all workers in one process.

Every tensor of all workers has a leading dimension of `workers`; the mean over workers is a mean over that dimension,
and what is on its way waits in a variable. Written as plainly as the algorithm is stated, and sharing no code with
outer.py or co2.py, so that the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

EPS = 1e-12


@dataclass
class Reference:
    """All workers of CO2. x: [workers, n], row i the parameters of worker i, which the caller steps in place.

    The caller takes local steps on `x` (any inner optimiser) and calls `local_step` after each; `finish` applies what
    is pending. tau, alpha, beta, gap, phi: as tau, outer_lr, outer_momentum, gap and clip of OuterConfig.
    """

    x: Tensor
    tau: int
    alpha: float = 1.0
    beta: float = 0.5
    gap: str = "elementwise"
    phi: float | None = 1.0
    steps: int = field(default=0, init=False)
    """Local steps since the last boundary."""
    outer: list[Tensor] = field(default_factory=list, init=False)
    """x_{0,0}, x_{1,0}, ...: [n] each."""
    restarts: list[Tensor] = field(default_factory=list, init=False)
    """x after each boundary: [workers, n]."""
    deltas: list[Tensor] = field(default_factory=list, init=False)
    """What was averaged at each boundary: [n]."""

    def __post_init__(self) -> None:
        self.z = self.x[0].clone()  # x_{t,0}: [n]
        self.m = torch.zeros_like(self.z)
        self.in_flight: Tensor | None = None
        self.outer = [self.z]

    def local_step(self) -> bool:
        """Counts one local step of all workers; on the tau-th, closes the round and returns True."""
        self.steps += 1
        if self.steps < self.tau:
            return False
        self.boundary()
        return True

    def boundary(self) -> None:
        """Steps 2 to 7."""
        arrived = self.in_flight  # 2
        self.in_flight = (self.z - self.x).mean(dim=0)  # 3
        self.deltas.append(self.in_flight)
        if arrived is None:  # nothing was launched before round 0: x_{1,0} = x_{0,0}
            self.outer.append(self.z)
        else:
            self.outer_step(arrived)
        self.x.copy_(self.z.expand_as(self.x))
        self.restarts.append(self.x.clone())
        self.steps = 0

    def outer_step(self, delta: Tensor) -> None:
        """Steps 4 to 7. delta: the mean that was launched one round ago, [n]."""
        self.m = self.beta * self.m + delta / self.staleness(delta)  # 4 and 5
        if self.phi is not None:  # 6
            self.m = torch.where(self.m.abs() > self.phi, self.phi * self.m.sign(), self.m)
        self.z = self.z - self.alpha * self.m  # 7
        self.outer.append(self.z)

    def staleness(self, delta: Tensor) -> Tensor | float:
        """Lambda_t, from x_{t,0} - x_{t-1,0}, the last outer movement."""
        moved = self.outer[-1] - self.outer[-2] if len(self.outer) > 1 else torch.zeros_like(delta)
        if self.gap == "elementwise":
            return 1 + moved.abs() / (delta.pow(2).mean().sqrt() + EPS)
        if self.gap == "norm":
            return 1 + moved.norm() / (delta.norm() + EPS)
        if self.gap == "none":
            return 1.0
        raise ValueError(f"unknown gap {self.gap!r}")

    def finish(self) -> None:
        """Averages the local steps since the last boundary, and merges what is in flight; all rows of x are equal."""
        if self.steps:
            self.boundary()
        if self.in_flight is not None:
            self.outer_step(self.in_flight)
            self.in_flight = None
        self.x.copy_(self.z.expand_as(self.x))

    def run(self, gradient: Callable[[Tensor, int], Tensor], lr: float, total: int) -> list[Tensor]:
        """`total` steps of plain SGD, gradient(x [workers, n], step) -> [workers, n]; returns the outer iterates."""
        for step in range(total):
            self.x.sub_(lr * gradient(self.x, step))
            self.local_step()
        return self.outer
