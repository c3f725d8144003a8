"""The executable specification: Algorithm 1 of CO2 (arXiv 2401.16265), and our extensions of it.

All workers are in one process. A tensor of all workers has one row for each, an average over the workers is an average
over the rows, and an average on its way waits in a list. The code is as plain as the algorithm, and shares none with
the package, so that tests can compare the two. Run it in a notebook. Here two workers pull the one parameter from 4 to
0 and to 2, so that the model should reach 1:

    >>> import torch
    >>> from co2_training.testing.reference import Reference
    >>> ref = Reference(torch.full((2, 1), 4.0), tau=2, alpha=0.5, beta=0.0, gap="none", phi=None)
    >>> targets = torch.tensor([[0.0], [2.0]])
    >>> [round(x.item(), 2) for x in ref.run(lambda x, step: x - targets, lr=0.5, total=12)]
    [4.0, 4.0, 2.88, 1.75, 1.05, 0.77, 0.75]
    >>> ref.finish()
    >>> ref.x.tolist()
    [[0.8359375], [0.8359375]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def average(values: Tensor, weights: Tensor) -> Tensor:
    """Returns sum_i w_i values_i / sum_i w_i, [n], of values [workers, n]; 0 if all weights are 0."""
    return weights @ values / (weights.sum() or 1.0)


@dataclass
class Sent:
    """An all-reduce that a boundary started."""

    tau: int  # local steps of the round
    own: Tensor  # the difference d^i of each worker, [workers, n]
    average: Tensor  # Delta, [n]


@dataclass
class Reference:
    """All workers of CO2. Take local steps on the rows of `x` in place, and call `local_step` after each.

    Args:
        x: Parameters, [workers, n]. Row i is worker i. All rows start equal.
        tau: Local steps of a round. It may change between two rounds.
        alpha: Outer learning rate.
        beta: Outer momentum.
        gap: Staleness gap Lambda: "elementwise", "norm", or "none" for 1.
        phi: Clips the elements of the momentum to [-phi, phi]. None means no clipping.
        delay: Local steps from the start of an all-reduce to the use of its average. None or tau: a whole round, as in
            the paper. Each boundary sends, and then uses what the previous boundary sent. 0: a boundary uses what it
            sends. Between 0 and tau: workers do not restart at the boundary, and train on until the average is used.
        merge: Where worker i continues after an outer step. "restart": from x_{t+1} (the paper). "keep_local": from
            x_{t+1} plus its own progress since the all-reduce started, as in LOSCAR-SGD (arXiv 2605.20866), hivemind's
            delta rule and CoCoD-SGD.
        nesterov: Whether step 7 takes beta m_t + Delta / Lambda in place of m_t.
        weights: Weights of the workers in the next averages, [workers]. None: 1 for each. A worker with weight 0, or
            with a difference that is not finite, is excluded: it sends zeros, and continues from the outer iterate.
        reduce: From d [workers, n] and the weights to Delta [n]. A compression may replace the average.
        steps: Local steps since the last boundary. See `fragments`.

    Attributes:
        z, m: Outer iterate x_{t,0} and outer momentum, [n].
        base: x without each worker's local steps since it last sent, [workers, n].
        excluded: [workers], True if the last boundary excluded the worker.
        in_flight: All-reduces whose averages were not used yet, oldest first.
        outer: x_{0,0}, x_{1,0}, ..., [n] each.
        restarts: x after each boundary, [workers, n] each.
        deltas: The averages, [n] each.
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
    in_flight: list[Sent] = field(default_factory=list, init=False)
    outer: list[Tensor] = field(default_factory=list, init=False)
    restarts: list[Tensor] = field(default_factory=list, init=False)
    deltas: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.merge not in ("restart", "keep_local") or self.gap not in ("elementwise", "norm", "none"):
            raise ValueError(f"unknown merge {self.merge!r} or gap {self.gap!r}")
        if self.delay is not None and not 0 <= self.delay <= self.tau:
            raise ValueError(f"delay={self.delay}: between 0 and tau={self.tau}")
        self.z = self.x[0].clone()
        self.m, self.m_tau = torch.zeros_like(self.z), self.tau
        self.base = self.x.clone()
        self.excluded = torch.zeros_like(self.x[:, 0], dtype=torch.bool)
        self.outer.append(self.z)

    @property
    def whole_round(self) -> bool:
        """Whether averages are used one round late."""
        return self.delay is None or self.delay == self.tau

    def local_step(self) -> bool:
        """Step 1: counts one local step of all workers. Returns True if it ended the round."""
        self.steps += 1
        if self.in_flight and self.steps == self.delay and not self.whole_round:
            self.arrive()
        if self.steps < self.tau:
            return False
        self.boundary()
        return True

    def boundary(self) -> None:
        """Ends a round."""
        self.send()
        if self.delay == 0 or (self.whole_round and len(self.in_flight) == 2):
            self.arrive()
        elif self.whole_round:  # nothing was sent before round 0: x_{1,0} = x_{0,0}
            self.outer.append(self.z)
            self.go_on()
        out = self.excluded[:, None]
        self.x.copy_(torch.where(out, self.z, self.x))
        self.base.copy_(torch.where(out, self.x, self.base))
        self.restarts.append(self.x.clone())

    def send(self) -> None:
        """Step 3. d^i is x_{t,0} - x^i, or with keep_local minus worker i's local steps since it last sent."""
        own = (self.base if self.merge == "keep_local" else self.z) - self.x
        weights = torch.ones_like(own[:, 0]) if self.weights is None else self.weights.to(own)
        self.excluded = ~own.isfinite().all(dim=1) | (weights == 0)
        own = torch.where(self.excluded[:, None], 0.0, own)
        self.deltas.append(self.reduce(own, torch.where(self.excluded, 0.0, weights)))
        self.in_flight.append(Sent(self.tau, own, self.deltas[-1]))
        self.base, self.steps = self.x.clone(), 0

    def arrive(self) -> None:
        """Step 2, the outer step, and the merge, with the oldest average on its way."""
        self.outer_step(self.in_flight.pop(0))
        self.go_on()

    def outer_step(self, sent: Sent) -> None:
        """Steps 4 to 7. If the round had another tau than the last one, beta is scaled, to at most 1."""
        new = sent.average / self.staleness(sent.average)  # 4
        self.m = min(1.0, self.beta * sent.tau / self.m_tau) * self.m + new  # 5
        if self.phi is not None:  # 6
            self.m = torch.where(self.m.abs() > self.phi, self.phi * self.m.sign(), self.m)
        self.m_tau = sent.tau
        self.z = self.z - self.alpha * (self.beta * self.m + new if self.nesterov else self.m)  # 7
        self.outer.append(self.z)

    def staleness(self, delta: Tensor) -> Tensor | float:
        """Step 4: Lambda_t, from the last outer movement x_{t,0} - x_{t-1,0} and Delta."""
        moved = self.outer[-1] - self.outer[-2] if len(self.outer) > 1 else torch.zeros_like(delta)
        if self.gap == "elementwise":
            return 1 + moved.abs() / (delta.pow(2).mean().sqrt() + 1e-12)
        return 1 + moved.norm() / (delta.norm() + 1e-12) if self.gap == "norm" else 1.0

    def go_on(self) -> None:
        """The merge: the workers continue from the new outer iterate."""
        since = self.x - self.base  # local steps since the last all-reduce started
        if self.merge == "restart":
            self.x.copy_(self.z.expand_as(self.x))
        else:  # local steps since the all-reduce started that has arrived
            self.x.copy_(self.z + since - sum((later.own for later in self.in_flight), torch.zeros_like(self.x)))
        self.base = self.x - since

    def finish(self) -> None:
        """Uses what is on its way, and the local steps that were not sent. All rows of x are then equal.

        With 0 < delay < tau, the average on its way is used before the unsent steps are sent. With restart, these steps
        are lost, as in every round. With keep_local, every local step is in exactly one average.
        """
        arriving = bool(self.in_flight) and not self.whole_round
        if arriving:
            self.arrive()
        if self.steps and not (arriving and self.merge == "restart"):
            self.send()
        while self.in_flight:
            self.arrive()
        self.x.copy_(self.z.expand_as(self.x))
        self.base, self.steps = self.x.clone(), 0

    def run(self, gradient: Callable[[Tensor, int], Tensor], lr: float, total: int) -> list[Tensor]:
        """Takes `total` steps of SGD with gradient(x [workers, n], step) -> [workers, n]. Returns `outer`."""
        for step in range(total):
            self.x.sub_(lr * gradient(self.x, step))
            self.local_step()
        return self.outer


def fragments(x: Tensor, parts: Sequence[Any], tau: int, **settings: Any) -> list[Reference]:
    """Fragments in turn: each part of the parameters is a Reference of its own, and part i of F sends tau i / F steps
    after part 0. After each local step, call `local_step` of all.

    Args:
        x: Parameters, [workers, n].
        parts: The columns of each part. A slice keeps x and its part one tensor, and a list of indices copies.
        tau: As for Reference.
        **settings: Other arguments of Reference.
    """
    starts = [(tau - tau * i // len(parts)) % tau for i in range(len(parts))]
    return [Reference(x[:, part], tau, steps=start, **settings) for part, start in zip(parts, starts, strict=True)]
