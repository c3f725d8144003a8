"""Low rank: a matrix as two factors, found by one power iteration a reduction (PowerSGD, Vogels et al., NeurIPS 2019).

torch's powerSGD_hook does the same with one rank for all layers, and only as a hook of DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import Scalars
from ..groups import Stage, all_reduce

ROUNDING = 16  # epsilons of a column's norm: what is left of it below that is rounding


@dataclass(frozen=True)
class Factored:
    """A layer as factors of rank r. values, error: [rows, columns] views; the product replaces the values. q: [columns,
    r], of the iteration before; written."""

    values: Tensor
    error: Tensor
    q: Tensor


class LowRank:
    """The mean over the workers, projected, for layers of one dtype: with M the mean of d + e, P = orth(M Q),
    Q <- M^T P, D = P Q^T, and every worker keeps d + e - D. The two factors' sums cross as plain all-reduces. Workers
    hold the same bits where their processors are of one kind: each computes orth and P Q^T for itself. A column of Q of
    which M has nothing, or that is not finite, stays as it was: of zeros orth would make the first unit vectors, and of
    a matrix whose first rows nobody uses, as of an embedding, nothing would ever be sent again."""

    def __init__(self, layers: Sequence[Factored], scalars: Scalars, world_size: int):
        self.layers, self.scalars, self.world_size = layers, scalars, world_size

    def stages(self, group: dist.ProcessGroup | None) -> Iterator[Stage]:
        moved = self.scalars["steps"] * self.scalars["weight"] != 0  # a copy: the scalars become their means
        sends = []
        for layer in self.layers:
            kept = layer.error.add_(layer.values)
            sends.append(torch.where(moved, kept, layer.values))
        flat, factors = _flat([product(m, layer.q) for m, layer in zip(sends, self.layers, strict=True)])
        if group is not None:
            yield all_reduce([flat], group)
        orthogonal = [orthonormal(p) for p in factors]  # of a sum it is the same as of the mean
        flat, factors = _flat([product(m.T, p) for m, p in zip(sends, orthogonal, strict=True)])
        if group is not None:
            yield all_reduce([flat], group)
        flat.div_(self.world_size)
        anyone = (self.scalars["steps"] * self.scalars["weight"] != 0).to(
            flat.dtype
        )  # else the mean is thrown away by its owner
        for layer, p, q in zip(self.layers, orthogonal, factors, strict=True):
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
    return flat, [
        part.view(m.shape) for part, m in zip(flat.split([m.numel() for m in matrices]), matrices, strict=True)
    ]
