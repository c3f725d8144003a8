"""The executable specification: Algorithm 1 of CO2 (arXiv 2401.16265), and what core adds to it.

All workers are in one process: every tensor of all workers has a leading dimension of `workers`, the mean over workers
is a mean over that dimension, and what is on its way waits in a variable. Written as plainly as the algorithm is
stated, and sharing no code with core, so that the two can be held against each other.
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
    is pending. tau, alpha, beta, gap, phi: as tau, outer_lr, outer_momentum, gap and clip of CO2Config.
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


# -- what core adds: when a mean is merged, into what, and of whom it is

Mean = Callable[[Tensor, Tensor], Tensor]


def mean(values: Tensor, weights: Tensor) -> Tensor:
    """Of values [workers, ...], weighted [workers]; 0 without any weight."""
    total = weights.sum()
    return torch.einsum("w,w...->...", weights, values) / torch.where(total == 0, 1.0, total)


@dataclass
class Sent:
    """What the workers sent at one boundary, until its mean is merged."""

    tau: int  # local steps of the round that it ended
    own: Tensor  # d^i: [workers, n]
    mean: Tensor  # Delta: [n]


@dataclass
class LateReference(Reference):
    """Every tau local steps each worker sends, and d local steps later it merges:

    delay: d. None (or tau) is the paper's whole round: at a boundary each worker sends first, and then merges what was
      sent one round ago. 0 is blocking: sent, received and merged at one boundary. 0 < d < tau: the mean is merged on
      arrival, d steps after the sending, where the worker did not restart but went on from where it was.
    merge: what worker i continues from once the mean has landed and the outer step x_{t+1} = x_t - alpha m_t is taken.
      restart: x_{t+1} (the paper).
      keep_local: x_{t+1} plus its own progress since it sent what has landed (LOSCAR-SGD, arXiv 2605.20866; hivemind's
        delta rule; CoCoD-SGD).
    What is sent, d^i: with restart x_t - x^i, from the outer iterate as it is before what lands at
      the same moment is applied; with keep_local minus its own progress since its last sending, the sum of its local
      steps, so that nothing is counted twice.
    nesterov: the outer step takes beta m_t + Delta_t / Lambda_t in place of m_t.
    weights: of the workers in the next means, [workers]: a mean is sum(w^i d^i) / sum(w^i), and 0 where nobody has a
      weight. A worker whose difference is not finite, or has weight 0, is left out: its d^i is 0, its weight too, and
      once the boundary is through it continues from the outer iterate.
    reduce: what the network makes of d^i and the weights, [workers, n] and [workers] -> [n]: their mean, or what a
      compression leaves of it.
    tau may be changed between two boundaries. Where Delta is of tau' local steps, and what landed before of tau, step 5
      is m_t = min(1, beta tau' / tau) m_{t-1} + Delta / Lambda (outer.carried says why).

    finish() leaves all workers with equal parameters. With d = tau or 0, local steps since the last boundary are sent
    as at a boundary, then all that is on its way is merged in order. With 0 < d < tau what is on its way lands first,
    and the local steps since the last sending are sent and merged behind it. So with restart and d < tau the steps
    taken while a mean was on its way are given up, at the end as in every round. With keep_local every local step is in
    exactly one mean.
    """

    delay: int | None = None
    merge: str = "restart"
    nesterov: bool = False
    weights: Tensor | None = None  # None: all 1
    reduce: Mean = mean
    in_flight: list[Sent] = field(default_factory=list, init=False)  # pyright: ignore

    def __post_init__(self) -> None:
        if self.merge not in ("restart", "keep_local"):
            raise ValueError(f"unknown merge {self.merge!r}")
        if self.delay is not None and not 0 <= self.delay <= self.tau:
            raise ValueError(f"delay={self.delay}: between 0 and tau={self.tau}")
        super().__post_init__()
        self.in_flight, self.m_tau = [], self.tau
        self.base = self.x.clone()  # x less the own local steps since the last sending
        self.excluded = torch.zeros_like(self.x[:, 0], dtype=torch.bool)  # at the last sending

    @property
    def whole_round(self) -> bool:
        return self.delay is None or self.delay == self.tau

    def local_step(self) -> bool:
        if self.in_flight and self.steps + 1 == self.delay and not self.whole_round:
            self.land()
        return super().local_step()

    def boundary(self) -> None:
        self.send()  # step 3
        if self.delay == 0 or (self.whole_round and len(self.in_flight) == 2):
            self.land()  # steps 2 and 4 to 7
        elif self.whole_round:  # nothing has landed in round 0: x_{1,0} = x_{0,0}
            self.outer.append(self.z)
            self.restart()
        excluded = self.excluded[:, None]
        self.x.copy_(torch.where(excluded, self.z, self.x))
        self.base.copy_(torch.where(excluded, self.x, self.base))
        self.restarts.append(self.x.clone())

    def send(self) -> None:
        """Step 3: what is averaged now is merged at its delay."""
        own = (self.base if self.merge == "keep_local" else self.z) - self.x
        weights = torch.ones_like(own[:, 0]) if self.weights is None else self.weights.to(own)
        self.excluded = ~own.isfinite().all(dim=1) | (weights == 0)
        weights = torch.where(self.excluded, 0.0, weights)
        own = torch.where(self.excluded[:, None], 0.0, own)
        self.deltas.append(self.reduce(own, weights))
        self.in_flight.append(Sent(self.tau, own, self.deltas[-1]))
        self.base, self.steps = self.x.clone(), 0

    def land(self) -> None:
        """Step 2: the oldest mean lands; the outer step and the merge."""
        self.landed = self.in_flight.pop(0)
        self.outer_step(self.landed.mean)
        self.restart()

    def restart(self) -> None:
        """The merge: where the workers continue, the outer step being taken."""
        since = self.x - self.base  # own local steps since the last sending, and since what has landed was sent:
        progress = since - sum((later.own for later in self.in_flight), torch.zeros_like(self.x))
        if self.merge == "restart":
            self.x.copy_(self.z.expand_as(self.x))
        else:
            self.x.copy_(self.z + progress)
        self.base = self.x - since

    def outer_step(self, delta: Tensor) -> None:
        new = delta / self.staleness(delta)
        self.m = self.clipped(min(1.0, self.beta * self.landed.tau / self.m_tau) * self.m + new)
        self.m_tau = self.landed.tau
        self.z = self.z - self.alpha * (self.beta * self.m + new if self.nesterov else self.m)
        self.outer.append(self.z)

    def clipped(self, m: Tensor) -> Tensor:
        """Step 6."""
        return m if self.phi is None else torch.where(m.abs() > self.phi, self.phi * m.sign(), m)

    def finish(self) -> None:
        """Applies what is pending, as the class's docstring says; all workers end with equal parameters."""
        landing = bool(self.in_flight) and not self.whole_round
        if landing:
            self.land()
        if self.steps and not (landing and self.merge == "restart"):
            self.send()
        while self.in_flight:
            self.land()
        self.x.copy_(self.z.expand_as(self.x))
        self.base, self.steps = self.x.clone(), 0
