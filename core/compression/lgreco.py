"""The settings of L-GreCo, and the ways of sending a layer that it chooses from."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..buckets import Scalars
from ..comm import Stage, all_gather, sum_flats
from ..errors import UserError, is_number, is_whole
from .formats import BITS, BLOCK, BLOCK_BYTES, LEVELS
from .quantized import chunk_of

Rule = Literal["lgreco", "uniform"]


@dataclass(frozen=True)
class LGrecoConfig:
    """The defaults equal the released code, except `every` and `first`, which it counts in steps."""

    rule: Rule = "lgreco"
    """lgreco: the fewest bytes within the error of the uniform setting; uniform: that setting for all layers."""
    lowest_rank: float = 0.5
    """The lowest rank to try, in units of the uniform one: gamma."""
    highest_rank: float = 2.0
    """The highest rank to try, in units of the uniform one: beta."""
    every: int | None = None
    """The most reductions between two decisions; None for 20 rounds of CO2, or 100 steps of ddp."""
    first: int | None = None
    """The first reduction that decides; None for 3 rounds of CO2, or 10 steps of ddp. The time between two decisions
    doubles from there up to `every`."""

    def __post_init__(self) -> None:
        low, high, whole = self.lowest_rank, self.highest_rank, "give a whole number of reductions, 1 or more"
        for name, ok, remedy in (
            ("rule", self.rule in get_args(Rule), f"choose one of {', '.join(get_args(Rule))}"),
            ("lowest_rank", is_number(low) and 0 < low <= 1, "give a number in (0, 1]"),
            ("highest_rank", is_number(high) and 1 <= high < math.inf, "give a finite number, 1 or more"),
            ("every", self.every is None or is_whole(self.every), whole),
            ("first", self.first is None or is_whole(self.first), whole),
        ):
            if not ok:
                raise UserError(f"compression.lgreco.{name}={getattr(self, name)!r}: {remedy}")


Kind = Literal["raw", "int", "top", "rank"]
INT_BITS = sorted(BITS.values())
POINTS = 9  # densities, geometric, from a tenth of the given one to ten times it


@dataclass(frozen=True)
class Choice:
    """One way to send a layer: as it is, b bits an element, the largest k elements, or two factors of rank r.

    value: the bits, the share of the elements (density), or the rank.
    """

    kind: Kind
    value: float = 0.0

    def __str__(self) -> str:
        return "as it is" if self.kind == "raw" else f"{self.kind}{self.value:g}"

    @property
    def compression(self) -> str:
        """The name in core/compression/formats.py if it is of kind int."""
        return f"int{int(self.value)}"


RAW = Choice("raw")


@dataclass(frozen=True)
class Layer:
    """A parameter: its bucket, where its elements begin there, and its matrix [rows, columns]; [n, 1] of a vector."""

    bucket: int
    start: int
    numel: int
    rows: int
    columns: int
    itemsize: int
    shape: tuple[int, ...]

    def offers(self, choice: Choice) -> bool:
        """Returns whether the choice exists for this layer, and saves bytes."""
        if choice.kind == "rank" and choice.value > min(self.rows, self.columns):
            return False
        return choice.kind in ("raw", "int") or message_bytes(self, choice) < message_bytes(self, RAW)

    def kept(self, density: float) -> int:
        """Returns how many elements top-k sends."""
        return max(1, round(density * self.numel))


def message_bytes(layer: Layer, choice: Choice) -> float:
    """Returns the layer's bytes in one message; a block that it shares with other layers counts in part."""
    if choice.kind == "int":
        return layer.numel * BLOCK_BYTES[choice.compression] / BLOCK
    if choice.kind == "top":
        return layer.kept(choice.value) * (layer.itemsize + 4)  # a value and an int32 index
    elements = choice.value * (layer.rows + layer.columns) if choice.kind == "rank" else layer.numel
    return elements * layer.itemsize


def sent_bytes(layer: Layer, choice: Choice, world_size: int) -> float:
    """Returns the bytes that each worker sends for the layer in one reduction: the message 2 (n - 1) / n times, but
    n - 1 times with top-k, which everyone gathers. A single worker counts as one of two."""
    n = max(2, world_size)
    return message_bytes(layer, choice) * ((n - 1) if choice.kind == "top" else 2 * (n - 1) / n)


def padded_bytes(layers: Sequence[Layer], choices: Sequence[Choice], world_size: int) -> list[float]:
    """Returns sent_bytes of each layer, with its share of what pads the layers of one bucket and int format to whole
    blocks for each worker."""
    n = max(2, world_size)
    sizes = [sent_bytes(layer, choice, world_size) for layer, choice in zip(layers, choices, strict=True)]
    together: dict[tuple[int, Choice], list[int]] = {}
    for i, (layer, choice) in enumerate(zip(layers, choices, strict=True)):
        if choice.kind == "int":
            together.setdefault((layer.bucket, choice), []).append(i)
    for members in together.values():
        elements = sum(layers[i].numel for i in members)
        for i in members:
            sizes[i] *= n * chunk_of(elements, n) / elements
    return sizes


def parse(text: str) -> Choice:
    """Returns the choice of a text such as int4, top0.01 or rank4."""
    name = str(text).rstrip("0123456789.")
    with contextlib.suppress(ValueError):
        value = float(str(text)[len(name) :])
        known = {"int": value in INT_BITS, "top": 0 < value < 0.5, "rank": value.is_integer() and value >= 1}
        if known.get(name):
            return Choice(name, value)  # pyright: ignore[reportArgumentType]
    raise UserError(
        f"compression.like={text!r}: give int2, int4, int8, topD with a density 0 < D < 0.5 such as top0.01, or rankR "
        "such as rank4"
    )


def uniform(layer: Layer, like: Choice) -> Choice:
    """Returns the layer's choice where all get `like`: RAW if that saves no bytes, or less than half of them with low
    rank, as released."""
    halves = like.kind != "rank" or 2 * message_bytes(layer, like) < message_bytes(layer, RAW)
    return like if halves and layer.offers(like) else RAW


def family(like: Choice, lowest: float, highest: float, most: float = math.inf) -> list[Choice]:
    """Returns the choices of the uniform setting's kind, without repetitions. lowest, highest: the range of ranks, in
    units of the given one. most: the highest rank of any layer."""
    if like.kind == "int":
        found = [Choice("int", bits) for bits in INT_BITS]
    elif like.kind == "rank":
        ranks = range(max(1, int(lowest * like.value)), int(min(highest * like.value, most)) + 1)
        found = [Choice("rank", r) for r in ranks]
    else:
        values = [like.value * 10 ** (2 * i / (POINTS - 1) - 1) for i in range(POINTS)]
        values[POINTS // 2] = like.value
        found = [Choice("top", value) for value in values if value < 0.5]
    return list(dict.fromkeys([RAW, like, *found]))


def may_take(layer: Layer, choices: Sequence[Choice], like: Choice) -> list[bool]:
    """Returns whether the layer may take each of the choices. A layer that is sent as it is stays so."""
    if uniform(layer, like) == RAW:
        return [c == RAW for c in choices]
    return [layer.offers(c) and c != RAW for c in choices]


SAMPLE = 1 << 13  # elements
ROUNDING = 16  # epsilons of a column's norm: what is left of it below that is rounding


def moved(scalars: Scalars) -> Tensor:
    """Returns whether there is movement: 0-d bool, a copy, because the scalars become their means."""
    return scalars["steps"] * scalars["weight"] != 0


# -- top-k --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    """A layer's k largest elements. values, error: 1-d views; the mean replaces the values."""

    values: Tensor
    error: Tensor
    k: int


def top_k(
    layers: Sequence[Sparse], scalars: Scalars, world_size: int, group: dist.ProcessGroup | None
) -> Iterator[Stage]:
    """Averages each worker's k largest elements, which everyone gathers.

    With movement a worker sends of d + e, e <- d + e - sent; without, of d, e <- e + d - sent. The message is bytes:
    all values, then all indices in their layers, int32. Sums go in rank order, so that all workers hold the same bits.
    """
    own, values, indices = moved(scalars), list[Tensor](), list[Tensor]()
    for layer in layers:
        kept = layer.error.add_(layer.values)
        send = torch.where(own, kept, layer.values)
        where = largest(send.abs(), layer.k)
        values.append(send[where])
        indices.append(where.int())
        kept[where] -= values[-1]
    sent = torch.cat([torch.cat(values).view(torch.uint8), torch.cat(indices).view(torch.uint8)])
    received = sent[None]
    if group is not None:
        received = sent.new_empty(world_size, len(sent))
        yield all_gather(received, sent, group)
    dtype, counts = layers[0].values.dtype, [layer.k for layer in layers]
    for layer in layers:
        layer.values.zero_()
    for row in received:
        pieces = row.split([sum(counts) * dtype.itemsize, sum(counts) * 4])
        of_row = (p.clone().view(kind).split(counts) for p, kind in zip(pieces, (dtype, torch.int32), strict=True))
        for layer, value, index in zip(layers, *of_row, strict=True):
            layer.values.index_add_(0, index, value)  # no index comes twice in a row
    for layer in layers:
        layer.values.div_(len(received))


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """Returns the places of the k largest, int64 [k] in any order. NaN is the largest. magnitudes: [n], none negative.

    On a CPU topk takes many times as long as reading. So of many elements it gets only those above a threshold, which
    by a sample more than k of them reach.
    """
    n, stride = len(magnitudes), len(magnitudes) // SAMPLE
    few = 1.25 * k / n * SAMPLE + 16  # of the sample: more than k of all, almost surely
    if stride >= 8 and few < SAMPLE / 4 and not magnitudes.is_cuda:
        least = magnitudes[::stride].topk(int(few), sorted=False).values.amin()
        where = (magnitudes < least).logical_not_().nonzero().view(-1)  # NaN, too
        if k <= len(where) <= n / 4:
            return where[magnitudes[where].topk(k, sorted=False).indices]
    return magnitudes.topk(k, sorted=False).indices


# -- low rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factored:
    """A layer as factors of rank r. values, error: [rows, columns] views; the product replaces the values. q: [columns,
    r], from the last iteration to the next."""

    values: Tensor
    error: Tensor
    q: Tensor


def low_rank(
    layers: Sequence[Factored], scalars: Scalars, world_size: int, group: dist.ProcessGroup | None
) -> Iterator[Stage]:
    """Averages over the workers and projects, one power iteration a reduction (PowerSGD, Vogels et al., NeurIPS 2019).

    With M the mean of d + e: P = orth(M Q), Q <- M^T P, D = P Q^T, and every worker keeps d + e - D. The sums of both
    factors cross as plain all-reduces. Each worker computes orth and P Q^T for itself, so that workers hold the same
    bits only on processors of one kind. A column of Q of which M has nothing, or that is not finite, stays as it was:
    from zeros orth would make the first unit vectors. If nobody uses a matrix's first rows, as in an embedding, nothing
    would ever be sent again. (torch's powerSGD_hook has one rank for all layers, and needs DistributedDataParallel.)
    """
    own = moved(scalars)
    sends = [torch.where(own, layer.error.add_(layer.values), layer.values) for layer in layers]
    flat, factors = _flat([product(m, layer.q) for m, layer in zip(sends, layers, strict=True)])
    if group is not None:
        yield sum_flats([flat], group)
    orthogonal = [orthonormal(p) for p in factors]  # of a sum it is the same as of the mean
    flat, factors = _flat([product(m.T, p) for m, p in zip(sends, orthogonal, strict=True)])
    if group is not None:
        yield sum_flats([flat], group)
    flat.div_(world_size)
    anyone = moved(scalars).to(flat.dtype)  # else the mean is thrown away by its owner
    for layer, p, q in zip(layers, orthogonal, factors, strict=True):
        layer.q.copy_(torch.where(q.isfinite().all(0) & (q != 0).any(0), q, layer.q))
        torch.matmul(p, q.T, out=layer.values)
        layer.error.addcmul_(layer.values, anyone, value=-1)


def product(matrix: Tensor, thin: Tensor) -> Tensor:
    """Returns matrix @ thin for few columns, by way of the transposed: a CPU's product takes up to six times as long
    with few columns as with few rows."""
    return (thin.T.contiguous() @ matrix.T).T


def orthonormal(p: Tensor) -> Tensor:
    """Returns the Q of QR, with zeros for a column that depends on those before it except for rounding: QR would make a
    vector of the rounding, another on each kind of processor, and the workers' M^T P, which cancel only in the mean,
    would differ."""
    q, r = torch.linalg.qr(p)
    depends = r.diagonal().abs() <= ROUNDING * torch.finfo(p.dtype).eps * torch.linalg.vector_norm(r, dim=0)
    return torch.where(depends, 0.0, q)  # with a NaN nothing depends


def fill(q: Tensor, filled: int, seed: int) -> None:
    """Draws the columns of q [columns, r] from `filled` on, which a switch to a higher rank adds, equal on all workers.
    The released code draws them from each rank's own random state."""
    if filled < q.shape[1]:
        draw = torch.Generator().manual_seed(seed)
        q[:, filled:] = torch.randn(q.shape[0], q.shape[1], generator=draw)[:, filled:].to(q)


def _flat(matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor of them all, and views of it in their shapes."""
    flat = torch.cat([m.reshape(-1) for m in matrices])
    parts = flat.split([m.numel() for m in matrices])
    return flat, [part.view(m.shape) for part, m in zip(parts, matrices, strict=True)]


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
    if ints := kinds["int"]:  # rounded to nearest, as core/compression/formats.py does
        levels = [LEVELS[choices[i].compression] for i in ints]
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
            raise UserError(f"compression.like={like!r} would save nothing in any parameter of this model: give less")
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
