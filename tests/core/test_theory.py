"""The laws of docs/theory.md: predicted by the formulas of tests/quadratic.py, and seen when the reference trains."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core import CO2Config, UserError
from core.adaptive.config import largest_outer_lr
from tests import quadratic
from tests.quadratic import Array, Quadratic, jury, largest, late_with_momentum, spread_with_momentum
from tests.reference import LateReference


def train(x: Tensor, gradient: Callable[[Tensor], Tensor], rounds: int, see: Callable[[LateReference], Any], **o: Any):
    """What `see` finds at the end of each round, before the workers send. SGD with learning rate 1."""
    momentum, tau = o.pop("momentum", 0.0), o["tau"]
    r, found, velocity = LateReference(x, **{"gap": "none", "phi": None, "beta": 0.0} | o), [], torch.zeros_like(x)
    r.z = x.mean(0)
    for step in range(1, rounds * tau + 1):
        velocity.mul_(momentum).add_(gradient(x))
        x.sub_(velocity)
        if step % tau == 0:
            found.append(see(r))
        r.local_step()
        for history in (r.restarts, r.deltas, r.outer):
            history.clear()
    return found


def growth(start: Tensor, q: Array, rounds: int = 240, **options: Any) -> Array:
    """The factor of the error in a round, in the end, [n]. start: [workers, n]; two opposite workers have mean 0, and
    the factor is that of their difference."""
    h = torch.tensor(1 - q)
    size = lambda r: torch.stack([r.x[0].abs(), r.z.abs(), r.m.abs()]).amax(0)  # noqa: E731
    sizes = train(start.clone(), lambda x: h * x, rounds, size, **options)
    late, early = (torch.stack(sizes[end - 20 : end]).amax(0).numpy() for end in (rounds, rounds // 2))
    known = (late > 1e-250) & (early > 1e-250)
    return np.where(known, late / np.where(known, early, 1.0), 0.0) ** (2 / rounds)


def variances(q: float, replicas: int = 1500, workers: int = 4, **options: Any) -> tuple[float, float]:
    """Of the outer iterate, and of what the workers send around its mean, in the end. Local noise has variance 1."""
    generator = torch.Generator().manual_seed(7)
    noise = lambda x: (1 - q) * x + torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731

    def see(r: LateReference) -> tuple[float, float]:
        sent = r.x - r.base if r.merge == "keep" else r.x
        return float(r.z.square().mean()), float((sent - sent.mean(0)).square().mean())

    found = train(torch.zeros(workers, replicas).double(), noise, 160, see, **options)
    outer, apart = np.mean(found[60:], 0)
    return float(outer), float(apart)


def check_settles(merge: str, delay: int) -> None:
    """The polynomial says which settings settle; training agrees where the factor is not within 1 % of 1."""
    shares = (0.25, 0.5, 0.75) if merge == "mix" else (1.0,)
    grid = np.meshgrid((-0.8, 0.3, 0.9), (0.3, 1.0, 1.7), shares, indexing="ij")
    q, alpha, share = (values.reshape(-1) for values in grid)
    for beta in (0.2, 0.6):
        options: dict[str, Any] = {"alpha": torch.tensor(alpha), "beta": beta, "kappa": torch.tensor(share)}
        seen = growth(torch.ones(1, len(q)).double(), q, merge=merge, tau=5, delay=delay, **options) < 1
        told = [Quadratic(merge, a, 5, delay, k, beta, s) for a, k, s in zip(q, alpha, share, strict=True)]
        wanted = np.array([jury(one.polynomial()) for one in told])
        near = np.array([abs(one.radius - 1) < 0.01 for one in told])
        assert ((seen == wanted) | near).all(), (merge, delay, beta)


@pytest.mark.parametrize("delay", [0, 3, 5])
@pytest.mark.parametrize("merge", ["outer", "mix", "keep"])
def test_which_settings_settle(merge: str, delay: int):
    check_settles(merge, delay)


def test_the_check_fails_if_a_formula_is_wrong(monkeypatch: pytest.MonkeyPatch):
    polynomial = Quadratic.polynomial
    monkeypatch.setattr(Quadratic, "polynomial", lambda self: polynomial(self) + np.eye(len(polynomial(self)))[-1] / 3)
    with pytest.raises(AssertionError):
        check_settles("keep", 3)


def accepted(merge: Any, delay: int, alpha: float, beta: float) -> bool:
    late: Any = "boundary" if delay == 12 else delay
    try:
        CO2Config(12, merge=merge, delay=late, outer_lr=alpha, outer_momentum=beta, gap="none").check_stable()
    except UserError:
        return False
    return True


@pytest.mark.parametrize(("merge", "delay"), [("outer", 12), ("mix", 12), ("mix", 5), ("outer", 0), ("keep", 9)])
def test_the_package_refuses_what_is_above_the_largest_outer_learning_rate(merge: Any, delay: int):
    for beta in (0.0, 0.6):
        limit = largest(merge, 12, delay, beta)
        assert [accepted(merge, delay, limit * by, beta) for by in (0.998, 1.002)] == [True, False]
        if delay < 12:
            assert largest_outer_lr(merge, beta, delay / 12) == pytest.approx(limit, 1e-3)


@pytest.mark.parametrize(("tau", "delay"), [(12, 1), (12, 4), (24, 9), (24, 24)])
def test_momentum_of_the_inner_optimizer_drives_workers_apart(tau: int, delay: int):
    lh = np.geomspace(1e-3, 1.0, 750)
    factors = spread_with_momentum(0.9, lh, tau, delay)
    worst = 1 - lh[[factors.argmax()]]
    opposite = torch.tensor([[1.0], [-1.0]]).double()
    seen = growth(opposite, worst, merge="keep", tau=tau, delay=delay, momentum=0.9)[0]
    assert abs(seen - factors.max()) < 0.02
    assert late_with_momentum(0.9, lh, tau, 0.7, 0.2).max() > 0


@pytest.mark.parametrize(("delay", "q"), [(0, 0.9), (4, 0.8), (8, 0.7)])
def test_how_far_the_workers_are_apart(delay: int, q: float):
    told = Quadratic("keep", q, 8, delay).apart(4)
    assert variances(q, merge="keep", tau=8, delay=delay)[1] == pytest.approx(told, rel=0.02)


@pytest.mark.parametrize(("merge", "delay", "beta"), [("outer", 8, 0.2), ("keep", 3, 0.5), ("keep", 8, 0.3)])
def test_the_noise_that_a_late_mean_leaves(merge: str, delay: int, beta: float):
    """The excess loss on a noisy quadratic is h / 2 times this variance."""
    alpha = 0.5 if merge == "outer" else 1.0
    seen, _ = variances(0.8, merge=merge, tau=8, delay=delay, alpha=alpha, beta=beta)
    assert seen == pytest.approx(Quadratic(merge, 0.8, 8, delay, alpha, beta).variance(4), rel=0.02)
    assert quadratic.added(2, 0.5) == 1.25


@pytest.mark.slow
@pytest.mark.parametrize(("merge", "delay"), [("keep", 0), ("keep", 2), ("keep", 8), ("outer", 8)])
def test_the_squared_gradient_falls_as_one_over_the_root_of_workers_and_steps(merge: str, delay: int):
    """On sum_j 0.1 x_j^2 + 0.4 (1 - cos 2 x_j), x in R^20, learning rate 0.39 sqrt(workers / steps)."""

    def squared(workers: int, steps: int) -> float:
        rng, lr = torch.Generator().manual_seed(1000 * workers + steps), 0.39 * (workers / steps) ** 0.5
        drawn = lambda n: torch.randn(n, 20 * 24, generator=rng).double()  # noqa: E731
        of = lambda x: 0.2 * x + 0.8 * torch.sin(2 * x)  # noqa: E731
        seen: list[float] = []

        def gradient(x: Tensor) -> Tensor:
            seen.append(float(of(x.mean(0)).square().view(-1, 20).sum(1).mean()))
            return lr * (of(x) + drawn(workers))

        train(
            (1.5 * drawn(1)).repeat(workers, 1), gradient, steps // 8, lambda _: None, merge=merge, tau=8, delay=delay
        )
        return float(np.mean(seen))

    for cases in (((1, 4000), (4, 4000), (16, 4000)), ((4, 1000), (4, 4000), (4, 8000))):
        sizes = [max(case[i] / cases[0][i] for i in (0, 1)) for case in cases]
        slope = np.polyfit(np.log(sizes), np.log([squared(*case) for case in cases]), 1)[0]
        assert slope == pytest.approx(-0.5, abs=0.1)
