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
from .choices import (
    RAW,
    Choice,
    Layer,
    LGrecoConfig,
    family,
    may_take,
    message_bytes,
    padded_bytes,
    parse,
    sent_bytes,
    uniform,
)
from .senders import largest, product

NOISE = 1e-12  # of a sum: below that it is the rounding of the sum
ROWS, GPU_ROWS = 128, 1 << 13  # blocks at once: the temporaries of all formats stay in a CPU's cache
ITERATIONS = 5  # of the power iteration, as released


def curve(values: Tensor, layer: Layer, choices: Sequence[Choice], offered: Sequence[bool], seed: int) -> Tensor:
    """float64 [choices], where the values lie: ||G - C(G)||_2 for each choice that is offered, infinite for the others;
    NaN for all where G is not finite. values: G, [numel]. seed: of the power iteration's start."""
    squares = norm(values).square()
    of_kind: dict[str, list[int]] = {"raw": [], "int": [], "top": [], "rank": []}
    for i, (choice, ok) in enumerate(zip(choices, offered, strict=True)):
        if ok:
            of_kind[choice.kind].append(i)
    errors = dict.fromkeys(of_kind["raw"], torch.zeros_like(squares))
    if of_kind["int"]:
        found = _int_errors(values, [choices[i].wire for i in of_kind["int"]])
        errors |= zip(of_kind["int"], found.unbind(), strict=True)
    if of_kind["top"]:
        counts = [layer.kept(choices[i].value) for i in of_kind["top"]]
        errors |= zip(of_kind["top"], _top_errors(values, counts, squares), strict=True)
    if of_kind["rank"]:
        ranks = [int(choices[i].value) for i in of_kind["rank"]]
        errors |= zip(of_kind["rank"], _rank_errors(values.view(layer.rows, -1), ranks, squares, seed), strict=True)
    without = torch.full_like(squares, float("inf"))
    row = torch.stack([errors.get(i, without) for i in range(len(choices))])
    return torch.where(squares.isfinite(), row, float("nan"))


def norm(values: Tensor) -> Tensor:
    """||values||_2, summed in float64; 0-d."""
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def _int_errors(values: Tensor, names: Sequence[str]) -> Tensor:
    """The norm of each format's rounding errors, float64 [formats]; to nearest, as core/wires/formats.py rounds."""
    squares = torch.zeros(len(names), dtype=torch.float64, device=values.device)
    rows = GPU_ROWS if values.is_cuda else ROWS
    for blocks in pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK).split(rows):
        top = torch.maximum(blocks.amax(1), -blocks.amin(1)).float()
        scale = torch.stack([top / LEVELS[wire] for wire in names])  # [formats, blocks]
        scale = scale.masked_fill_(scale == 0, 1.0)[..., None]
        y = blocks / scale
        lost = torch.linalg.vector_norm(y.sub_(y.round()), dim=-1, keepdim=True)
        squares += (lost.double() * scale).square_().sum((1, 2))
    return squares.sqrt()


def _top_errors(values: Tensor, counts: Sequence[int], squares: Tensor) -> list[Tensor]:
    """The norm of all but the largest k, for each k."""
    magnitudes = values.abs()
    largest_first = magnitudes[largest(magnitudes, max(counts))].sort(descending=True).values
    lost = squares - largest_first.double().square_().cumsum(0)
    errors = torch.where(lost > NOISE * squares, lost, 0.0).sqrt()
    return [errors[k - 1] for k in counts]


def _rank_errors(matrix: Tensor, ranks: Sequence[int], squares: Tensor, seed: int) -> list[Tensor]:
    """The norm of what is left of the approximation of each rank that ITERATIONS power iterations find. One iteration
    of the highest rank is that of all: what QR makes of the first r columns depends on these alone."""
    draw = torch.Generator(matrix.device).manual_seed(seed)
    q = torch.randn(matrix.shape[1], max(ranks), generator=draw, device=matrix.device, dtype=matrix.dtype)
    for _ in range(ITERATIONS):
        p = torch.linalg.qr(product(matrix, q)).Q
        q = product(matrix.T, p)  # q = G^T p: what p's span holds of G
    lost = squares - q.double().square().sum(0).cumsum(0)
    return [lost[r - 1].clamp(min=0).sqrt() for r in ranks]


BINS = 10_000  # of the budget, as released
SUMMED = 10  # reductions whose compressed tensors the curves are taken of, as released


@dataclass(frozen=True)
class Allocation:
    """One decision: for each layer its choice, the bytes that a worker sends for it in a reduction, padding included,
    and its error, the workers' mean. number: of the reduction before it. seconds: of the curves, and of the programme.
    """

    number: int
    reason: str
    layers: Sequence[Layer]
    choices: Sequence[Choice]
    bytes: Sequence[float]
    errors: Sequence[float]
    uniform_bytes: float
    seconds: tuple[float, float] = (0.0, 0.0)

    def table(self, names: Sequence[str] = ()) -> str:
        """Markdown. names: of the layers, else their numbers."""
        lines = ["| layer | shape | sent as | bytes | error |", "|---|---|---|---|---|"]
        rows = zip(self.layers, self.choices, self.bytes, self.errors, strict=True)
        for i, (layer, choice, size, error) in enumerate(rows):
            shape = " x ".join(map(str, layer.shape)) or "1"
            lines.append(f"| {names[i] if names else i} | {shape} | {choice} | {size:.0f} | {error:.3g} |")
        return "\n".join(lines)

    @property
    def bits(self) -> list[float]:
        """The bits of a message for each element, by layer."""
        return [8 * message_bytes(layer, c) / layer.numel for layer, c in zip(self.layers, self.choices, strict=True)]


class Decider:
    """L-GreCo's rule.

    choices: all that any layer may take. offered: bool [layers, choices], whether the layer may; sizes: float64
    [layers, choices], bytes that a worker sends. uniform: each layer's choice where all get the same, and before the
    first decision. fixed: whether that holds for good.
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
        """curves: float64 [layers, choices], the workers' mean; a layer with a number in its row that is not finite
        keeps its choice."""
        errors = torch.where(self.offered, curves, float("inf"))
        known = torch.where(self.offered, curves, 0.0).isfinite().all(1)
        new, rows = list(now), known.nonzero().flatten().tolist()
        for i, choice in zip(rows, self.pick(errors, rows) if rows else (), strict=True):
            new[i] = self.choices[choice]
        every = range(len(new))
        lost = curves[torch.arange(len(new)), self._indices(new, every)].tolist()
        sizes = padded_bytes(self.layers, new, self.world_size)
        uniform_bytes = self._size(self._indices(self.uniform, every), [*every])
        reason = (
            f"{sum(sizes) / 1e6:.3g} MB a reduction, uniform {self.name} {uniform_bytes / 1e6:.3g} MB; "
            f"{sum(a != b for a, b in zip(new, now, strict=True))} of {len(new)} layers change"
        )
        if unknown := [str(i) for i, ok in enumerate(known.tolist()) if not ok]:
            reason += f"; layers {', '.join(unknown)} are not finite and keep what they have"
        return Allocation(number, reason, self.layers, new, sizes, lost, uniform_bytes)

    def pick(self, errors: Tensor, known: list[int]) -> list[int]:
        """The index of the choice of each of the `known` layers. errors: float64 [layers, choices], infinite where not
        offered."""
        like = self._indices(self.uniform, known)
        found = self._merged(allocate(errors[known], self.sizes[known], like), errors, known)
        return like if self._size(like, known) < self._size(found, known) else found

    def _merged(self, picked: list[int], errors: Tensor, known: list[int]) -> list[int]:
        """Each int format is padded to whole blocks: where that costs more than it saves, all layers that have one take
        a wider one that others have, of no more error."""
        ints = sorted((c for c in set(picked) if self.choices[c].kind == "int"), key=lambda c: self.choices[c].value)
        for narrow, wide in itertools.combinations(ints, 2):
            moving = [j for j, c in enumerate(picked) if c == narrow]
            tried = [wide if c == narrow else c for c in picked]
            no_worse = all(errors[known[j], wide] <= errors[known[j], narrow] for j in moving)
            if no_worse and self._size(tried, known) < self._size(picked, known):
                picked = tried
        return picked

    def _size(self, picked: list[int], known: list[int]) -> float:
        """Bytes that a worker sends for the layers `known`."""
        choices = [self.choices[c] for c in picked]
        return math.fsum(padded_bytes([self.layers[i] for i in known], choices, self.world_size))

    def _indices(self, choices: Sequence[Choice], layers: Sequence[int]) -> list[int]:
        return [self.choices.index(choices[i]) for i in layers]


class Clock:
    """At fixed reductions, so that a run can be repeated.

    first: the reduction that decides first. The second decision comes as many reductions later, at 2 x first, and so
    on: the time between two doubles, up to `every`, for at the beginning of a run gradients change fast.
    numbers: float64 [1] on the CPU, for a checkpoint: the reduction that decides next, 0 for the first.
    """

    def __init__(self, every: int, first: int):
        self.every, self.first = every, first
        self.numbers = torch.zeros(1, dtype=torch.float64)

    def due(self, number: int) -> bool:
        """Whether the `number`-th reduction, from 1, is to decide."""
        return number >= self._planned

    def counts(self, number: int) -> bool:
        """Whether the `number`-th reduction is one of the SUMMED up to the one that is to decide."""
        return number > self._planned - SUMMED

    @property
    def _planned(self) -> float:
        return max(self.first, self.numbers.item())

    def plan(self, number: int) -> None:
        """After the `number`-th reduction, which decides: plans the next decision."""
        self.numbers.fill_(number + min(self.every, number))


# -- the dynamic programme ----------------------------------------------------------------------------------------


def allocate(errors: Tensor, sizes: Tensor, reference: Sequence[int], *, bins: int = BINS) -> list[int]:
    """The choice of each layer that minimises the summed sizes with summed errors <= the reference's.

    errors: float64 [layers, choices], >= 0; infinite where a layer has no such choice. sizes: [layers, choices], any
    unit. reference: the choice of each layer whose errors make the budget. Errors are rounded up to whole bins of
    budget / bins, so that the budget is always kept: with L layers the result is at most as large as the optimum
    at (1 - L / bins) of the budget. The reference is a candidate of its own, for rounding can exclude it.
    """
    assert (errors >= 0).all() and sizes.isfinite().all()
    assert errors[torch.arange(len(errors)), list(reference)].isfinite().all(), "the reference has no such choice"
    errors, sizes = _scaled(errors), _scaled(sizes)
    best = _programme(_in_bins(errors, total(errors, reference), bins), sizes, bins)
    if best is None or total(sizes, best) > total(sizes, reference):
        best = list(reference)
    return best


def total(table: Tensor, choices: Sequence[int]) -> float:
    """The sum over the layers of table[layer, its choice], >= 0: rounded once, so alike on workers of any processor."""
    return math.fsum(table.double()[torch.arange(len(table)), list(choices)].tolist())


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
