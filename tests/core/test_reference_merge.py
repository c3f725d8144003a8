"""The reference with other merges and delays: what they mean, and where they settle."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.test_reference import run_quadratic, vector
from tests.reference import LateReference, Reference

PLAIN = {"alpha": 1.0, "beta": 0.0, "gap": "none", "phi": None}


def by_hand(steps: list[tuple[float, float]], **options: Any) -> LateReference:
    """Two workers with one element each, from 0, moved by minus what is given."""
    ref = LateReference(torch.zeros(2, 1, dtype=torch.float64), **{**PLAIN, **options})
    for displacement in steps:
        ref.x -= vector(*displacement)[:, None]
        ref.local_step()
    return ref


ON_ARRIVAL = {"tau": 3, "delay": 1, "merge": "mix", "kappa": 0.25}


@pytest.mark.parametrize(
    ("options", "steps", "rows", "end"),
    [
        # a whole round late: own (1, 3), then 0 - (-2.5, -7.5), while z takes the first mean, 2; at the end the mean of
        # (2.5, 7.5), too: the mixed share is no progress
        ({"tau": 1, "merge": "mix"}, [(1, 3)], [-0.5, -1.5], -2),
        ({"tau": 1, "merge": "mix"}, [(1, 3), (2, 6)], [-2.25, -4.75], -7),
        # workers do not restart at the sending; then z = -6, a quarter of it and three of (-4, -12); their mean
        (ON_ARRIVAL, [(1, 3)] * 3, [-3, -9], -6),
        (ON_ARRIVAL, [(1, 3)] * 4, [-4.5, -10.5], -7.5),
        # finished while the mean of (3, 9) is on its way, a step after it was sent: with one's own progress whole
        (ON_ARRIVAL | {"delay": 2}, [(1, 3)] * 4, [-4, -12], -8),
        # z is 0, -2, -6; each keeps the round that it has just sent
        ({"tau": 1, "merge": "keep"}, [(1, 3)], [-1, -3], -2),
        ({"tau": 1, "merge": "keep"}, [(1, 3), (2, 6)], [-4, -8], -6),
        ({"tau": 1, "merge": "keep"}, [(1, 3), (2, 6), (1, 1)], [-7, -7], -7),
        # z = -4, and a step of one's own, then another, which are sent
        ({"tau": 2, "delay": 1, "merge": "keep"}, [(1, 3)] * 3, [-5, -7], -6),
        ({"tau": 2, "delay": 1, "merge": "keep"}, [(1, 3)] * 4, [-6, -10], -8),
    ],
)
def test_merges_by_hand(options: dict[str, Any], steps: list[tuple[float, float]], rows: list[float], end: float):
    ref = by_hand(steps, **options)
    assert ref.x[:, 0].tolist() == rows
    ref.finish()
    assert ref.x[:, 0].tolist() == [end, end]


@pytest.mark.parametrize(
    "options", [{"gap": "elementwise"}, {"gap": "norm", "phi": 0.5}, {"gap": "none", "alpha": 0.4}], ids=str
)
def test_with_nothing_asked_for_it_is_the_papers_algorithm(options: dict[str, Any]):
    for total in range(1, 12):
        start = torch.zeros(3, 4, dtype=torch.float64)
        paper, late = Reference(start.clone(), 3, **options), LateReference(start.clone(), 3, **options)
        for ref in (paper, late):
            for step in range(total):
                ref.x += progress(step)
                ref.local_step()
        for name in ("outer", "restarts", "deltas"):
            ours, theirs = getattr(paper, name), getattr(late, name)
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        paper.finish(), late.finish()
        torch.testing.assert_close(paper.x, late.x, rtol=1e-12, atol=1e-12)


def test_merge_and_gap_combine():
    """The same, with the norm gap: Lambda is 1, then 1 + 4/4 from the last outer movement; keep and mix alike."""
    ref = by_hand([(1, 3)] * 5, tau=2, delay=1, merge="keep", gap="norm")
    torch.testing.assert_close(torch.cat(ref.outer), vector(0, -4, -6))
    torch.testing.assert_close(ref.x[:, 0], vector(-7, -9))
    ref = by_hand([(1, 3)] * 3, tau=1, merge="mix", gap="norm")
    # the means of what is sent are 2, then 1 + 2; z is 0, 0, -2, and -2 - 3 / (1 + 2/3)
    torch.testing.assert_close(torch.cat(ref.outer), vector(0, 0, -2, -2 - 3 / (1 + 2 / 3)))


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


def moved(total: int, workers: int = 3, **options: Any) -> tuple[LateReference, list[Tensor]]:
    """The method, and x after each step, with progress that does not depend on x."""
    ref = LateReference(torch.zeros(workers, 4, dtype=torch.float64), **{**PLAIN, **options})
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
        ref, rows = moved(total, tau=3, delay=delay, merge="keep")
        expected = torch.stack([progress(step) for step in range(total)]).sum(0).mean(0)
        torch.testing.assert_close(rows[-1].mean(0), expected, rtol=1e-12, atol=1e-12)
        ref.finish()
        torch.testing.assert_close(ref.x, expected.expand(3, -1), rtol=1e-12, atol=1e-12)


def test_with_keep_only_the_momentum_is_late():
    """ybar_{t+1} = ybar_t + pbar_t + beta m_{t-1}, m_t = beta m_{t-1} + pbar_{t-1}; SlowMo has beta m_t there."""
    beta = 0.5
    ref, _ = moved(24, tau=3, merge="keep", beta=beta)
    y, momentum = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for t, restart in enumerate(ref.restarts):
        y = y - ref.deltas[t] + beta * momentum
        momentum = beta * momentum - (ref.deltas[t - 1] if t else 0.0)
        torch.testing.assert_close(restart.mean(0), y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("delay", [0, None])
def test_mix_with_kappa_1_is_outer(delay: int | None):
    options: dict[str, Any] = {"tau": 3, "delay": delay, "beta": 0.3, "gap": "elementwise"}
    (outer, rows), (mix, mixed) = moved(11, **options), moved(11, **options, merge="mix", kappa=1.0)
    torch.testing.assert_close(torch.stack(rows), torch.stack(mixed), rtol=0, atol=1e-12)
    outer.finish(), mix.finish()
    torch.testing.assert_close(outer.x, mix.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("merge", ["outer", "keep"])
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


@pytest.mark.parametrize(("merge", "delay"), [("outer", 0), ("mix", 0), ("keep", 0), ("keep", 2), ("keep", None)])
def test_a_lone_worker_that_gives_nothing_up_is_its_inner_optimiser(merge: str, delay: int | None):
    _, rows = moved(10, workers=1, tau=4, delay=delay, merge=merge)
    expected = torch.stack([progress(step, 1) for step in range(10)]).cumsum(0)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-12, atol=1e-12)


def test_a_delay_of_tau_is_a_whole_round():
    for merge in ("outer", "mix", "keep"):
        (a, rows), (b, same) = (moved(11, tau=3, merge=merge, gap="norm", delay=d) for d in (None, 3))
        a.finish(), b.finish()
        assert torch.equal(torch.stack(rows), torch.stack(same)) and torch.equal(a.x, b.x)


@pytest.mark.parametrize(
    ("options", "said"), [({"merge": "half"}, "half"), ({"delay": 4}, "delay=4"), ({"delay": -1}, "delay=-1")]
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        LateReference(torch.zeros(2, 1), tau=3, **options)


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
