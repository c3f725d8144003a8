"""What docs/theory.md derives for f = h x^2 / 2, as formulas; tests/core/test_reference.py trains and compares.

One local step leaves the share q = 1 - lr h of the error, a round of tau a = q^tau = 1 - rho, and the steps of a round
behind the merge b = q^(tau - delay). k = outer_lr / Lambda, Lambda a constant; beta: outer momentum.
delay = tau is the paper's whole round, 0 is blocking. nesterov: whether the outer step is Nesterov's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratic:
    """A merge on one direction."""

    merge: str
    q: float
    tau: int
    delay: int
    k: float = 1.0
    beta: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        assert self.merge in ("restart", "keep_local") and 0 <= self.delay <= self.tau

    @property
    def left(self) -> tuple[float, float]:
        """a and b."""
        return self.q**self.tau, self.q ** (self.tau - self.delay)

    @property
    def whole(self) -> bool:
        return self.delay == self.tau

    @property
    def spread(self) -> float:
        """By what the workers' differences from their mean are multiplied in a round, without noise."""
        a, b = self.left
        return a - b if self.merge == "keep_local" else 0.0

    def polynomial(self) -> Array:
        """The mean's characteristic polynomial, highest power first; roots at 0 are left out."""
        (a, b), k, spread, late = self.left, self.k, self.spread, self.whole and self.merge != "keep_local"
        free = np.poly([1.0, self.beta] + ([spread] if self.merge != "restart" else []))
        # what the difference is of the outer iterate
        sent = [1 - b, -spread] if self.merge == "keep_local" else [1 - (a if late else b)]
        pulled = k * np.array(sent)
        if self.nesterov:  # a step of (1 + beta) z - beta in place of z, and a root at 0 more if that is late
            return np.polyadd(
                np.polymul(free, [1, 0] if late else [1]), np.polymul([1 + self.beta, -self.beta], pulled)
            )
        return np.polyadd(free, pulled if late else np.polymul(pulled, [1, 0]))

    @property
    def radius(self) -> float:
        """By what the mean's error is multiplied in a round, in the end."""
        return float(np.abs(np.roots(self.polynomial())).max())

    def round_map(self) -> tuple[Array, Array]:
        """(A, Q) of the mean's state from round to round, the outer iterate first: s' = A s + noise of covariance Q for
        one worker and local steps with noise of variance 1. outer_lr = k, Lambda = 1."""
        (a, b), k, beta = self.left, self.k, self.beta
        if self.merge == "keep_local":  # z, m, y: the parameters when they are sent, or with a whole round at its start
            z, m = np.array([1 - k, -k * beta, k]), np.array([1.0, beta, -1.0])
            return np.array([z, m, b * z + np.array([0, 0, a - b])]), _noise([0, 0, 1], self.tau, self.q)
        if self.whole:  # z, m, the difference on its way
            return np.array([[1, -k * beta, -k], [0, beta, 1], [1 - a, 0, 0]]), _noise([0, 0, -1], self.tau, self.q)
        rows = np.array([[1 - k * (1 - b), -k * beta], [1 - b, beta]])
        return rows, _noise([k, -1], self.tau - self.delay, self.q)

    def variance(self, workers: int) -> float:
        """Of the outer iterate in the end, under local noise of variance 1: Lyapunov's equation for the round's map."""
        rows, noise = self.round_map()
        equation = np.eye(rows.size) - np.kron(rows, rows)
        return float(np.linalg.solve(equation, noise.ravel() / workers)[0])

    def apart(self, workers: int) -> float:
        """mean_i (x^i - mean)^2 in the end, under local noise of variance 1, when the workers send; with keep_local
        and a whole round when they start. For keep_local and restart."""
        assert self.merge == "keep_local" or self.delay in (0, self.tau), "else not all of a round's steps are sent"
        return (1 - 1 / workers) * added(self.tau, self.q) / (1 - self.spread**2)


def added(steps: int, q: float) -> float:
    """The variance that so many steps x <- q x + noise of variance 1 add."""
    return float(sum(q ** (2 * j) for j in range(steps)))


def _noise(where: Sequence[float], steps: int, q: float) -> Array:
    return np.outer(where, where) * added(steps, q)


def jury(p: Array) -> bool:
    """Whether all roots lie within the unit circle; of degree 2 or 3, highest power first, the first being 1.

    The limits of docs/theory.md follow, with its symbols. keep_local: P(-1) < 0 is k (1-b-v) < 2 (1+beta) (1-v), and
    the third condition is the page's second. The quotient (1+v) (1+beta v) / v falls to 2 (1+beta) at v = 1.
    """
    c = p[::-1]
    if len(p) == 3:
        return bool(abs(c[0]) < 1 and abs(c[1]) < 1 + c[0])
    ends = p.sum() > 0 and 1 - c[2] + c[1] - c[0] > 0
    return bool(ends and abs(c[0]) < 1 and abs(c[1] - c[0] * c[2]) < 1 - c[0] ** 2)


def largest(merge: str, tau: int, delay: int, beta: float, nesterov: bool = False) -> float:
    """The outer learning rate below which every direction without overshoot settles, by bisection."""

    def settles(q: float, k: float) -> bool:
        one = Quadratic(merge, q, tau, delay, k, beta, nesterov=nesterov)
        return one.radius < 1 if nesterov else jury(one.polynomial())

    found = 8.0
    for q in np.random.default_rng(0).permutation(np.linspace(0, 0.9999, 300)) ** (1 / tau):
        if not settles(q, found - 1e-5):  # few directions are worse than all before, in this order
            low, high = 0.0, found
            while high - low > 1e-5:
                middle = (low + high) / 2
                low, high = (middle, high) if settles(q, middle) else (low, middle)
            found = low
    return found


def momentum_inside(mu: float, lh: Array, steps: int) -> Array:
    """[n, 2, 2]: what so many local steps of SGD with momentum make of (error, velocity); lh: lr h, [n]."""
    one = np.stack([np.stack([1 - lh, np.full_like(lh, -mu)], -1), np.stack([lh, np.full_like(lh, mu)], -1)], -2)
    return np.linalg.matrix_power(one, steps)


def spread_with_momentum(mu: float, lh: Array, tau: int, delay: int) -> Array:
    """keep_local: by what the differences of the workers' errors and velocities are multiplied in a round, [n]."""
    progress = momentum_inside(mu, lh, delay) - np.diag([1.0, 0.0])
    return np.abs(np.linalg.eigvals(momentum_inside(mu, lh, tau - delay) @ progress)).max(-1)
