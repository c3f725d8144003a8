"""What sends layers in other ways than core/wires does: top-k and low rank, the layers of one dtype together.

Both feed errors back: what a worker does not send, it adds to what it sends next. Where nobody has moved (the scalars
"steps" and "weight") the mean is thrown away by its owner, and what is held back waits.
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
    """0-d bool, a copy: the scalars become their means."""
    return scalars["steps"] * scalars["weight"] != 0


# -- top-k --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    """A layer's k largest elements. values, error: 1-d views; what the mean leaves there replaces the values."""

    values: Tensor
    error: Tensor
    k: int


def top_k(
    layers: Sequence[Sparse], scalars: Scalars, world_size: int, group: dist.ProcessGroup | None
) -> Iterator[Stage]:
    """The mean over the workers of each worker's top-k, which everyone gathers. The message is all values, then all
    indices in their layers, int32. Sums go in rank order, so that all workers hold the same bits."""
    sent = _outgoing(layers, moved(scalars))
    received = sent[None]
    if group is not None:
        received = sent.new_empty(world_size, len(sent))
        yield all_gather(received, sent, group)
    _average(layers, received)


def _outgoing(layers: Sequence[Sparse], moved: Tensor) -> Tensor:
    """uint8 [bytes]. With movement of d + e, e <- d + e - sent; without, of d, e <- e + d - sent."""
    values, indices = [], []
    for layer in layers:
        kept = layer.error.add_(layer.values)
        send = torch.where(moved, kept, layer.values)
        where = largest(send.abs(), layer.k)
        values.append(send[where])
        indices.append(where.int())
        kept[where] -= values[-1]
    return torch.cat([torch.cat(values).view(torch.uint8), torch.cat(indices).view(torch.uint8)])


def _average(layers: Sequence[Sparse], received: Tensor) -> None:
    """uint8 [workers, bytes] -> the mean, in the layers' values."""
    dtype, counts = layers[0].values.dtype, [layer.k for layer in layers]
    values_end = sum(counts) * dtype.itemsize
    for layer in layers:
        layer.values.zero_()
    for row in received:
        values = row[:values_end].clone().view(dtype).split(counts)
        indices = row[values_end:].clone().view(torch.int32).split(counts)
        for layer, value, index in zip(layers, values, indices, strict=True):
            layer.values.index_add_(0, index, value)  # no index comes twice in a row
    for layer in layers:
        layer.values.div_(len(received))


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """int64 [k]: the places of the k largest, in any order, NaN being the largest. magnitudes: [n], none negative.

    On a CPU topk takes many times as long as reading does: of many elements it gets those alone that reach a threshold
    which, by a sample, more than k of them do."""
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
    r], of the iteration before; written."""

    values: Tensor
    error: Tensor
    q: Tensor


def low_rank(
    layers: Sequence[Factored], scalars: Scalars, world_size: int, group: dist.ProcessGroup | None
) -> Iterator[Stage]:
    """The mean over the workers, projected: with M the mean of d + e, P = orth(M Q), Q <- M^T P, D = P Q^T, and every
    worker keeps d + e - D; one power iteration a reduction (PowerSGD, Vogels et al., NeurIPS 2019; torch's
    powerSGD_hook knows one rank for all layers, and DistributedDataParallel alone).

    The two factors' sums cross as plain all-reduces. Workers hold the same bits where their processors are of one kind:
    each computes orth and P Q^T for itself. A column of Q of which M has nothing, or that is not finite, stays as it
    was: of zeros orth would make the first unit vectors, and of a matrix whose first rows nobody uses, as of an
    embedding, nothing would ever be sent again."""
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
        layer.q.copy_(torch.where(usable(q), q, layer.q))
        torch.matmul(p, q.T, out=layer.values)
        layer.error.addcmul_(layer.values, anyone, value=-1)


def product(matrix: Tensor, thin: Tensor) -> Tensor:
    """matrix @ thin, for few columns. Transposed, for of a few columns a CPU's product takes up to six times as long as
    of a few rows."""
    return (thin.T.contiguous() @ matrix.T).T


def orthonormal(p: Tensor) -> Tensor:
    """The Q of QR, with zeros for a column that depends on those before it but for rounding: QR would make it of that,
    unlike on other processors, and workers' own M^T P, which cancel in the mean alone, would land unlike."""
    q, r = torch.linalg.qr(p)
    depends = r.diagonal().abs() <= ROUNDING * torch.finfo(p.dtype).eps * torch.linalg.vector_norm(r, dim=0)
    return torch.where(depends, 0.0, q)  # of a NaN nothing is so


def usable(q: Tensor) -> Tensor:
    """bool [r]: which columns of q [columns, r] are finite, and not zero."""
    return q.isfinite().all(0) & (q != 0).any(0)


def fill(q: Tensor, filled: int, seed: int) -> None:
    """Draws the columns of q [columns, r] from `filled` on, alike on all workers: what a switch to a higher rank adds.
    The released code draws them from each rank's own random state."""
    if filled < q.shape[1]:
        draw = torch.Generator().manual_seed(seed)
        q[:, filled:] = torch.randn(q.shape[0], q.shape[1], generator=draw)[:, filled:].to(q)


def _flat(matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor of them all, and views of it in their shapes."""
    flat = torch.cat([m.reshape(-1) for m in matrices])
    parts = flat.split([m.numel() for m in matrices])
    return flat, [part.view(m.shape) for part, m in zip(parts, matrices, strict=True)]
