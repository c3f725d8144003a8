"""The executable specification: against hand-worked rounds, and the stability that paper.md derives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.loss.__main__ import vmap_gradient
from tests.problems import batch, small_net
from tests.reference import LateReference, Reference


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_three_rounds_by_hand():
    """Two workers, one element, tau = 1, beta = 1/2, alpha = 1, norm gap: Delta is 2, then 4."""
    ref = Reference(torch.zeros(2, 1, dtype=torch.float64), tau=1, gap="norm", phi=None)
    for displacements in (vector(1.0, 3.0), vector(2.0, 6.0), vector(0.0, 0.0)):
        ref.x -= displacements[:, None]
        assert ref.local_step()
    # t = 0: nothing has arrived. t = 1: Lambda = 1, m = 2. t = 2: Lambda = 1 + 2/4, m = 1 + 4/1.5.
    torch.testing.assert_close(torch.cat(ref.outer), vector(0, 0, -2, -2 - 1 - 4 / 1.5))
    torch.testing.assert_close(torch.cat(ref.deltas), vector(2, 4, 0))
    assert (ref.x == ref.outer[-1]).all()


def test_without_delay_alpha_1_beta_0_is_the_mean():
    ref = LateReference(torch.zeros(2, 1, dtype=torch.float64), tau=2, beta=0.0, gap="none", phi=None, delay=0)
    ref.x -= vector(1.0, 2.0)[:, None]
    assert not ref.local_step()
    ref.x -= vector(1.0, 2.0)[:, None]
    assert ref.local_step()
    assert ref.x.tolist() == [[-3.0], [-3.0]]


def test_finish_applies_the_mean_in_flight_and_then_the_incomplete_round():
    ref = Reference(torch.zeros(1, 1, dtype=torch.float64), tau=2, beta=0.0, gap="none", phi=None)
    for _ in range(3):
        ref.x -= 1.0
        ref.local_step()
    assert ref.x.item() == -1.0  # x_{1,0} = 0, and one local step
    ref.finish()
    assert ref.x.item() == -3.0  # 2 that were in flight, 1 of the incomplete round


# -- stability on a quadratic: x_{t+1} = (1 + beta) x_t - (beta + alpha rho / Lambda) x_{t-1} --------------------


def run_quadratic(rho: Tensor, rounds: int, beta: float, alpha: float, gap: str = "none") -> list[Tensor]:
    """Loss x^2/2 in each direction with tau = 1 and the learning rate rho: one local step removes the share rho."""
    x = torch.ones(1, len(rho), dtype=torch.float64)
    return Reference(x, 1, alpha, beta, gap, phi=None).run(lambda rows, _: rows * rho, 1.0, rounds)


@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 1.0), (0.0, 1.0), (0.8, 0.5), (0.3, 0.6)])
def test_the_delayed_outer_step_follows_the_recurrence(beta: float, alpha: float):
    rho = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    x = run_quadratic(rho, 12, beta, alpha)
    assert torch.equal(x[1], x[0])
    for before, now, after in zip(x, x[1:], x[2:], strict=False):
        torch.testing.assert_close(after, (1 + beta) * now - (beta + alpha * rho) * before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("beta", "alpha"), [(0.0, 2.0), (0.5, 1.0), (0.8, 0.4), (0.9, 0.11)])
def test_stable_exactly_below_the_boundary(beta: float, alpha: float):
    """The modulus of both roots is sqrt(beta + alpha rho): 3 % on either side of 1 is enough to tell."""
    below, above = ((total - beta) / alpha for total in (0.97, 1.03))
    assert 0 < below < above <= 1.2
    last = run_quadratic(vector(below, above), 1200, beta, alpha)[-1].abs()
    assert last[0] < 1e-6
    assert last[1] > 1e6


def late_error(share: float, beta: float, **how: Any) -> float:
    """The error after 1500 rounds in a direction that tau steps solve, with outer_lr the share of its limit."""
    limit = 1 - beta
    if how.get("nesterov"):  # (1 - beta^2) alpha + beta^2 alpha^2 = 1 - beta
        b, c = (1 - beta**2) / beta**2, (1 - beta) / beta**2
        limit = (b**2 / 4 + c) ** 0.5 - b / 2
    ref = LateReference(torch.ones(1, 1, dtype=torch.float64), 1, share * limit, beta, "none", None, **how)
    return ref.run(lambda rows, _: rows, 1.0, 1500)[-1].abs().max().item()


@pytest.mark.parametrize("how", [{"merge": "mix", "kappa": 0.3}, {"nesterov": True}], ids=str)
@pytest.mark.parametrize("beta", [pytest.param(0.3, marks=pytest.mark.slow), 0.6])
def test_neither_a_mixed_restart_nor_nesterov_escapes_its_limit(how: dict[str, Any], beta: float):
    assert late_error(0.96, beta, **how) < 1e-4 and late_error(1.04, beta, **how) > 1e3


def test_mixed_rounds_by_hand():
    """One worker, mix 1/4: the iterate stays 0 in round 0, and the next difference counts from there."""
    ref = LateReference(torch.zeros(1, 1, dtype=torch.float64), 1, 1.0, 0.0, "none", None, merge="mix", kappa=0.25)
    for _ in range(2):
        ref.x -= 4.0
        ref.local_step()
    # p: -4, then 3/4 of it; -7, where d = 7, while x takes the first 4
    assert [rows.item() for rows in ref.restarts] == [-3.0, -4.0 / 4 - 7.0 * 3 / 4]
    ref.finish()
    assert ref.x.item() == -11.0


def test_nesterov_by_hand():
    """One worker, beta = 1/2, alpha = 1: Delta is 2, then 2 again; m = 2, then 3, and the steps are 1 + 2, 3/2 + 2."""
    ref = LateReference(torch.zeros(1, 1).double(), 1, 1.0, 0.5, "none", None, nesterov=True)
    for _ in range(3):
        ref.x -= 2.0
        ref.local_step()
    assert [rows.item() for rows in ref.restarts] == [0.0, -3.0, -6.5]


# -- vmap -----------------------------------------------------------------------------------------------------


def net_gradients(model: nn.Module):
    def loss(params: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, params, (inputs,)), labels)

    return vmap_gradient(loss, {k: p.detach() for k, p in model.named_parameters()})


def loop_gradients(model: nn.Module, rows: Tensor, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    gradients = []
    for row, (inputs, labels) in zip(rows, batches, strict=True):
        nn.utils.vector_to_parameters(row, model.parameters())
        loss = nn.functional.cross_entropy(model(inputs), labels)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(gradients)


def test_64_workers_by_vmap_agree_with_a_loop():
    workers, steps = 64, 10
    model = small_net()
    start = nn.utils.parameters_to_vector(model.parameters()).detach().expand(workers, -1)
    gradients = net_gradients(small_net())
    fast, slow = (Reference(start.clone(), 3) for _ in range(2))
    for step in range(steps):
        batches = [batch(w, step) for w in range(workers)]
        fast.x -= 0.1 * gradients(fast.x, tuple(torch.stack(t) for t in zip(*batches, strict=True)))
        slow.x -= 0.1 * loop_gradients(model, slow.x, batches)
        fast.local_step(), slow.local_step()
    assert not torch.equal(fast.x[0], fast.x[63])  # a local step since the last round
    torch.testing.assert_close(fast.x, slow.x, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.stack(fast.outer), torch.stack(slow.outer), rtol=1e-11, atol=1e-11)
