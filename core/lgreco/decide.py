"""From the error curves to each layer's choice, and when: the fewest bytes whose summed error stays within a budget.

After the abstract and the released code of L-GreCo: a knapsack like SPDY's, solved by a dynamic programme over bins of
the budget. Nothing here communicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UserError
from ..wires.formats import BLOCK, LEVELS
from .choices import RAW, Choice, Layer, LGrecoConfig, family, may_take, padded_bytes, parse, sent_bytes, uniform
from .senders import largest, product

NOISE = 1e-12  # of a sum: below that it is the rounding of the sum
ROWS, GPU_ROWS = 128, 1 << 13  # blocks at once: the temporaries of all formats stay in a CPU's cache
ITERATIONS = 5  # of the power iteration, as released


def curve(values: Tensor, layer: Layer, choices: Sequence[Choice], offered: Sequence[bool], seed: int) -> Tensor:
    """Returns ||G - C(G)||_2 for each choice C: float64 [choices], where the values lie.

    It is infinite for choices that are not offered, and NaN for all if G is not finite. values: G, [numel]. seed: of
    the power iteration's start.
    """
    squares = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    kinds: dict[str, list[int]] = {"raw": [], "int": [], "top": [], "rank": []}
    for i, (choice, ok) in enumerate(zip(choices, offered, strict=True)):
        if ok:
            kinds[choice.kind].append(i)
    errors = dict.fromkeys(kinds["raw"], torch.zeros_like(squares))
    if ints := kinds["int"]:  # rounded to nearest, as core/wires/formats.py does
        levels = [LEVELS[choices[i].wire] for i in ints]
        sums = torch.zeros(len(ints), dtype=torch.float64, device=values.device)
        blocks_of_all = pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        for blocks in blocks_of_all.split(GPU_ROWS if values.is_cuda else ROWS):
            top = torch.maximum(blocks.amax(1), -blocks.amin(1)).float()
            scale = torch.stack([top / level for level in levels])  # [formats, blocks]
            scale = scale.masked_fill_(scale == 0, 1.0)[..., None]
            y = blocks / scale
            lost = torch.linalg.vector_norm(y.sub_(y.round()), dim=-1, keepdim=True)
            sums += (lost.double() * scale).square_().sum((1, 2))
        errors |= zip(ints, sums.sqrt().unbind(), strict=True)
    if tops := kinds["top"]:  # all but the largest k, for each k
        counts, magnitudes = [layer.kept(choices[i].value) for i in tops], values.abs()
        largest_first = magnitudes[largest(magnitudes, max(counts))].sort(descending=True).values
        lost = squares - largest_first.double().square_().cumsum(0)
        lost = torch.where(lost > NOISE * squares, lost, 0.0).sqrt()
        errors |= {i: lost[k - 1] for i, k in zip(tops, counts, strict=True)}
    if ranked := kinds["rank"]:
        # Power iterations of the highest rank are those of all ranks: the first r columns of QR depend on these alone.
        ranks, matrix = [int(choices[i].value) for i in ranked], values.view(layer.rows, -1)
        draw = torch.Generator(matrix.device).manual_seed(seed)
        q = torch.randn(matrix.shape[1], max(ranks), generator=draw, device=matrix.device, dtype=matrix.dtype)
        for _ in range(ITERATIONS):
            p = torch.linalg.qr(product(matrix, q)).Q
            q = product(matrix.T, p)  # q = G^T p: what p's span holds of G
        lost = squares - q.double().square().sum(0).cumsum(0)
        errors |= {i: lost[r - 1].clamp(min=0).sqrt() for i, r in zip(ranked, ranks, strict=True)}
    without = torch.full_like(squares, float("inf"))
    row = torch.stack([errors.get(i, without) for i in range(len(choices))])
    return torch.where(squares.isfinite(), row, float("nan"))


BINS = 10_000  # of the budget, as released
SUMMED = 10  # reductions whose compressed tensors the curves are taken of, as released


@dataclass(frozen=True)
class Allocation:
    """One decision, after the `number`-th reduction. By layer: its choice, the bytes that a worker sends for it in a
    reduction, padding included, and its error, averaged over the workers. seconds: for the curves, and to decide."""

    number: int
    reason: str
    layers: Sequence[Layer]
    choices: Sequence[Choice]
    bytes: Sequence[float]
    errors: Sequence[float]
    uniform_bytes: float
    seconds: tuple[float, float] = (0.0, 0.0)

    def table(self, names: Sequence[str] = ()) -> str:
        """Returns the layers as a Markdown table, by name or number."""
        lines = ["| layer | shape | sent as | bytes | error |", "|---|---|---|---|---|"]
        rows = zip(self.layers, self.choices, self.bytes, self.errors, strict=True)
        for i, (layer, choice, size, error) in enumerate(rows):
            shape = " x ".join(map(str, layer.shape)) or "1"
            lines.append(f"| {names[i] if names else i} | {shape} | {choice} | {size:.0f} | {error:.3g} |")
        return "\n".join(lines)


class Decider:
    """L-GreCo's rule.

    Attributes: choices, all that any layer may take; offered, bool [layers, choices], whether the layer may take it;
    sizes, float64 [layers, choices], bytes that a worker sends; uniform, each layer's choice where all get the same,
    and before the first decision; fixed, whether that holds for good.
    """

    def __init__(self, layers: Sequence[Layer], like: str, config: LGrecoConfig, world_size: int):
        self.layers, self.name, self.world_size = layers, like, world_size
        self.fixed = config.rule == "uniform"
        wanted = parse(like)
        self.uniform = [uniform(layer, wanted) for layer in layers]
        if all(choice == RAW for choice in self.uniform):
            raise UserError(f"wire.like={like!r} would save nothing in any parameter of this model: give less")
        most = max(min(layer.rows, layer.columns) for layer in layers)
        self.choices = family(wanted, config.lowest_rank, config.highest_rank, most)
        self.offered = torch.tensor([may_take(layer, self.choices, wanted) for layer in layers])
        self.sizes = torch.tensor([[sent_bytes(z, c, world_size) for c in self.choices] for z in layers]).double()

    def decide(self, curves: Tensor, now: Sequence[Choice], number: int) -> Allocation:
        """Decides from the workers' average curves, float64 [layers, choices]. A layer whose row is not finite keeps
        its choice."""
        errors = torch.where(self.offered, curves, float("inf"))
        known = torch.where(self.offered, curves, 0.0).isfinite().all(1)
        new, rows = list(now), known.nonzero().flatten().tolist()
        for i, choice in zip(rows, self.pick(errors, rows) if rows else (), strict=True):
            new[i] = self.choices[choice]
        lost = curves[torch.arange(len(new)), [self.choices.index(choice) for choice in new]].tolist()
        sizes = padded_bytes(self.layers, new, self.world_size)
        uniform_bytes = math.fsum(padded_bytes(self.layers, self.uniform, self.world_size))
        reason = (
            f"{sum(sizes) / 1e6:.3g} MB a reduction, uniform {self.name} {uniform_bytes / 1e6:.3g} MB; "
            f"{sum(a != b for a, b in zip(new, now, strict=True))} of {len(new)} layers change"
        )
        if unknown := [str(i) for i, ok in enumerate(known.tolist()) if not ok]:
            reason += f"; layers {', '.join(unknown)} are not finite and keep what they have"
        return Allocation(number, reason, self.layers, new, sizes, lost, uniform_bytes)

    def pick(self, errors: Tensor, known: list[int]) -> list[int]:
        """Returns the index of the choice for each of the `known` layers. errors: float64 [layers, choices], infinite
        where not offered."""
        layers = [self.layers[i] for i in known]

        def size(picked: list[int]) -> float:
            return math.fsum(padded_bytes(layers, [self.choices[c] for c in picked], self.world_size))

        like = [self.choices.index(self.uniform[i]) for i in known]
        picked = allocate(errors[known], self.sizes[known], like)
        # Each int format is padded to whole blocks. Where that costs more than the format saves, all layers that have
        # it take a wider one that others have, of no more error.
        ints = sorted((c for c in set(picked) if self.choices[c].kind == "int"), key=lambda c: self.choices[c].value)
        for narrow, wide in itertools.combinations(ints, 2):
            moving = [i for i, c in zip(known, picked, strict=True) if c == narrow]
            tried = [wide if c == narrow else c for c in picked]
            if all(errors[i, wide] <= errors[i, narrow] for i in moving) and size(tried) < size(picked):
                picked = tried
        return like if size(like) < size(picked) else picked


class Clock:
    """Decides at fixed reductions, so that a run can be repeated: at `first`, 2 x first, 4 x first and so on.

    So it doubles the time between two, up to `every`, because gradients change fast when a run begins. numbers: float64
    [1] on the CPU, for a checkpoint: the reduction that decides next, 0 for the first.
    """

    def __init__(self, every: int, first: int):
        self.every, self.first = every, first
        self.numbers = torch.zeros(1, dtype=torch.float64)

    def due(self, number: int) -> bool:
        """Returns whether the `number`-th reduction, from 1, decides."""
        return number >= max(self.first, self.numbers.item())

    def counts(self, number: int) -> bool:
        """Returns whether the `number`-th reduction is one of the SUMMED up to the one that decides."""
        return self.due(number + SUMMED - 1)

    def plan(self, number: int) -> None:
        """Plans the next decision after the `number`-th reduction, which decides."""
        self.numbers.fill_(number + min(self.every, number))


def allocate(errors: Tensor, sizes: Tensor, reference: Sequence[int], *, bins: int = BINS) -> list[int]:
    """Returns the choice of each layer that minimizes the summed sizes with summed errors <= the reference's.

    Errors are rounded up to whole bins of budget / bins, so that the budget is always kept: with L layers the result is
    at most as large as the optimum at (1 - L / bins) of the budget. Rounding may exclude the reference, which therefore
    is a candidate of its own.

    Args:
        errors: float64 [layers, choices], >= 0; infinite where a layer has no such choice.
        sizes: [layers, choices], any unit.
        reference: The choice of each layer whose errors make the budget.
    """
    assert (errors >= 0).all() and sizes.isfinite().all()
    assert errors[torch.arange(len(errors)), list(reference)].isfinite().all(), "the reference has no such choice"
    # divided by a power of two, which rounds nothing, so that no sum over the layers overflows
    errors, sizes = (table.double() / 2.0 ** len(table).bit_length() for table in (errors, sizes))
    if (budget := total(errors, reference)) > 0:
        # an error that is a whole number of bins may come out a rounding above it: that is no bin more
        cost = torch.ceil(errors / budget * bins * (1 - 1e-12)).clamp(max=bins + 1).long()
    else:
        cost = torch.where(errors > 0, bins + 1, 0)
    best = torch.full((len(cost) + 1, bins + 1), float("inf"), dtype=torch.float64)
    best[0] = 0.0  # [layers, b]: the least size of the first layers within b bins
    candidates: list[list[tuple[int, float, int]]] = []  # of each layer: bins, size, choice
    for layer, (q_of, size_of) in enumerate(zip(cost.tolist(), sizes.tolist(), strict=True)):
        worth: list[tuple[int, float, int]] = []  # no other choice beats them in both numbers
        for q, size, c in sorted(zip(q_of, size_of, range(len(q_of)), strict=True)):
            if q <= bins and (not worth or size < worth[-1][1]):
                worth.append((q, size, c))
        before, following = best[layer], best[layer + 1]
        for q, size, _ in worth:
            torch.minimum(following[q:], before[: bins + 1 - q] + size, out=following[q:])
        candidates.append(worth)
    if best[-1, bins].isinf():
        return list(reference)
    b = int((best[-1] <= best[-1, bins]).nonzero()[0])  # the fewest bins of the least size
    picked: list[int] = []
    for layer in reversed(range(len(cost))):
        least, before = float(best[layer + 1, b]), best[layer]
        q, _, c = next(c for c in candidates[layer] if c[0] <= b and float(before[b - c[0]]) + c[1] == least)
        picked.insert(0, c)
        b -= q
    return list(reference) if total(sizes, picked) > total(sizes, reference) else picked


def total(table: Tensor, choices: Sequence[int]) -> float:
    """Returns the sum over the layers of table[layer, its choice], rounded once, so that all processors agree."""
    return math.fsum(table.double()[torch.arange(len(table)), list(choices)].tolist())
