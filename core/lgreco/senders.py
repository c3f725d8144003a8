"""Top-k and low rank, which send the layers of one dtype together.

Both feed errors back: what a worker does not send, it adds to what it sends next. If nobody has moved (the scalars
"steps" and "weight"), the caller discards the mean, and what is held back waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import Scalars
from ..groups import Stage, all_gather, all_reduce

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
        yield all_reduce([flat], group)
    orthogonal = [orthonormal(p) for p in factors]  # of a sum it is the same as of the mean
    flat, factors = _flat([product(m.T, p) for m, p in zip(sends, orthogonal, strict=True)])
    if group is not None:
        yield all_reduce([flat], group)
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
