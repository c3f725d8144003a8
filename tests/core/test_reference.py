"""The executable specification by hand, where it settles, and the laws of docs/theory.md that it follows."""

import doctest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core import CO2Config, UserError
from core.outer import largest_outer_lr
from core.testing import reference
from core.testing.reference import Reference, fragments
from tests import quadratic
from tests.quadratic import Array, Quadratic, jury, largest, spread_with_momentum


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_hand(moves: Sequence[Any], **options: Any) -> Reference:
    """Two workers from 0, which each step moves by minus what is given, for one or two parameters."""
    ref = Reference(torch.zeros_like(rows(moves[0])), **{**PLAIN, **options})
    for displacement in moves:
        ref.x -= rows(displacement)
        ref.local_step()
    return ref


def rows(displacement: Any) -> Tensor:
    return torch.tensor(displacement, dtype=torch.float64).view(2, -1)


PLAIN = {"tau": 1, "alpha": 1.0, "beta": 0.0, "gap": "none", "phi": None}
MOVES = [(1, 3), (2, 6), (1, 1), (0, 0)]  # Delta is 2, 4, 1, 0
BY_HAND: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    # an average is a round late: x_{1,0} = x_{0,0}, and x moves by -2, -4, -1
    "no gap": ({}, MOVES, [0, 0, -2, -6, -7]),
    "outer learning rate": ({"alpha": 0.5}, MOVES, [0, 0, -1, -3, -3.5]),
    # Delta is (1 + 0 + 3 + 2) / 2, then (1 + 1 + 1 + 1) / 2
    "two steps": ({"tau": 2}, [(1, 3), (0, 2), (1, 1), (1, 1), (0, 0), (0, 0)], [0, 0, -3, -5]),
    # m is 2, then 2 / 2 + 4 = 5, then 5 / 2 + 1 = 3.5
    "momentum": ({"beta": 0.5}, MOVES, [0, 0, -2, -7, -10.5]),
    # m is 2, then 5, clipped to 3, then 3 / 2 + 1 = 2.5
    "clip": ({"beta": 0.5, "phi": 3.0}, MOVES, [0, 0, -2, -5, -7.5]),
    # m as with momentum; x moves by -(m / 2 + Delta): 2 / 2 + 2, 5 / 2 + 4, 3.5 / 2 + 1
    "Nesterov": ({"beta": 0.5, "nesterov": True}, MOVES, [0, 0, -3, -9.5, -12.25]),
    # Delta is 2, 2, 1. Lambda is 1, then 1 + |-2| / 2 = 2, then 1 + |-1| / 1 = 2
    "norm": ({"gap": "norm"}, [(1, 3), (1, 3), (0, 2), (0, 0)], [0, 0, -2, -3, -3.5]),
    # Delta is (0, 5), then (3, 4) of norm 5. Lambda is 1, then 1 + 5 / 5 = 2 for both parameters
    "norm, two": (
        {"gap": "norm"},
        [((0, 4), (0, 6)), ((2, 4), (4, 4)), ((0, 0), (0, 0))],
        [(0, 0), (0, 0), (0, -5), (-1.5, -7)],
    ),
    # Delta is (0, 5), then (1, 7) of RMS 5. Lambda is 1, then 1 + 0 / 5 = 1 and 1 + 5 / 5 = 2
    "elementwise, two": (
        {"gap": "elementwise"},
        [((0, 4), (0, 6)), ((1, 5), (1, 9)), ((0, 0), (0, 0))],
        [(0, 0), (0, 0), (0, -5), (-1, -8.5)],
    ),
}


@pytest.mark.parametrize(("options", "moves", "outer"), BY_HAND.values(), ids=BY_HAND)
def test_the_steps_of_the_paper_by_hand(options: dict[str, Any], moves: list[Any], outer: list[Any]):
    ref = by_hand(moves, **options)
    expected = torch.tensor(outer, dtype=torch.float64).view(len(outer), -1)
    torch.testing.assert_close(torch.stack(ref.outer), expected, rtol=1e-9, atol=1e-9)
    assert (ref.x == ref.outer[-1]).all()


def test_fragments_by_hand():
    """Every step moves both parameters by -1 and -3. A round has two steps, and an average arrives one step late.

    Part 1 first sends after step 1, from which its average of 2 arrives in step 2: x = -2 and each worker's own step.
    """
    x = torch.zeros(2, 2, dtype=torch.float64)
    settings = PLAIN | {"tau": 2, "delay": 1, "merge": "keep_local"}
    parts = fragments(x, [slice(0, 1), slice(1, 2)], **settings)
    seen = []
    for _ in range(4):
        x -= rows((1, 1, 3, 3))
        for part in parts:
            part.local_step()
        seen.append(x.clone())
    # after step 3, part 0's average of 4 has arrived: -4, and -1 or -3 for step 3. After step 4, part 1's second
    # average of 4 has arrived: -2 - 4, and -1 or -3 for step 4
    expected = [(-1, -1, -3, -3), (-2, -3, -6, -5), (-5, -4, -7, -8), (-6, -7, -10, -9)]
    assert [rows(step).equal(found) for step, found in zip(expected, seen, strict=True)] == [True] * 4
    for part in parts:
        part.finish()
    assert (x == -8).all()  # four steps of 2 on average


def test_momentum_follows_tau_by_hand():
    """Every step moves by -1, so Delta is tau. m is 4, 4/2 x 2/4 + 2, 3/2 + 2, and 3.5 + 8, as beta is at most 1."""
    ref = Reference(torch.zeros(1, 1, dtype=torch.float64), **{**PLAIN, "beta": 0.5, "delay": 0})
    for ref.tau in (4, 2, 2, 8):
        ref.run(lambda x, _: torch.ones_like(x), 1.0, ref.tau)
    assert torch.cat(ref.outer).tolist() == [0, -4, -7, -10.5, -22]


def test_weights_and_an_excluded_worker_by_hand():
    """Delta is 2, then 2 of worker 0 alone. Worker 1 continues from the outer iterate of -2."""
    ref = by_hand([(1, 3), (2, float("nan"))], merge="keep_local")
    assert ref.x[:, 0].tolist() == [-4, -2] and ref.excluded.tolist() == [False, True]
    ref.finish()
    assert ref.x[:, 0].tolist() == [-4, -4]
    ref = by_hand([(1, 3), (1, float("nan"))], tau=2, delay=1, merge="keep_local")
    assert ref.x[:, 0].tolist() == [-2, 0]  # nothing has arrived
    ref = by_hand([(1, 3)], delay=0, weights=vector(1, 3))  # (1 + 3 x 3) / 4
    assert ref.x[:, 0].tolist() == [-2.5, -2.5]


def test_its_example_runs():
    text = (reference.__doc__ or "").replace("co2_training", "core")
    example = doctest.DocTestParser().get_doctest(text, {}, "reference", None, None)
    assert len(example.examples) == 7 and doctest.DocTestRunner().run(example).failed == 0


def run_quadratic(rho: Tensor, rounds: int, beta: float, alpha: float, gap: str = "none") -> list[Tensor]:
    """Loss x^2/2 in each direction with tau = 1 and the learning rate rho: one local step removes the share rho."""
    x = torch.ones(1, len(rho), dtype=torch.float64)
    return Reference(x, 1, alpha, beta, gap, phi=None).run(lambda rows, _: rows * rho, 1.0, rounds)


@pytest.mark.parametrize(
    ("options", "steps", "ends", "end"),
    [
        # finished while the mean of (3, 9) is on its way, a step after it was sent: with one's own progress whole
        ({"tau": 3, "delay": 2, "merge": "keep_local"}, [(1, 3)] * 4, [-4, -12], -8),
        # z is 0, -2, -6; each keeps the round that it has just sent
        ({"tau": 1, "merge": "keep_local"}, [(1, 3)], [-1, -3], -2),
        ({"tau": 1, "merge": "keep_local"}, [(1, 3), (2, 6)], [-4, -8], -6),
        ({"tau": 1, "merge": "keep_local"}, [(1, 3), (2, 6), (1, 1)], [-7, -7], -7),
        # z = -4, and a step of one's own, then another, which are sent
        ({"tau": 2, "delay": 1, "merge": "keep_local"}, [(1, 3)] * 3, [-5, -7], -6),
        ({"tau": 2, "delay": 1, "merge": "keep_local"}, [(1, 3)] * 4, [-6, -10], -8),
    ],
)
def test_merges_by_hand(options: dict[str, Any], steps: list[tuple[float, float]], ends: list[float], end: float):
    ref = by_hand(steps, **options)
    assert ref.x[:, 0].tolist() == ends
    ref.finish()
    assert ref.x[:, 0].tolist() == [end, end]


def test_merge_and_gap_combine():
    """The same, with the norm gap: Lambda is 1, then 1 + 4/4 from the last outer movement."""
    ref = by_hand([(1, 3)] * 5, tau=2, delay=1, merge="keep_local", gap="norm")
    torch.testing.assert_close(torch.cat(ref.outer), vector(0, -4, -6))
    torch.testing.assert_close(ref.x[:, 0], vector(-7, -9))


def test_outer_on_arrival_gives_up_the_steps_under_the_mean():
    ref = by_hand([(1, 3)] * 4, tau=3, delay=1)
    assert ref.x[:, 0].tolist() == [-6.0, -6.0]
    for delay, end in ((1, -6.0), (2, -6.0), (3, -8.0), (0, -8.0)):  # a whole round late they are the next difference
        ref = by_hand([(1, 3)] * 4, tau=3, delay=delay)
        ref.finish()
        assert ref.x[:, 0].tolist() == [end, end]


def progress(step: int, workers: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(workers, 4, generator=generator, dtype=torch.float64)


def moved(total: int, workers: int = 3, **options: Any) -> tuple[Reference, list[Tensor]]:
    """The method, and x after each step, with progress that does not depend on x."""
    ref = Reference(torch.zeros(workers, 4, dtype=torch.float64), **{**PLAIN, **options})
    rows = []
    for step in range(total):
        ref.x += progress(step, workers)
        ref.local_step()
        rows.append(ref.x.clone())
    return ref, rows


@pytest.mark.parametrize("delay", [0, 1, 2, 3, None])
def test_with_keep_the_mean_over_the_workers_is_not_late_and_nothing_is_lost(delay: int | None):
    """alpha = 1, beta = 0: every local step enters the mean at once, and exactly one Delta by the end."""
    for total in range(1, 12):
        ref, rows = moved(total, tau=3, delay=delay, merge="keep_local")
        expected = torch.stack([progress(step) for step in range(total)]).sum(0).mean(0)
        torch.testing.assert_close(rows[-1].mean(0), expected, rtol=1e-12, atol=1e-12)
        ref.finish()
        torch.testing.assert_close(ref.x, expected.expand(3, -1), rtol=1e-12, atol=1e-12)


def test_with_keep_only_the_momentum_is_late():
    """ybar_{t+1} = ybar_t + pbar_t + beta m_{t-1}, m_t = beta m_{t-1} + pbar_{t-1}; SlowMo has beta m_t there."""
    beta = 0.5
    ref, _ = moved(24, tau=3, merge="keep_local", beta=beta)
    y, momentum = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for t, restart in enumerate(ref.restarts):
        y = y - ref.deltas[t] + beta * momentum
        momentum = beta * momentum - (ref.deltas[t - 1] if t else 0.0)
        torch.testing.assert_close(restart.mean(0), y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("merge", ["restart", "keep_local"])
def test_without_delay_it_is_blocking_averaging_with_momentum(merge: str):
    _, rows = moved(12, tau=3, delay=0, merge=merge, alpha=0.7, beta=0.5)
    x, m = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    start = x[0]
    for step in range(12):
        x = x + progress(step)
        if step % 3 == 2:
            m = 0.5 * m + start - x.mean(0)
            start = start - 0.7 * m
            x = start.expand(3, -1)
        torch.testing.assert_close(rows[step], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("merge", "delay"), [("restart", 0), ("keep_local", 0), ("keep_local", 2), ("keep_local", None)]
)
def test_a_lone_worker_that_gives_nothing_up_is_its_inner_optimiser(merge: str, delay: int | None):
    _, rows = moved(10, workers=1, tau=4, delay=delay, merge=merge)
    expected = torch.stack([progress(step, 1) for step in range(10)]).cumsum(0)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-12, atol=1e-12)


def test_a_delay_of_tau_is_a_whole_round():
    for merge in ("restart", "keep_local"):
        (a, rows), (b, same) = (moved(11, tau=3, merge=merge, gap="norm", delay=d) for d in (None, 3))
        a.finish(), b.finish()
        assert torch.equal(torch.stack(rows), torch.stack(same)) and torch.equal(a.x, b.x)


SPECTRUM = torch.linspace(0.05, 1.0, 20, dtype=torch.float64)  # some directions solved, most not


@pytest.mark.parametrize(("gap", "settles"), [("none", False), ("norm", False), ("elementwise", True)])
def test_the_elementwise_penalty_settles_what_diverges_without(gap: str, settles: bool):
    """beta = 1/2, alpha = 1. A scalar penalty damps the solved directions too little, as paper.md measured."""
    last = run_quadratic(SPECTRUM, 600, 0.5, 1.0, gap)[-1].abs().max()
    assert (last < 0.2) if settles else (last > 1e6)


@pytest.mark.parametrize(("beta", "settles"), [(0.5, False), (0.3, True)])
def test_the_penalty_has_a_limit_where_every_direction_is_solved(beta: float, settles: bool):
    """With rho = 1 everywhere the RMS grows with the iterate, and beta = 1/2, alpha = 1 diverges, only slower."""
    with_penalty = run_quadratic(vector(1.0), 300, beta, 1.0, "elementwise")[-1].abs().item()
    without = run_quadratic(vector(1.0), 300, beta, 1.0)[-1].abs().item()
    assert (with_penalty < 1e-2) if settles else (with_penalty > 1e2)
    assert without > 1e6 * with_penalty


def train(x: Tensor, gradient: Callable[[Tensor], Tensor], rounds: int, see: Callable[[Reference], Any], **o: Any):
    """What `see` finds at the end of each round, before the workers send. SGD with learning rate 1."""
    momentum, tau = o.pop("momentum", 0.0), o["tau"]
    r, found, velocity = Reference(x, **{"gap": "none", "phi": None, "beta": 0.0} | o), [], torch.zeros_like(x)
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

    def see(r: Reference) -> tuple[float, float]:
        sent = r.x - r.base if r.merge == "keep_local" else r.x
        return float(r.z.square().mean()), float((sent - sent.mean(0)).square().mean())

    found = train(torch.zeros(workers, replicas).double(), noise, 160, see, **options)
    outer, apart = np.mean(found[60:], 0)
    return float(outer), float(apart)


def check_settles(merge: str, delay: int, nesterov: bool = False) -> None:
    """The polynomial says which settings settle; training agrees where the factor is not within 1 % of 1."""
    grid = np.meshgrid((-0.8, 0.3, 0.9), (0.3, 1.0, 1.7), indexing="ij")
    q, alpha = (values.reshape(-1) for values in grid)
    for beta in (0.2, 0.6):
        options: dict[str, Any] = {"alpha": torch.tensor(alpha), "beta": beta, "nesterov": nesterov}
        seen = growth(torch.ones(1, len(q)).double(), q, merge=merge, tau=5, delay=delay, **options) < 1
        told = [Quadratic(merge, a, 5, delay, k, beta, nesterov) for a, k in zip(q, alpha, strict=True)]
        wanted = np.array([one.radius < 1 if nesterov else jury(one.polynomial()) for one in told])
        near = np.array([abs(one.radius - 1) < 0.01 for one in told])
        assert ((seen == wanted) | near).all(), (merge, delay, beta)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("delay", [0, 3, 5])
@pytest.mark.parametrize("merge", ["restart", "keep_local"])
def test_which_settings_settle(merge: str, delay: int, nesterov: bool):
    check_settles(merge, delay, nesterov)


def accepted(merge: Any, delay: int, alpha: float, beta: float, nesterov: bool) -> bool:
    late: Any = "boundary" if delay == 12 else delay
    settings: dict[str, Any] = {"outer_lr": alpha, "outer_momentum": beta, "nesterov": nesterov, "gap": "none"}
    try:
        CO2Config(12, merge=merge, delay=late, **settings).check_stable()
    except UserError:
        return False
    return True


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("merge", "delay"),
    [("restart", 12), ("restart", 0), ("keep_local", 0), ("keep_local", 3), ("keep_local", 9), ("keep_local", 12)],
)
def test_the_package_refuses_what_is_above_the_largest_outer_learning_rate(merge: Any, delay: int, nesterov: bool):
    for beta in (0.3, 0.9) if nesterov else (0.0, 0.3, 0.6, 0.9):  # at 0 Nesterov's step is the plain one
        limit = largest(merge, 12, delay, beta, nesterov)
        found = [accepted(merge, delay, limit * by, beta, nesterov) for by in (0.998, 1.002)]
        assert found == [True, False], (beta, limit)
        assert largest_outer_lr(merge, beta, delay / 12, nesterov) == pytest.approx(limit, 1e-3)


@pytest.mark.parametrize(("tau", "delay"), [(12, 1), (12, 4), (24, 9), (24, 24)])
def test_momentum_of_the_inner_optimizer_drives_workers_apart(tau: int, delay: int):
    lh = np.geomspace(1e-3, 1.0, 750)
    factors = spread_with_momentum(0.9, lh, tau, delay)
    worst = 1 - lh[[factors.argmax()]]
    opposite = torch.tensor([[1.0], [-1.0]]).double()
    seen = growth(opposite, worst, merge="keep_local", tau=tau, delay=delay, momentum=0.9)[0]
    assert abs(seen - factors.max()) < 0.02


@pytest.mark.parametrize(("delay", "q"), [(0, 0.9), (4, 0.8), (8, 0.7)])
def test_how_far_the_workers_are_apart(delay: int, q: float):
    told = Quadratic("keep_local", q, 8, delay).apart(4)
    assert variances(q, merge="keep_local", tau=8, delay=delay)[1] == pytest.approx(told, rel=0.02)


@pytest.mark.parametrize(
    ("merge", "delay", "beta"), [("restart", 8, 0.2), ("keep_local", 3, 0.5), ("keep_local", 8, 0.3)]
)
def test_the_noise_that_a_late_mean_leaves(merge: str, delay: int, beta: float):
    """The excess loss on a noisy quadratic is h / 2 times this variance."""
    alpha = 0.5 if merge == "restart" else 1.0
    seen, _ = variances(0.8, merge=merge, tau=8, delay=delay, alpha=alpha, beta=beta)
    assert seen == pytest.approx(Quadratic(merge, 0.8, 8, delay, alpha, beta).variance(4), rel=0.02)
    assert quadratic.added(2, 0.5) == 1.25


@pytest.mark.slow
@pytest.mark.parametrize(("merge", "delay"), [("keep_local", 0), ("keep_local", 2), ("keep_local", 8), ("restart", 8)])
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
