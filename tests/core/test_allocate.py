"""The dynamic programme against brute force, and the cases that the released code gets wrong."""

import itertools
import random
import time

import pytest
import torch
from torch import Tensor

from core.lgreco.decide import BINS, allocate, total

NAN, INF = float("nan"), float("inf")
SIZES = [[1.0, 2.0], [1.0, 2.0]]


def table(seed: int, layers: int, choices: int) -> tuple[Tensor, Tensor, list[int]]:
    """Errors that fall as sizes grow, layers that differ by orders of magnitude; the uniform choice, in the middle."""
    draw = torch.Generator().manual_seed(seed)
    scale = 10 ** (4 * torch.rand(layers, 1, generator=draw, dtype=torch.float64))
    errors = scale * torch.rand(layers, choices, generator=draw, dtype=torch.float64).sort(1, descending=True).values
    scale = 10 ** (3 * torch.rand(layers, 1, generator=draw, dtype=torch.float64))
    sizes = (scale * torch.rand(layers, choices, generator=draw, dtype=torch.float64).sort(1).values).ceil()
    return errors, sizes, [choices // 2] * layers


def optimum(errors: Tensor, sizes: Tensor, budget: float) -> float:
    """The least size within the budget, by trying everything."""
    e, z = errors.new_zeros(1), sizes.new_zeros(1)
    for layer in range(len(errors)):
        e = (e[:, None] + errors[layer]).view(-1)
        z = (z[:, None] + sizes[layer]).view(-1)
    fits = e <= budget * (1 + 1e-12)
    return float(z[fits].min()) if fits.any() else float("inf")


@pytest.mark.parametrize("bins", [BINS, 100])
def test_against_brute_force(bins: int):
    """1,000 tables: the budget is kept, the size lies between two optima, never more than uniform."""
    pick, exact = random.Random(bins), 0
    for seed in range(1000):
        layers, choices = pick.randint(1, 5), pick.randint(2, 5)
        errors, sizes, uniform = table(seed, layers, choices)
        found = allocate(errors, sizes, uniform, bins=bins)
        least, size = optimum(errors, sizes, total(errors, uniform)), total(sizes, found)
        within = optimum(errors, sizes, total(errors, uniform) * (1 - layers / bins))
        assert least <= size <= min(within, total(sizes, uniform))
        assert total(errors, found) <= total(errors, uniform) * (1 + 1e-9)
        exact += size == least
    assert exact > (900 if bins == BINS else 400)


def test_by_hand():
    """Two layers, budget 5: the first gives up what it gains to the second, which loses less."""
    errors = torch.tensor([[4.0, 2.0, 1.0], [4.0, 2.0, 1.0]])
    sizes = torch.tensor([[1.0, 4.0, 5.0], [8.0, 9.0, 10.0]])
    assert allocate(errors, sizes, [1, 1]) == [1, 1]  # 4 + 1 would be 5
    assert allocate(errors, sizes, [2, 0]) == [0, 2]
    assert allocate(errors, sizes, [0, 0]) == [0, 0]


def test_the_first_layer_loses_no_bin():
    """The released programme's strict > lets the first layer use one bin less than it has."""
    errors, sizes = torch.tensor([[1.0, 0.5]]), torch.tensor([[1.0, 2.0]])
    assert allocate(errors, sizes, [0], bins=2) == [0]
    errors = torch.tensor([[3.0, 1.0], [3.0, 1.0]])
    sizes = torch.tensor([[1.0, 9.0], [5.0, 9.0]])
    assert allocate(errors, sizes, [0, 1], bins=4) == [0, 1], "3 + 1 of 4 bins, all used"


def test_uniform_is_a_candidate_that_rounding_would_exclude():
    errors = torch.full((7, 2), 1.0, dtype=torch.float64)
    errors[:, 1] = 0.0
    sizes = torch.tensor([[1.0, 10.0]]).expand(7, 2)
    assert allocate(errors, sizes, [0] * 7, bins=10) == [0] * 7, "each of seven takes 2 of 10 bins"


def test_a_layer_of_zeros_gets_the_least_bytes_and_a_budget_of_zero_stays_one():
    errors = torch.tensor([[0.0, 0.0, 0.0], [9.0, 5.0, 1.0]])
    sizes = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert allocate(errors, sizes, [1, 1]) == [0, 1]
    assert allocate(errors * 0, sizes, [1, 1]) == [0, 0]
    exact = torch.tensor([[3.0, 0.0], [2.0, 0.0]])
    assert allocate(exact, sizes[:, :2], [1, 1]) == [1, 1]


def test_an_error_beyond_the_budget_is_no_choice():
    """The released code clamps it to all bins, so that one layer may exceed the budget by any factor."""
    errors, sizes = torch.tensor([[1e9, 1.0]]), torch.tensor([[1.0, 2.0]])
    assert allocate(errors, sizes, [1]) == [1]
    errors = torch.tensor([[float("inf"), 1.0], [2.0, 1.0]])
    assert allocate(errors, torch.tensor([[1.0, 2.0], [1.0, 2.0]]), [1, 1]) == [1, 1]


def test_totals_depend_on_no_order():
    """Processors add the terms of a tensor in orders of their own; workers have to come to the same budget."""
    terms = torch.tensor([[1e16], [1.0], [1.0]], dtype=torch.float64)
    for order in itertools.permutations(range(3)):
        assert total(terms[list(order)], [0, 0, 0]) == 1e16 + 2


@pytest.mark.parametrize(
    ("errors", "sizes"),
    [
        ([[1.0, NAN], [1.0, 2.0]], SIZES),
        ([[1.0, 2.0], [-1.0, 2.0]], SIZES),
        ([[1.0, 2.0], [1.0, INF]], SIZES),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [INF, 2.0]]),
    ],
)
def test_numbers_that_no_error_or_size_can_be_are_refused(errors: list, sizes: list):
    with pytest.raises(AssertionError):
        allocate(torch.tensor(errors), torch.tensor(sizes), [1, 1])


@pytest.mark.parametrize("unit", [1e308, 1e307, 1e-300, 5e-324 * 2**20])
def test_no_size_of_the_errors_matters(unit: float):
    """Two errors of 1e308 have a sum that no float64 holds."""
    errors = torch.tensor([[4.0, 2.0, 1.0], [4.0, 2.0, 1.0]], dtype=torch.float64) / 4
    sizes = torch.tensor([[1.0, 4.0, 5.0], [8.0, 9.0, 10.0]])
    found = allocate(errors, sizes, [1, 1])
    assert allocate(errors * unit, sizes, [1, 1]) == found
    assert allocate(errors * unit, sizes.double() / 10 * unit, [1, 1]) == found
    least = torch.full((2, 1), unit, dtype=torch.float64)
    assert allocate(least, least, [0, 0]) == [0, 0]


def test_quick_enough():
    """27 matrices with up to 121 choices: well below a second."""
    errors, sizes, uniform = table(0, 27, 121)
    began = time.perf_counter()
    found = allocate(errors, sizes, uniform)
    assert time.perf_counter() - began < 3
    assert total(sizes, found) < total(sizes, uniform)
