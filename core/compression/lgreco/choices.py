"""The settings of L-GreCo, and the ways of sending a layer among which it chooses."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ...buckets import Scalars
from ...comm import Stage, all_gather, sum_flats
from ...errors import UserError, is_whole
from .. import quantized
from ..formats import BITS, BLOCK, BLOCK_BYTES, encode
from ..quantized import chunk_of, moved

Rule = Literal["lgreco", "uniform"]


@dataclass(frozen=True)
class LGrecoConfig:
    """Settings of L-GreCo. The defaults equal the released code, which counts `every` and `first` in steps."""

    rule: Rule = "lgreco"
    """lgreco minimizes the bytes within the error of the uniform setting. uniform uses that setting for all layers."""
    every: int | None = None
    """The most reductions between two decisions. None means 20 rounds of CO2, or 100 steps of ddp."""
    first: int | None = None
    """The first reduction that decides. None means 3 rounds of CO2, or 10 steps of ddp. From there on, the time between
    two decisions doubles up to `every`."""

    def __post_init__(self) -> None:
        whole = "give a whole number of reductions, 1 or more"
        for name, ok, remedy in (
            ("rule", self.rule in get_args(Rule), f"choose one of {', '.join(get_args(Rule))}"),
            ("every", self.every is None or is_whole(self.every), whole),
            ("first", self.first is None or is_whole(self.first), whole),
        ):
            if not ok:
                raise UserError(f"compression.lgreco.{name}={getattr(self, name)!r}: {remedy}")


Kind = Literal["raw", "int", "top", "rank"]
INT_BITS = sorted(BITS.values())
LOWEST, HIGHEST = 0.5, 2  # ranks to try, as multiples of the uniform rank (gamma and beta in L-GreCo)
POINTS = 9  # densities to try, geometric, from a tenth of the given density to ten times it


@dataclass(frozen=True)
class Choice:
    """One way to send a layer: uncompressed, b bits per element, the k largest elements, or two factors of rank r.

    Attributes:
        kind: The way.
        value: The bits, the share of the elements (density), or the rank.
    """

    kind: Kind
    value: float = 0.0

    def __str__(self) -> str:
        return "as it is" if self.kind == "raw" else f"{self.kind}{self.value:g}"

    @property
    def compression(self) -> str:
        """Name of the format in core/compression/formats.py, for kind int."""
        return f"int{int(self.value)}"


RAW = Choice("raw")


@dataclass(frozen=True)
class Layer:
    """A parameter as L-GreCo sees it.

    Attributes:
        bucket: Number of its bucket.
        numel: Number of elements.
        rows: Rows of its matrix. A vector is a matrix of one column.
        columns: Columns of its matrix.
        itemsize: Bytes per element.
    """

    bucket: int
    numel: int
    rows: int
    columns: int
    itemsize: int

    def offers(self, choice: Choice) -> bool:
        """Returns whether this layer has the choice and it saves bytes."""
        if choice.kind == "rank" and choice.value > min(self.rows, self.columns):
            return False
        return choice.kind in ("raw", "int") or message_bytes(self, choice) < message_bytes(self, RAW)

    def kept(self, density: float) -> int:
        """Returns the number of elements that top-k sends."""
        return max(1, round(density * self.numel))


def message_bytes(layer: Layer, choice: Choice) -> float:
    """Returns the layer's bytes in one message. A block that it shares with other layers counts in part."""
    if choice.kind == "int":
        return layer.numel * BLOCK_BYTES[choice.compression] / BLOCK
    if choice.kind == "top":
        return layer.kept(choice.value) * (layer.itemsize + 4)  # a value and an int32 index
    elements = choice.value * (layer.rows + layer.columns) if choice.kind == "rank" else layer.numel
    return elements * layer.itemsize


def sent_bytes(layer: Layer, choice: Choice, world_size: int) -> float:
    """Returns the bytes that each worker sends for the layer in one reduction.

    These are 2 (n - 1) / n messages, or n - 1 messages with top-k, which all workers gather. A single worker counts as
    one of two.
    """
    n = max(2, world_size)
    return message_bytes(layer, choice) * ((n - 1) if choice.kind == "top" else 2 * (n - 1) / n)


def padded_bytes(layers: Sequence[Layer], choices: Sequence[Choice], world_size: int) -> float:
    """Returns the bytes that each worker sends for all layers in one reduction.

    The layers of one bucket and int format travel as one layer, padded to whole blocks for each worker.
    """
    sizes, together, n = list[float](), defaultdict[tuple[int, Choice], int](int), max(2, world_size)
    for layer, choice in zip(layers, choices, strict=True):
        if choice.kind == "int":
            together[layer.bucket, choice] += layer.numel
        else:
            sizes.append(sent_bytes(layer, choice, world_size))
    for (_, choice), elements in together.items():
        sizes.append(sent_bytes(replace(layers[0], numel=n * chunk_of(elements, n)), choice, world_size))
    return math.fsum(sizes)


def parse(text: str) -> Choice:
    """Returns the choice that a text such as int4, top0.01 or rank4 names."""
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
    """Returns the layer's choice if all layers get `like`.

    It is RAW if `like` saves no bytes, or less than half of them with low rank, as in the released code.
    """
    halves = like.kind != "rank" or 2 * message_bytes(layer, like) < message_bytes(layer, RAW)
    return like if halves and layer.offers(like) else RAW


def family(like: Choice, most: float = math.inf) -> list[Choice]:
    """Returns the choices of the uniform setting's kind, without repetitions. No layer can have a rank above `most`."""
    if like.kind == "int":
        found = [Choice("int", bits) for bits in INT_BITS]
    elif like.kind == "rank":
        ranks = range(max(1, int(LOWEST * like.value)), int(min(HIGHEST * like.value, most)) + 1)
        found = [Choice("rank", r) for r in ranks]
    else:
        values = [like.value * 10 ** (2 * i / (POINTS - 1) - 1) for i in range(POINTS)]
        values[POINTS // 2] = like.value
        found = [Choice("top", value) for value in values if value < 0.5]
    return list(dict.fromkeys([RAW, like, *found]))


ROUNDING = 16  # times epsilon times a column's norm: a remainder below this is rounding error


def top_k(
    layers: Sequence[tuple[Tensor, Tensor, int]], scalars: Scalars, world_size: int, group: dist.ProcessGroup | None
) -> Iterator[Stage]:
    """Averages each worker's k largest elements, which all workers gather.

    With movement a worker sends from d + e, and sets e <- d + e - sent. Without movement it sends from d, and sets
    e <- e + d - sent. The message is bytes: all values, then all indices in their layers as int32. Sums go in rank
    order, so that all workers hold the same bits.

    Args:
        layers: For each layer d, [numel], which the average replaces, then e, [numel], and k.
        scalars: The scalars that travel with the layers.
        world_size: Number of workers.
        group: The workers. None means one worker.
    """
    own, values, indices = moved(scalars), list[Tensor](), list[Tensor]()
    for d, e, k in layers:
        kept = e.add_(d)
        send = torch.where(own, kept, d)
        where = send.abs().topk(k, sorted=False).indices  # NaN is the largest
        values.append(send[where])
        indices.append(where.int())
        kept[where] -= values[-1]
    sent = torch.cat([torch.cat(values).view(torch.uint8), torch.cat(indices).view(torch.uint8)])
    received = sent[None]
    if group is not None:
        received = sent.new_empty(world_size, len(sent))
        yield all_gather(received, sent, group)
    dtype, counts = values[0].dtype, [k for _, _, k in layers]
    for d, _, _ in layers:
        d.zero_()
    for row in received:
        pieces = row.split([sum(counts) * dtype.itemsize, sum(counts) * 4])
        of_row = (p.clone().view(kind).split(counts) for p, kind in zip(pieces, (dtype, torch.int32), strict=True))
        for (d, _, _), value, index in zip(layers, *of_row, strict=True):
            d.index_add_(0, index, value)  # no index appears twice in a row
    for d, _, _ in layers:
        d.div_(len(received))


def low_rank(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]], scalars: Scalars, world_size: int, group: dist.ProcessGroup | None
) -> Iterator[Stage]:
    """Averages over the workers and projects, one power iteration per reduction (PowerSGD, Vogels et al., NeurIPS
    2019).

    With M the average of d + e, P = orth(M Q), Q <- M^T P and D = P Q^T. Every worker keeps d + e - D. The sums of both
    factors cross the network as plain all-reduces. Each worker computes orth and P Q^T itself, so workers hold the same
    bits only on processors of one kind.

    A column of Q stays as it was if the new one is zero or not finite, because from zeros orth would make the first
    unit vectors. If no worker then uses a matrix's first rows, as in an embedding, nothing would ever be sent again.
    (torch's powerSGD_hook has one rank for all layers, and needs DistributedDataParallel.)

    Args:
        layers: For each layer d, [rows, columns], which D replaces, then e, [rows, columns], and Q, [columns, r].
        scalars, world_size, group: See top_k.
    """
    own = moved(scalars)
    sends = [torch.where(own, e.add_(d), d) for d, e, _ in layers]
    flat, factors = _flat([product(m, q) for m, (_, _, q) in zip(sends, layers, strict=True)])
    if group is not None:
        yield sum_flats([flat], group)
    orthogonal = [orthonormal(p) for p in factors]  # the sum and the average give the same result
    flat, factors = _flat([product(m.T, p) for m, p in zip(sends, orthogonal, strict=True)])
    if group is not None:
        yield sum_flats([flat], group)
    flat.div_(world_size)
    anyone = moved(scalars).to(flat.dtype)  # if no worker has moved, the caller discards the average
    for (d, e, q), p, new in zip(layers, orthogonal, factors, strict=True):
        q.copy_(torch.where(new.isfinite().all(0) & (new != 0).any(0), new, q))
        torch.matmul(p, new.T, out=d)
        e.addcmul_(d, anyone, value=-1)


def product(matrix: Tensor, thin: Tensor) -> Tensor:
    """Returns matrix @ thin for few columns, computed through the transposes.

    A CPU's product takes up to six times as long with few columns as with few rows.
    """
    return (thin.T.contiguous() @ matrix.T).T


def orthonormal(p: Tensor) -> Tensor:
    """Returns the Q of QR, with zeros for a column that depends on the earlier columns up to rounding.

    QR would make a vector from the rounding error, which differs between kinds of processors. The workers' M^T P, which
    cancel only in the average, would then differ.
    """
    q, r = torch.linalg.qr(p)
    depends = r.diagonal().abs() <= ROUNDING * torch.finfo(p.dtype).eps * torch.linalg.vector_norm(r, dim=0)
    return torch.where(depends, 0.0, q)  # with a NaN no column counts as dependent


def fill(q: Tensor, filled: int, seed: int) -> None:
    """Draws the columns of q [columns, r] from `filled` on, equal on all workers, after a switch to a higher rank.

    The released code draws them from each rank's own random state.
    """
    if filled < q.shape[1]:
        draw = torch.Generator().manual_seed(seed)
        q[:, filled:] = torch.randn(q.shape[0], q.shape[1], generator=draw, device="cpu")[:, filled:].to(q)


def _flat(matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns one flat tensor of all matrices, and views of it in their shapes."""
    flat = torch.cat([m.reshape(-1) for m in matrices])
    parts = flat.split([m.numel() for m in matrices])
    return flat, [part.view(m.shape) for part, m in zip(parts, matrices, strict=True)]


NOISE = 1e-12  # share of a sum below which a value is the sum's rounding error
ITERATIONS = 5  # power iterations, as in the released code


def curve(values: Tensor, layer: Layer, choices: Sequence[Choice], offered: Sequence[bool], seed: int) -> Tensor:
    """Returns the error ||G - C(G)||_2 of each choice C, float64 [choices], on the device of the values.

    The error is 0 for choices that are not offered, and NaN for all choices if G is not finite.

    Args:
        values: G, [numel].
        layer: The layer.
        choices: All choices.
        offered: Whether the layer may use each choice.
        seed: Seed of the power iteration's start.
    """
    squares = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    kinds: dict[str, list[int]] = {"raw": [], "int": [], "top": [], "rank": []}
    errors, zero = dict[int, Tensor](), torch.zeros_like(squares)  # raw has no error
    for i, (choice, ok) in enumerate(zip(choices, offered, strict=True)):
        if ok:
            kinds[choice.kind].append(i)
    parts = pad(values, (0, -len(values) % BLOCK)).split(quantized.GPU_SEGMENT if values.is_cuda else quantized.SEGMENT)
    for i in kinds["int"]:
        norms = []
        for part in parts:
            encode(part, choices[i].compression, lost=(lost := part.clone()))
            norms.append(torch.linalg.vector_norm(lost, dtype=torch.float64))
        errors[i] = torch.linalg.vector_norm(torch.stack(norms))
    if tops := kinds["top"]:  # the norm of all elements but the k largest, for each k
        counts = [layer.kept(choices[i].value) for i in tops]
        largest_first = values.abs().topk(max(counts)).values
        lost = squares - largest_first.double().square_().cumsum(0)
        lost = torch.where(lost > NOISE * squares, lost, 0.0).sqrt()
        errors |= {i: lost[k - 1] for i, k in zip(tops, counts, strict=True)}
    if ranked := kinds["rank"]:
        # Power iterations of the highest rank serve all ranks: the first r columns of QR depend only on these columns.
        ranks, matrix = [int(choices[i].value) for i in ranked], values.view(layer.rows, -1)
        draw = torch.Generator(matrix.device).manual_seed(seed)
        q = torch.randn(matrix.shape[1], max(ranks), generator=draw, device=matrix.device, dtype=matrix.dtype)
        for _ in range(ITERATIONS):
            p = torch.linalg.qr(product(matrix, q)).Q
            q = product(matrix.T, p)  # q = G^T p: the part of G in the span of p
        lost = squares - q.double().square().sum(0).cumsum(0)
        errors |= {i: lost[r - 1].clamp(min=0).sqrt() for i, r in zip(ranked, ranks, strict=True)}
    row = torch.stack([errors.get(i, zero) for i in range(len(choices))])
    return torch.where(squares.isfinite(), row, float("nan"))


BINS = 10_000  # bins of the budget, as in the released code
SUMMED = 10  # reductions whose compressed tensors are summed for the curves, as in the released code


@dataclass(frozen=True)
class Allocation:
    """One decision.

    Attributes:
        number: The reduction after which it was made.
        reason: One line for the log.
        choices: Each layer's choice.
        bytes: Bytes that a worker sends in a reduction, padding included.
        uniform_bytes: The same with the uniform setting.
    """

    number: int
    reason: str
    choices: Sequence[Choice]
    bytes: float
    uniform_bytes: float


class Decider:
    """L-GreCo's rule.

    Args:
        layers: All layers.
        like: The uniform setting, such as int4.
        config: The settings of L-GreCo.
        world_size: Number of workers.

    Attributes:
        choices: All choices that any layer may use.
        offered: Whether each layer may use each choice, bool [layers, choices].
        sizes: Bytes that a worker sends, float64 [layers, choices].
        uniform: Each layer's choice under the uniform setting, and before the first decision.
        fixed: Whether the uniform setting never changes.
    """

    def __init__(self, layers: Sequence[Layer], like: str, config: LGrecoConfig, world_size: int):
        self.layers, self.name, self.world_size = layers, like, world_size
        self.fixed = config.rule == "uniform"
        wanted = parse(like)
        self.uniform = [uniform(layer, wanted) for layer in layers]
        if all(choice == RAW for choice in self.uniform):
            raise UserError(f"compression.like={like!r} would save nothing in any parameter of this model: give less")
        most = max(min(layer.rows, layer.columns) for layer in layers)
        self.choices = family(wanted, most)
        # a layer that the uniform setting sends uncompressed stays uncompressed
        own = zip(layers, self.uniform, strict=True)
        offered = [[c == u if RAW in (c, u) else layer.offers(c) for c in self.choices] for layer, u in own]
        self.offered = torch.tensor(offered, device="cpu")
        sizes = [[sent_bytes(z, c, world_size) for c in self.choices] for z in layers]
        self.sizes = torch.tensor(sizes, device="cpu").double()

    def decide(self, curves: Tensor, now: Sequence[Choice], number: int) -> Allocation:
        """Decides from the workers' averaged curves. A layer whose row is not finite keeps its choice.

        Args:
            curves: Errors, float64 [layers, choices].
            now: The present choices.
            number: Number of the reduction.
        """
        errors = torch.where(self.offered, curves, float("inf"))
        known = torch.where(self.offered, curves, 0.0).isfinite().all(1)
        new, rows = list(now), known.nonzero().flatten().tolist()
        if rows:
            layers, like = [self.layers[i] for i in rows], [self.uniform[i] for i in rows]
            picked = allocate(errors[rows], self.sizes[rows], [self.choices.index(choice) for choice in like])
            chosen = [self.choices[c] for c in picked]
            if padded_bytes(layers, like, self.world_size) < padded_bytes(layers, chosen, self.world_size):
                chosen = like  # int formats of few elements may cost more padding than they save
            for i, choice in zip(rows, chosen, strict=True):
                new[i] = choice
        sizes = [padded_bytes(self.layers, choices, self.world_size) for choices in (new, self.uniform)]
        reason = (
            f"{sizes[0] / 1e6:.3g} MB a reduction, uniform {self.name} {sizes[1] / 1e6:.3g} MB; "
            f"{sum(a != b for a, b in zip(new, now, strict=True))} of {len(new)} layers change"
        )
        if unknown := [str(i) for i, ok in enumerate(known.tolist()) if not ok]:
            reason += f"; layers {', '.join(unknown)} are not finite and keep what they have"
        return Allocation(number, reason, new, *sizes)


class Clock:
    """Decides at fixed reductions, so that a run can be repeated: at `first`, 2 x first, 4 x first and so on.

    The time between two decisions doubles up to `every`, because gradients change fast when a run begins.

    Attributes:
        numbers: The reduction that decides next, 0 for the first; float64 [1] on the CPU, for a checkpoint.
    """

    def __init__(self, every: int, first: int):
        self.every, self.first = every, first
        self.numbers = torch.zeros(1, dtype=torch.float64, device="cpu")

    def due(self, number: int) -> bool:
        """Returns whether the `number`-th reduction, counted from 1, decides."""
        return number >= max(self.first, self.numbers.item())

    def counts(self, number: int) -> bool:
        """Returns whether the `number`-th reduction is among the SUMMED reductions up to the next decision."""
        return self.due(number + SUMMED - 1)

    def plan(self, number: int) -> None:
        """Plans the next decision. The `number`-th reduction has just decided."""
        self.numbers.fill_(number + min(self.every, number))


def allocate(errors: Tensor, sizes: Tensor, reference: Sequence[int], *, bins: int = BINS) -> list[int]:
    """Returns each layer's choice that minimizes the summed sizes, with summed errors up to the reference's.

    Errors are rounded up to whole bins of budget / bins, so that the budget is always kept. With L layers the result is
    at most as large as the optimum at (1 - L / bins) of the budget. Rounding may exclude the reference, so the
    reference is a candidate as well.

    Args:
        errors: float64 [layers, choices], not negative, infinite for a choice that a layer does not have.
        sizes: [layers, choices], in any unit.
        reference: The choice of each layer whose errors make the budget.
        bins: Number of bins of the budget.
    """
    assert (errors >= 0).all() and sizes.isfinite().all()
    assert errors[torch.arange(len(errors), device="cpu"), list(reference)].isfinite().all(), (
        "the reference has no such choice"
    )
    # Division by a power of two rounds nothing, and no sum over the layers overflows.
    errors, sizes = (table.double() / 2.0 ** len(table).bit_length() for table in (errors, sizes))
    if (budget := total(errors, reference)) > 0:
        # An error of a whole number of bins may come out slightly above it through rounding. It is no bin more.
        cost = torch.ceil(errors / budget * bins * (1 - 1e-12)).clamp(max=bins + 1).long()
    else:
        cost = torch.where(errors > 0, bins + 1, 0)
    best = torch.full((len(cost) + 1, bins + 1), float("inf"), dtype=torch.float64, device="cpu")
    best[0] = 0.0  # [layers, b]: the smallest size of the first layers within b bins
    candidates = [
        [*zip(*rows, range(len(rows[0])), strict=True)] for rows in zip(cost.tolist(), sizes.tolist(), strict=True)
    ]
    for layer, of_layer in enumerate(candidates):
        before, following = best[layer], best[layer + 1]
        for q, size, _ in of_layer:
            if q <= bins:
                torch.minimum(following[q:], before[: bins + 1 - q] + size, out=following[q:])
    if best[-1, bins].isinf():
        return list(reference)
    b = int((best[-1] <= best[-1, bins]).nonzero()[0])  # the fewest bins that reach the smallest size
    picked: list[int] = []
    for layer in reversed(range(len(cost))):
        least, before = float(best[layer + 1, b]), best[layer]
        fits = (c for c in sorted(candidates[layer]) if c[0] <= b and float(before[b - c[0]]) + c[1] == least)
        q, _, c = next(fits)
        picked.insert(0, c)
        b -= q
    return list(reference) if total(sizes, picked) > total(sizes, reference) else picked


def total(table: Tensor, choices: Sequence[int]) -> float:
    """Returns the sum over the layers of table[layer, its choice], rounded only once, so that all processors agree."""
    return math.fsum(table.double()[torch.arange(len(table), device="cpu"), list(choices)].tolist())
