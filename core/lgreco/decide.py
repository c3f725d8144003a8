"""From the error curves to each layer's choice: the fewest bytes whose summed error stays within a budget.

After the abstract and the released code of L-GreCo: a knapsack like SPDY's, solved by a dynamic programme over bins of
the budget. Nothing here communicates.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from .choices import RAW, Choice, Layer, may_take, message_bytes, offered, padded_bytes, parse, sent_bytes, uniform
from .config import LGrecoConfig

BINS = 10_000  # of the budget, as released


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
    """L-GreCo's rule. Another rule derives from it and overrides `fixed`, `start`, `more` or `pick`.

    choices: all that any layer may take. offered: bool [layers, choices], whether the layer may; sizes: float64
    [layers, choices], bytes that a worker sends. uniform: each layer's choice where all get the same; start: before the
    first decision. memory: tensors on the CPU that a rule keeps between decisions, for a checkpoint.
    """

    fixed = False
    """Whether `start` holds for good."""

    def __init__(self, layers: Sequence[Layer], like: str, config: LGrecoConfig, world_size: int):
        self.layers, self.config, self.name, self.world_size = layers, config, like, world_size
        self.like = parse(like)
        self.uniform = [uniform(layer, self.like) for layer in layers]
        if all(choice == RAW for choice in self.uniform):
            raise UserError(f"wire.like={like!r} would save nothing in any parameter of this model: give less")
        most = max(min(layer.rows, layer.columns) for layer in layers)
        family = offered(self.like, config.family, config.lowest_rank, config.highest_rank, most)
        self.choices = list(dict.fromkeys([*family, *self.more()]))
        may = [may_take(layer, self.choices, self.like, config.family, world_size) for layer in layers]
        self.offered = torch.tensor(may)
        self.sizes = torch.tensor([[sent_bytes(z, c, world_size) for c in self.choices] for z in layers]).double()
        self.start: Sequence[Choice] = self.uniform
        self.memory: list[Tensor] = []

    def more(self) -> Sequence[Choice]:
        """Choices beyond those of the family."""
        return ()

    def pick(self, errors: Tensor, norms: Tensor, known: list[int]) -> list[int]:
        """The index of the choice of each of the `known` layers. errors: float64 [layers, choices], in the measure that
        adds up, infinite where not offered; norms: [layers], of the tensors that the workers want to send."""
        like = self.indices(self.uniform, known)
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

    def indices(self, choices: Sequence[Choice], layers: Sequence[int]) -> list[int]:
        return [self.choices.index(choices[i]) for i in layers]

    def decide(self, curves: Tensor, norms: Tensor, now: Sequence[Choice], number: int) -> Allocation:
        """curves: float64 [layers, choices], the workers' mean; a layer with a number in its row that is not finite
        keeps its choice. norms: see `pick`."""
        errors = torch.where(self.offered, curves, float("inf"))
        errors = errors.square() if self.config.error == "squared" else errors
        known = torch.where(self.offered, errors, 0.0).isfinite().all(1)
        new, rows = list(now), known.nonzero().flatten().tolist()
        for i, choice in zip(rows, self.pick(errors, norms, rows) if rows else (), strict=True):
            new[i] = self.choices[choice]
        every = range(len(new))
        lost = curves[torch.arange(len(new)), self.indices(new, every)].tolist()
        sizes = padded_bytes(self.layers, new, self.world_size)
        uniform_bytes = self._size(self.indices(self.uniform, every), [*every])
        reason = (
            f"{sum(sizes) / 1e6:.3g} MB a reduction, uniform {self.name} {uniform_bytes / 1e6:.3g} MB; "
            f"{sum(a != b for a, b in zip(new, now, strict=True))} of {len(new)} layers change"
        )
        if unknown := [str(i) for i, ok in enumerate(known.tolist()) if not ok]:
            reason += f"; layers {', '.join(unknown)} are not finite and keep what they have"
        return Allocation(number, reason, self.layers, new, sizes, lost, uniform_bytes)


class Uniform(Decider):
    """Every layer as the uniform setting says, for good."""

    fixed = True


def make_decider(layers: Sequence[Layer], like: str, config: LGrecoConfig, world_size: int) -> Decider:
    """The one that config.rule names. UserError where that is a class that cannot be imported."""
    kind = {"lgreco": Decider, "uniform": Uniform}.get(config.rule)
    if kind is None:
        module, _, name = config.rule.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UserError(f"wire.lgreco.rule={config.rule!r}: {error}; name a class that can be imported") from None
    return kind(layers, like, config, world_size)


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
