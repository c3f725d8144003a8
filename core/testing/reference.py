"""The executable specification: Algorithm 1 of CO2 (arXiv 2401.16265), merge on arrival, nodes and fragments.

Each worker is a row of x [workers, n]. An average over workers is an average over rows, and waits in a list until it
is used. A node of several ranks is one row, with the average of its ranks' gradients. Tests compare the package with
this code. Run it in a notebook. Here two workers pull the one parameter from 4 to 0 and to 2, so 1 is best:

    >>> import torch
    >>> from co2_training.testing.reference import Reference
    >>> ref = Reference(torch.full((2, 1), 4.0).double(), tau=2, alpha=0.5, beta=0.0, gap="none", phi=None)
    >>> targets = torch.tensor([[0.0], [2.0]])
    >>> [round(x.item(), 2) for x in ref.run(lambda x, step: x - targets, lr=0.5, total=12)]
    [4.0, 4.0, 2.88, 1.75, 1.05, 0.77, 0.75]
    >>> ref.finish()
    >>> ref.x.tolist()
    [[0.8359375], [0.8359375]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def average(d: Tensor, weights: Tensor) -> Tensor:
    """Step 2: Delta = sum_i w_i d^i / sum_i w_i, [n], of d [workers, n], or 0 if all weights are 0."""
    return weights @ d / (weights.sum() or 1.0)


def staleness_gap(kind: str, moved: Tensor, delta: Tensor) -> Tensor | float:
    """Step 4: Lambda_t, from the last outer movement x_{t,0} - x_{t-1,0} and Delta, [n] each."""
    if kind == "elementwise":
        return 1 + moved.abs() / (delta.pow(2).mean().sqrt() + 1e-12)
    return 1 + moved.norm() / (delta.norm() + 1e-12) if kind == "norm" else 1.0


@dataclass
class Reference:
    """All workers of CO2. Take local steps on the rows of `x` in place, and call `local_step` after each.

    Args:
        x: Parameters, [workers, n]. All rows start equal.
        tau: Local steps of a round. Between two rounds it may change, and so may alpha, beta and phi.
        alpha, beta, phi: Outer learning rate, outer momentum, and its elements' largest size (None: no clipping).
        gap: Staleness gap Lambda: "elementwise", "norm", or "none" for 1.
        delay: Local steps from the start of an all-reduce to the use of its average. None or tau: a whole round, as in
            the paper. 0: a boundary uses what it sends. Between: workers train on at the boundary, without a restart.
        merge: Where worker i continues after an outer step. "restart": from x_{t+1,0} (the paper). "keep_local": from
            there plus its local steps since the all-reduce started, as in LOSCAR-SGD, hivemind and CoCoD-SGD.
        nesterov: Whether step 7 takes beta m_t + Delta / Lambda in place of m_t.
        weights: Weights of the workers in the next averages, [workers]. None: 1 for each. A worker with weight 0, or
            with a difference that is not finite, is excluded: it sends zeros, and continues from the outer iterate.
        reduce: From d [workers, n] and the weights to Delta [n]. A compression may replace the average.
        steps: Local steps since the last boundary. See `fragments`.

    Attributes:
        z, m, moved: Outer iterate x_{t,0}, outer momentum m_{t-1}, and x_{t,0} - x_{t-1,0}, [n].
        base: x without each worker's local steps since it last sent, [workers, n].
        excluded: [workers], True if the last boundary excluded the worker.
        in_flight: All-reduces on their way, oldest first: tau of the round, every d^i [workers, n], Delta [n].
        outer, restarts, deltas: x_{0,0}, x_{1,0} and so on, x after each boundary, and the averages.
    """

    x: Tensor
    tau: int
    alpha: float = 1.0
    beta: float = 0.5
    gap: str = "elementwise"
    phi: float | None = 1.0
    delay: int | None = None
    merge: str = "restart"
    nesterov: bool = False
    weights: Tensor | None = None
    reduce: Callable[[Tensor, Tensor], Tensor] = average
    steps: int = 0

    def __post_init__(self) -> None:
        if self.merge not in ("restart", "keep_local") or self.gap not in ("elementwise", "norm", "none"):
            raise ValueError(f"unknown merge {self.merge!r} or gap {self.gap!r}")
        assert 0 <= (self.delay or 0) <= self.tau
        self.z, self.base, self.excluded = self.x[0].clone(), self.x.clone(), torch.zeros(len(self.x)).bool()
        self.m, self.m_tau, self.moved = torch.zeros_like(self.z), self.tau, torch.zeros_like(self.z)
        self.outer, self.restarts, self.deltas = [self.z], list[Tensor](), list[Tensor]()
        self.in_flight: list[tuple[int, Tensor, Tensor]] = []
        if self.delay in (None, self.tau):  # zeros were sent before round 0: x_{1,0} = x_{0,0}
            self.in_flight.append((self.tau, torch.zeros_like(self.x), self.m))

    def local_step(self) -> bool:
        """Step 1: counts one local step of all workers, and does what is due. Returns True if it ended the round."""
        self.steps += 1
        if ended := self.steps >= self.tau:
            self.send()
        if self.in_flight and (len(self.in_flight) == 2 or self.steps == self.delay):
            self.arrive()
        if ended:
            self.restarts.append(self.x.clone())
        return ended

    def send(self) -> None:
        """Step 3. d^i is x_{t,0} - x^i, or with keep_local minus worker i's local steps since it last sent."""
        own = self.base - self.x
        weights = torch.ones_like(own[:, 0]) if self.weights is None else self.weights.to(own)
        self.excluded = ~own.isfinite().all(dim=1) | (weights == 0)
        own[self.excluded], self.x[self.excluded] = 0.0, self.z
        self.deltas.append(self.reduce(own, weights.masked_fill(self.excluded, 0.0)))
        self.in_flight.append((self.tau, own, self.deltas[-1]))
        self.base, self.steps = self.x.clone(), 0

    def arrive(self) -> None:
        """Steps 2 and 4 to 7 with the oldest average on its way, and the merge."""
        tau, _, delta = self.in_flight.pop(0)
        new = delta / staleness_gap(self.gap, self.moved, delta)  # 4
        m = min(1.0, self.beta * tau / self.m_tau) * self.m + new  # 5; beta follows a change of tau
        self.m, self.m_tau = m if self.phi is None else m.clamp(-self.phi, self.phi), tau  # 6
        self.moved = -self.alpha * (self.beta * self.m + new if self.nesterov else self.m)  # 7
        self.z = self.z + self.moved
        self.outer.append(self.z)
        if self.merge == "restart":
            self.x[:], since = self.z, 0.0
        else:  # plus the local steps since the all-reduce started that has arrived
            since = self.x - self.base
            self.x[:] = self.z + since - sum(own for _, own, _ in self.in_flight)
        self.base = self.x - since

    def finish(self) -> None:
        """Ends the run: uses what is on its way, and the steps that were not sent. All rows of x are then equal."""
        if self.in_flight and self.delay not in (None, self.tau):
            self.arrive()  # with restart, it replaces the local steps during its all-reduce, as in every round
        if self.steps:
            self.send()
        while self.in_flight:
            self.arrive()
        self.x[:] = self.z
        self.base, self.steps = self.x.clone(), 0

    def run(self, gradient: Callable[[Tensor, int], Tensor], lr: float, total: int) -> list[Tensor]:
        """Takes `total` steps of SGD with gradient(x [workers, n], step) -> [workers, n]. Returns `outer`."""
        for step in range(total):
            self.x.sub_(lr * gradient(self.x, step))
            self.local_step()
        return self.outer


def fragments(x: Tensor, parts: Sequence[Any], tau: int, **settings: Any) -> list[Reference]:
    """A Reference per part of x's columns: a slice, or indices, which copy. Part i of F sends tau i / F steps late."""
    starts = [(tau - tau * i // len(parts)) % tau for i in range(len(parts))]
    return [Reference(x[:, part], tau, steps=start, **settings) for part, start in zip(parts, starts, strict=True)]
