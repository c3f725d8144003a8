"""Reducers of workers that come and go. They reduce copies of the buckets, so that a failed reduction can be repeated.

Over narrow formats, error feedback follows three rules:

- Before a reduction, the worker's own residual joins the payload in the bucket. The bucket keeps this sum until the
  average counts. So a repeated reduction sends the same values, cut for the new number of workers.
- Each attempt begins with the same residual of averages, of which the reducer keeps a copy.
- If the number of workers or this worker's rank changes, its residual of averages joins its own residual.

A newcomer's residuals are zero. The residuals of a lost worker are lost: less than one quantum of each element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from ..buckets import Bucket, Part, Scalars, copy
from ..comm import AsyncAllReduce, Reducer
from ..compression.formats import NarrowFormat
from ..compression.quantized import Quantized, nothing_held_back
from ..config import CompressionConfig


class ElasticReducer(Reducer):
    """Sums copies of the buckets in their own precision."""

    def count(self, rank: int, workers: int, counting: int) -> None:  # noqa: ARG002
        """Prepares for the next attempt.

        Args:
            rank: This worker's rank.
            workers: Number of workers.
            counting: Number of workers that count in the average. The other workers send zeros.
        """
        self.scale = 1 / counting

    def begin(self, copies: list[Tensor]) -> None:
        """Begins an attempt to reduce `copies`. The caller then copies the buckets' flat tensors there."""
        self.flats = copies

    def undo(self) -> None:
        """Undoes a failed attempt. The buckets still hold what this worker has sent."""


class ElasticQuantized(Quantized, ElasticReducer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Averages copies of the buckets in a narrow format.

    Error feedback costs one copy of the parameters, and 2 / n of a copy for the residual of averages. While the number
    of workers changes, it costs one more copy.

    Args:
        buckets: The method's buckets.
        scalars: The scalars that are summed with them.
        compression: The format, and whether to keep residuals.
    """

    def __init__(self, buckets: Sequence[Bucket], scalars: Scalars, compression: CompressionConfig):
        self._sent, self._sent_scalars, self._compression = buckets, scalars, compression
        self._means_before: list[Tensor] = []
        self._make(0, 1)

    def _make(self, rank: int, workers: int, memory: tuple[list[Tensor], list[Tensor]] | None = None) -> None:
        kind, feeds_back = cast(NarrowFormat, self._compression.format), self._compression.error_feedback
        super().__init__(self._sent, self._sent_scalars, rank, workers, kind, feeds_back, memory)
        self._own, self._means = self.state.values() if self.state else ([], [])

    def count(self, rank: int, workers: int, counting: int) -> None:
        if (rank, workers) != (self.rank, self.world_size):
            memory = None
            if self.state:
                own, means = nothing_held_back(self._sent, workers).values()
                memory = own, means
                for bucket, chunk, before, mean, new in zip(
                    self._sent, self.chunks, self._own, self._means, own, strict=True
                ):
                    part = before[: bucket.numel][self.rank * chunk :][:chunk]
                    part.add_(mean[: len(part)], alpha=counting)  # the average divides by as many
                    new[: bucket.numel].copy_(before[: bucket.numel])
            self._make(rank, workers, memory)
        self.scale = workers / counting  # the average is over all workers

    def begin(self, copies: list[Tensor]) -> None:
        moved = self._moved()
        for bucket, own in zip(self._sent, self._own, strict=False):
            bucket.payload.addcmul_(own[: bucket.numel], moved.to(own.dtype))
            own.masked_fill_(moved, 0)
        self._means_before = [mean.clone() for mean in self._means]
        self.buckets = []
        for b, flat in zip(self._sent, copies, strict=True):
            self.buckets.append(Part(flat, b.numel, flat[: b.numel], flat[b.start : b.end], flat[b.end :]))
        self.scalars = Scalars(self._sent_scalars.sizes)
        self.scalars.attach(self.buckets[0].scalars)

    def undo(self) -> None:
        moved = self._moved()  # without movement the payload is zero, so the own residual has stayed
        for own in self._own:
            own.masked_fill_(moved, 0)
        copy(self._means, self._means_before)

    def _moved(self) -> Tensor:
        """Returns whether this worker had moved when it sent, 0-d bool."""
        return self._sent_scalars["steps"] * self._sent_scalars["weight"] != 0


def make_reducer(
    compression: CompressionConfig, buckets: Sequence[Bucket], scalars: Scalars, allreduce: AsyncAllReduce
) -> ElasticReducer:
    """Makes the reducer of an elastic method."""
    if compression.format == "float32":
        return ElasticReducer([b.flat for b in buckets], allreduce.world_size, buckets)
    return ElasticQuantized(buckets, scalars, compression)
