"""Which compression each layer gets: the fewest bytes whose summed error stays within a budget.

After the abstract and the released code of L-GreCo (a knapsack like SPDY's, solved by a dynamic programme over bins of
the budget), and Accordion's criterion beside it. Pure functions of tables [layers, choices]; no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UserError

BINS = 10_000  # of the budget, as released


def allocate(errors: Tensor, sizes: Tensor, reference: Sequence[int], *, share: float = 1.0, bins: int = BINS) -> list:
    """The choice of each layer that minimises the summed sizes with summed errors <= share x the reference's.

    errors: float64 [layers, choices], >= 0; infinite where a layer has no such choice. sizes: [layers, choices], any
    unit. reference: the choice of each layer whose errors make the budget. Errors are rounded up to whole bins of
    budget / bins, so that the budget is always kept: with L layers the result is at most as large as the optimum
    at (1 - L / bins) of the budget. The reference is a candidate of its own where it is within the budget, for rounding
    can exclude it. Where nothing fits, which only a share below 1 can cause, each layer gets its least error.

    UserError for a NaN or negative error, an infinite one of the reference, and sizes or a share that are not finite.
    """
    _check(errors, sizes, reference, share)
    errors, sizes = _scaled(errors), _scaled(sizes)
    budget = share * total(errors, reference)
    best = [int(c) for c in _least(errors, sizes)]
    found = _programme(_in_bins(errors, budget, bins), sizes, bins)
    if found is not None:
        best = found
    if share >= 1 and not _smaller(sizes, best, reference):
        best = list(reference)
    return best


def total(table: Tensor, choices: Sequence[int]) -> float:
    """The sum over the layers of table[layer, its choice], >= 0: rounded once, so alike on workers of any processor."""
    try:
        return math.fsum(table.double()[torch.arange(len(table)), list(choices)].tolist())
    except OverflowError:  # where the sum rounds to infinity
        return math.inf


def accordion(before: Tensor, now: Tensor, eta: float = 0.5) -> Tensor:
    """Accordion's criterion (Agarwal et al., MLSys 2021): bool [layers], True where a layer can do with little, that is
    where the norm of its gradient has changed by less than eta of what it was. before, now: [layers]; a layer without a
    norm before, 0, counts as changed."""
    return (now - before).abs() < eta * before


def _check(errors: Tensor, sizes: Tensor, reference: Sequence[int], share: float) -> None:
    if not 0 <= share < math.inf:
        raise UserError(f"share={share}: give a finite share of the reference's error, 0 or more")
    taken = torch.zeros_like(errors, dtype=torch.bool)
    taken[torch.arange(len(errors)), list(reference)] = True
    for name, table, wrong, why in (
        ("errors", errors, errors.isnan() | (errors < 0), "give errors >= 0, inf where a layer has no such choice"),
        ("errors", errors, taken & errors.isinf(), "give the reference, which takes it, a choice that the layer has"),
        ("sizes", sizes, ~sizes.isfinite(), "give finite sizes"),
    ):
        if wrong.any():
            layer, choice = wrong.nonzero()[0].tolist()
            raise UserError(f"{name}[{layer}, {choice}] is {table[layer, choice].item()}: {why}")


def _scaled(table: Tensor) -> Tensor:
    """float64, divided by a power of two, which rounds nothing, such that no sum over the layers overflows."""
    return table.double() / 2.0 ** len(table).bit_length()


def _in_bins(errors: Tensor, budget: float, bins: int) -> Tensor:
    """int64 [layers, choices]: bins that each choice takes, bins + 1 where it takes more than there are."""
    if budget <= 0:
        return torch.where(errors > 0, bins + 1, 0)
    # an error that is a whole number of bins may come out a rounding above it: that is no bin more
    return torch.ceil(errors / budget * bins * (1 - 1e-12)).clamp(max=bins + 1).long()


def _programme(cost: Tensor, sizes: Tensor, bins: int) -> list[int] | None:
    """The dynamic programme over (layer, bins used up to here). None: nothing fits."""
    best = torch.full((len(cost) + 1, bins + 1), float("inf"), dtype=torch.float64)
    best[0] = 0.0  # [layers, b]: the least size of the first layers within b bins
    candidates: list[list[tuple[int, int, float]]] = []  # of each layer: choice, bins, size
    for layer, (q_of, size_of) in enumerate(zip(cost.tolist(), sizes.tolist(), strict=True)):
        candidates.append([(c, q_of[c], size_of[c]) for c in _worth_a_look(q_of, size_of, bins)])
        before, following = best[layer], best[layer + 1]
        for _, q, size in candidates[-1]:
            torch.minimum(following[q:], before[: bins + 1 - q] + size, out=following[q:])
    if best[-1, bins].isinf():
        return None
    b = int((best[-1] <= best[-1, bins]).nonzero()[0])  # the fewest bins of the least size
    picked = []
    for layer in reversed(range(len(cost))):
        least, before = float(best[layer + 1, b]), best[layer]
        c, q, _ = next(c for c in candidates[layer] if c[1] <= b and float(before[b - c[1]]) + c[2] == least)
        picked.append(c)
        b -= q
    return picked[::-1]


def _worth_a_look(cost: list[int], sizes: list[float], bins: int) -> list[int]:
    """The choices of a layer that no other one beats in both numbers."""
    kept: list[int] = []
    for c in sorted(range(len(cost)), key=lambda c: (cost[c], sizes[c], c)):
        if cost[c] <= bins and (not kept or sizes[c] < sizes[kept[-1]]):
            kept.append(c)
    return kept


def _least(errors: Tensor, sizes: Tensor) -> list[int]:
    """The choice of least error of each layer, the smallest of several."""
    return [
        min(range(len(e)), key=lambda c: (e[c], z[c])) for e, z in zip(errors.tolist(), sizes.tolist(), strict=True)
    ]


def _smaller(sizes: Tensor, choices: Sequence[int], reference: Sequence[int]) -> bool:
    return total(sizes, choices) <= total(sizes, reference)
