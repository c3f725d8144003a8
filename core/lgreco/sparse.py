"""Top-k: the largest elements of each layer with their indices, which everyone gathers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import Scalars
from ..groups import Stage, all_gather

SAMPLE = 1 << 13  # elements


@dataclass(frozen=True)
class Sparse:
    """A layer's k largest elements. values, error: 1-d views; what the mean leaves there replaces the values."""

    values: Tensor
    error: Tensor
    k: int


class TopK:
    """The mean over the workers of what each worker's top-k keeps, for layers of one dtype; what a worker does not
    send, it adds to what it sends next. The message is all values, then all indices in their layers, int32. Sums go in
    rank order, so that all workers hold the same bits."""

    def __init__(self, layers: Sequence[Sparse], scalars: Scalars, world_size: int):
        self.layers, self.scalars, self.world_size = layers, scalars, world_size
        self.counts = [layer.k for layer in layers]

    def stages(self, group: dist.ProcessGroup | None) -> Iterator[Stage]:
        sent = self._outgoing(self.scalars["steps"] * self.scalars["weight"] != 0)
        received = sent[None]
        if group is not None:
            received = sent.new_empty(self.world_size, len(sent))
            yield all_gather(received, sent, group)
        self._average(received)

    def _outgoing(self, moved: Tensor) -> Tensor:
        """uint8 [bytes]. With movement of d + e, e <- d + e - sent; without, of d, e <- e + d - sent."""
        values, indices = [], []
        for layer in self.layers:
            kept = layer.error.add_(layer.values)
            send = torch.where(moved, kept, layer.values)
            where = largest(send.abs(), layer.k)
            values.append(send[where])
            indices.append(where.int())
            kept[where] -= values[-1]
        return torch.cat([torch.cat(values).view(torch.uint8), torch.cat(indices).view(torch.uint8)])

    def _average(self, received: Tensor) -> None:
        """uint8 [workers, bytes] -> the mean, in the layers' values."""
        dtype, count = self.layers[0].values.dtype, sum(self.counts)
        for layer in self.layers:
            layer.values.zero_()
        for row in received:
            values = row[: count * dtype.itemsize].clone().view(dtype).split(self.counts)
            indices = row[count * dtype.itemsize :].clone().view(torch.int32).split(self.counts)
            for layer, value, index in zip(self.layers, values, indices, strict=True):
                layer.values.index_add_(0, index, value)  # no index comes twice in a row
        for layer in self.layers:
            layer.values.div_(self.world_size)


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """int64 [k]: where the k largest are, in any order, NaN being the largest. magnitudes: [n], none negative.

    On a CPU topk takes many times as long as reading does: of many elements it gets those that reach what, by a sample,
    more than k of them do."""
    n, stride = len(magnitudes), len(magnitudes) // SAMPLE
    few = 1.25 * k / n * SAMPLE + 16  # of the sample: more than k of all, almost surely
    if stride >= 8 and few < SAMPLE / 4 and not magnitudes.is_cuda:
        least = magnitudes[::stride].topk(int(few), sorted=False).values.amin()
        where = (magnitudes < least).logical_not_().nonzero().view(-1)  # NaN, too
        if k <= len(where) <= n / 4:
            return where[magnitudes[where].topk(k, sorted=False).indices]
    return magnitudes.topk(k, sorted=False).indices
