"""The executable specification: Algorithm 1 of CO2 (arXiv 2401.16265) with all workers in one process.

Every tensor has a leading dimension of `workers`; the mean over workers is a mean over that dimension, and a delay
is a list. Written as plainly as the algorithm is stated, and sharing no code with outer.py or co2.py, so that the
two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EPS = 1e-12


@dataclass
class Reference:
    """All workers of CO2. x: [workers, n], row i the parameters of worker i, which the caller steps in place.

    Options as in CO2Config. The caller takes tau local steps on `x` (any inner optimiser), calling `local_step`
    after each; `finish` drains. History of what happened is kept in plain lists.
    """

    x: Tensor
    tau: int
    alpha: float = 1.0
    beta: float = 0.5
    gap: str = "elementwise"
    phi: float | None = 1.0
    clip_by: str = "element"
    delay: int = 1
    policy: str = "penalty"
    mix: float = 0.5
    taylor: float = 0.5
    nesterov: bool = False
    steps: int = 0
    outer: list[Tensor] = field(default_factory=list)  # x_{0,0}, x_{1,0}, ...: [n] each; if eager, those of worker 0
    restarts: list[Tensor] = field(default_factory=list)  # where the workers restarted after each round: [workers, n]
    deltas: list[Tensor] = field(default_factory=list)  # Delta of each round: [n]
    first_steps: list[Tensor] = field(default_factory=list)  # mean_i ||x^i_{t,1} - x_{t,0}|| of each round
    gaps: list[Tensor] = field(default_factory=list)
    first: Tensor | None = None

    def __post_init__(self) -> None:
        rows = len(self.x) if self.policy == "eager" else 1  # 1: all workers have the same
        self.z = self.x[:rows].clone()  # x_{t,0}
        self.m = torch.zeros_like(self.z)
        self.own = torch.zeros_like(self.x)  # d^i of the last round
        self.outer.append(self.z[0])

    def local_step(self) -> bool:
        """Counts one local step of all workers; on the tau-th, closes the round and returns True."""
        if self.steps == 0:
            self.first = (self.x - self.z).norm(dim=1).mean()
        self.steps += 1
        if self.steps == self.tau:
            self.close()
            return True
        return False

    def close(self, *, finishing: bool = False) -> None:
        """Steps 2 to 7 of one round t."""
        t = len(self.outer) - 1
        last_own, self.own = self.own, self.z - self.x
        self.deltas.append(self.own.mean(dim=0))  # step 3 at t: what is averaged now is used at t + delay
        self.first_steps.append(torch.zeros(()) if self.first is None else self.first)
        self.steps, self.first = 0, None
        used = t - self.delay
        if used >= 0:
            delta = self.deltas[used][None]  # step 2
            if self.policy == "taylor" and t > 0:
                delta = delta + self.taylor * delta**2 * (self.outer[t] - self.outer[t - 1])
            if self.policy == "eager":
                delta = delta + (self.own - last_own) / len(self.x)
            self.outer_step(delta, t, used)
        elif self.policy == "eager":  # t = 0: only its own difference is there
            self.outer_step(self.own / len(self.x), t, used)
        self.outer.append(self.z[0])
        mixed = self.mix * self.z + (1 - self.mix) * self.x
        self.x.copy_(mixed if self.policy == "mix" and not finishing else self.z.expand_as(self.x))
        self.restarts.append(self.x.clone())

    def outer_step(self, delta: Tensor, t: int, used: int) -> None:
        """Steps 4 to 7. delta: [1, n], or [workers, n]."""
        gap = self.staleness(t, self.deltas[used])  # step 4
        self.gaps.append(torch.as_tensor(gap))
        new = delta / gap
        self.m = self.beta * self.m + new  # step 5
        if self.phi is not None:  # step 6
            if self.clip_by == "element":
                self.m = torch.where(self.m.abs() > self.phi, self.phi * self.m.sign(), self.m)
            else:
                norms = self.m.norm(dim=1, keepdim=True)
                self.m = torch.where(norms > self.phi, self.m * (self.phi / norms), self.m)
        step = self.beta * self.m + new if self.nesterov else self.m
        self.z = self.z - self.alpha * step  # step 7

    def staleness(self, t: int, delta: Tensor) -> Tensor | float:
        """Lambda_t, from x_{t,0} and x_{t-1,0} as they are."""
        if self.gap == "none":
            return 1.0
        moved = self.outer[t] - self.outer[t - 1]
        if self.gap == "elementwise":
            return 1 + moved.abs() / (delta.pow(2).mean().sqrt() + EPS)
        if self.gap == "norm":
            return 1 + moved.norm() / (delta.norm() + EPS)
        if self.gap == "inner":
            return 1 + moved.norm() / (self.tau * torch.stack(self.first_steps[:t]).max() + EPS)
        raise ValueError(f"unknown gap {self.gap!r}")

    def finish(self) -> None:
        """Applies what is pending: the mean in flight, then the local steps since the last round, if any."""
        pending = self.steps > 0
        if not self.delay:
            if pending:
                self.close()
            return
        if not pending:
            self.x.copy_(self.z.expand_as(self.x))  # a mixed restart is no local step
        self.close(finishing=True)  # uses the mean in flight, launches the incomplete round
        if pending:
            self.close(finishing=True)  # uses the incomplete round
        if self.policy == "eager":
            self.z, self.m = (v.mean(dim=0, keepdim=True).expand_as(v) for v in (self.z, self.m))
            self.x.copy_(self.z)

    def run(self, gradient: Callable[[Tensor, int], Tensor], lr: float, total: int) -> list[Tensor]:
        """`total` steps of plain SGD, gradient(x [workers, n], step) -> [workers, n]; returns the outer iterates."""
        for step in range(total):
            self.x.sub_(lr * gradient(self.x, step))
            self.local_step()
        return self.outer


def vmap_gradient(
    loss: Callable[..., Tensor], template: dict[str, Tensor]
) -> Callable[[Tensor, tuple[Any, ...]], Tensor]:
    """The gradient of a functional model for all workers at once.

    loss(params, *batch) -> 0-d for one worker. template: name -> tensor, the shapes that a row of x unflattens to.
    Returns f(x [workers, n], batch of tensors [workers, ...]) -> [workers, n].
    """

    def of_flat(row: Tensor, batch: tuple[Any, ...]) -> Tensor:
        pieces = row.split([p.numel() for p in template.values()])
        params = {k: v.view(p.shape) for (k, p), v in zip(template.items(), pieces, strict=True)}
        return loss(params, *batch)

    return torch.vmap(torch.func.grad(of_flat))
