"""The outer step's formulas on numbers worked out by hand."""

import pytest
import torch
from torch import Tensor

from core import outer
from core.adaptive import merging
from core.methods import delayed
from tests.reference import Reference


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def test_norm_runs_over_all_tensors():
    tensors = [vector(3.0), torch.tensor([[0.0, 4.0], [12.0, 0.0]], dtype=torch.float64)]
    assert outer.norm(tensors).item() == pytest.approx(13.0, rel=1e-15)


def test_norm_accumulates_in_the_widest_dtype():
    """In float32, 1 + 1e-10 would be 1."""
    total = outer.norm([vector(1.0, dtype=torch.float32), vector(1e-5)])
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx((1 + 1e-10) ** 0.5, rel=1e-15)


@pytest.mark.slow
def test_norm_of_a_model_too_large_for_float32_accumulators():
    """On a CPU torch.linalg.vector_norm of these 3 x 10^8 ones is a third too small (1.2 GB of memory)."""
    assert outer.norm([torch.ones(3 * 10**8)]).item() == pytest.approx((3e8) ** 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (outer.gap_elementwise(vector(0.0, -1.0, 3.0), vector(2.0)[0]), [1.0, 1.5, 2.5]),
        (outer.gap_scalar(vector(6.0), vector(3.0)), [3.0]),
        (outer.momentum(vector(10.0, 10.0), vector(4.0, 4.0), 0.5), [9.0, 9.0]),
        # the gap scales the new term alone
        (outer.momentum(vector(10.0, 10.0), vector(4.0, 4.0), 0.5, vector(1.0, 2.0)), [9.0, 7.0]),
        (outer.momentum(vector(10.0, 10.0), vector(4.0, 4.0), 0.5, vector(4.0)[0]), [6.0, 6.0]),
        (outer.clip_elements(vector(-3.0, -0.5, 2.0), 1.0), [-1.0, -0.5, 1.0]),
        (outer.outer_step(vector(1.0, 2.0), vector(4.0, -4.0), 0.5), [-1.0, 4.0]),
        (merging.mix(vector(4.0), vector(8.0), 0.25), [7.0]),
        (merging.mix(vector(4.0), vector(8.0), 1.0), [4.0]),
    ],
)
def test_formulas_by_hand(found: Tensor, expected: list[float]):
    torch.testing.assert_close(found, vector(*expected))


@pytest.mark.parametrize("gap", [outer.gap_elementwise, outer.gap_scalar])
def test_gap_is_finite_when_the_pseudo_gradient_is_zero(gap):
    assert gap(vector(0.0)[0], vector(0.0)[0]).item() == 1.0
    assert torch.isfinite(gap(vector(1.0)[0], vector(0.0)[0]))


def test_nesterov_is_that_of_torch():
    parameter = torch.nn.Parameter(vector(1.0, -2.0))
    sgd = torch.optim.SGD([parameter], lr=0.3, momentum=0.7, nesterov=True)
    x, m = parameter.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for delta in (vector(1.0, 2.0), vector(-3.0, 0.5), vector(0.2, 0.1)):
        parameter.grad = delta
        sgd.step()
        m = outer.momentum(m, delta, 0.7)
        x = outer.outer_step(x, delayed.nesterov(m, delta, 0.7), 0.3)
        torch.testing.assert_close(x, parameter.detach())


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.9])
def test_settles_says_where_the_roots_of_the_recurrence_leave_the_unit_circle(beta: float, nesterov: bool):
    """rho = 1: z^3 - (1 + beta) z^2 + (beta + alpha (1 + b)) z - alpha b, with b = beta under Nesterov, else 0."""
    b = beta if nesterov else 0.0
    for alpha in torch.linspace(0.01, 1.2, 120).tolist():
        c = [alpha * -b, beta + alpha * (1 + b), -(1 + beta)]
        companion = torch.tensor([[0, 0, -c[0]], [1, 0, -c[1]], [0, 1, -c[2]]], dtype=torch.float64)
        modulus = torch.linalg.eigvals(companion).abs().max().item()
        if abs(modulus - 1) > 1e-6:
            settles = delayed.nesterov_settles if nesterov else outer.settles
            assert settles(alpha, beta) == (modulus < 1)


def test_local_steps_that_overshoot_diverge_where_settles_says_they_settle():
    """rho = 1.5: the errors grow by sqrt(beta + rho alpha) = 1.118 a round."""
    assert outer.settles(0.7, 0.2)
    reference = Reference(vector(1.0).expand(2, 1).clone(), 5, 0.7, 0.2, "none", None)
    errors = [abs(float(x)) for x in reference.run(lambda x, _: (1 + 0.5**0.2) * x, 1.0, 5 * 200)]
    growth = (max(errors[-20:]) / max(errors[80:100])) ** (1 / (len(errors) - 100))
    assert growth == pytest.approx((0.2 + 1.5 * 0.7) ** 0.5, abs=5e-3)


def test_nothing_changes_its_arguments():
    x = vector(1.0, -2.0, 3.0)
    kept = x.clone()
    for call in (
        lambda: outer.gap_elementwise(x, x[0]),
        lambda: outer.momentum(x, x, 0.5, x.abs()),
        lambda: outer.clip_elements(x, 1.0),
        lambda: outer.outer_step(x, x, 0.5),
        lambda: merging.mix(x, x, 0.5),
        lambda: delayed.nesterov(x, x, 0.5),
    ):
        assert call().data_ptr() != x.data_ptr()
        assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept_when_the_scale_is_wider(dtype: torch.dtype):
    """c_t comes from all dtypes of a model, as float64 if one of them is."""
    x, scale = vector(1.0, -2.0, dtype=dtype), torch.tensor(0.5, dtype=torch.float64)
    gap = outer.gap_elementwise(x, scale)
    assert gap.dtype == dtype
    assert outer.momentum(x, x, 0.5, gap).dtype == dtype
    assert outer.momentum(x, x, 0.5, outer.gap_scalar(scale, scale)).dtype == dtype
