"""Reducers of workers that come and go. They reduce copies of the buckets, so that a failed reduction can be repeated.

Over narrow formats, error feedback follows three rules:

- Before a reduction, the worker's own residual joins the payload in the bucket. The bucket keeps this sum until the
  average counts. So a repeated reduction sends the same values, cut for the new number of workers.
- Each attempt begins with the same residual of averages, of which the reducer keeps a copy.
- If the number of workers or this worker's rank changes, its residual of averages joins its own residual.

A newcomer's residuals are zero. The residuals of a lost worker are lost: less than one quantum of each element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch.distributed as dist
from torch import Tensor

from ..buckets import Bucket, BucketShare, Part, Scalars, copy
from ..comm import Reducer, Stage, sum_flats
from ..compression.formats import NarrowFormat
from ..compression.quantized import Quantized, nothing_held_back
from ..config import CompressionConfig
from ..local_update import OWN_SCALARS


class ElasticReducer(Reducer):
    """Sums copies of the buckets, or of a fragment's parts of them, in their own precision.

    The collectives sum `copies`, one flat copy per bucket. An empty list makes new ones.
    """

    def __init__(self, buckets: Sequence[Bucket | BucketShare]):
        self.buckets, self.scale, self.copies = buckets, 1.0, list[Part]()
        self.state: dict[str, list[Tensor]] = {}

    @property
    def live(self) -> list[Tensor]:
        """This worker's part, and later the sums that count. The payload of a bucket precedes its other values."""
        return [t for bucket in self.buckets for t in (bucket.payload, bucket.rest)]

    def begin(self, rank: int, workers: int, counting: int) -> None:  # noqa: ARG002
        """Begins an attempt with copies of what this worker sends.

        This worker has `rank` among `workers`. `counting` workers count in the average, and the rest sends zeros.
        """
        self.scale = 1 / counting
        if [len(part.flat) for part in self.copies] != [len(b.payload) + len(b.rest) for b in self.buckets]:
            self.copies = []
            for b in self.buckets:
                flat, ends = b.flat.new_empty(len(b.payload) + len(b.rest)), len(b.payload) + len(b.values)
                self.copies.append(Part(flat, b.numel, flat[: b.numel], flat[b.numel : ends], flat[ends:]))
        copy(self._copied, self.live)

    def undo(self) -> None:
        """Undoes a failed attempt. The buckets still hold what this worker has sent."""

    def deliver(self) -> None:
        """Copies the sums to the buckets, because they count."""
        copy(self.live, self._copied)

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:  # noqa: ARG002
        for bucket, part in zip(self.buckets, self.copies, strict=True):
            if group is not None:
                flats = [part.flat] if len(bucket.sent()) == 1 else [part.payload, part.flat[part.numel :]]
                yield sum_flats(flats, group)

    @property
    def _copied(self) -> list[Tensor]:
        """The copies of `live`."""
        return [t for part in self.copies for t in (part.payload, part.flat[part.numel :])]


class ElasticQuantized(ElasticReducer):
    """Averages copies of the buckets in a narrow format. Each attempt is a Quantized of its own.

    Error feedback costs one copy of the parameters, and 2 / n of a copy for the residual of averages. While the number
    of workers changes, it costs one more copy.
    """

    def __init__(self, buckets: Sequence[Bucket | BucketShare], scalars: Scalars, compression: CompressionConfig):
        super().__init__(buckets)
        self.kind, self._scalars, self._rank, self._workers = compression.format, scalars, 0, 1
        self.state = nothing_held_back(buckets, 1)
        self._means_before: list[Tensor] = []

    def begin(self, rank: int, workers: int, counting: int) -> None:
        if self.state and (rank, workers) != (self._rank, self._workers):
            before, self.state = self.state, nothing_held_back(self.buckets, workers)
            for bucket, own, mean, new, _ in zip(self.buckets, *before.values(), *self.state.values(), strict=True):
                part = own[: bucket.numel][self._rank * len(mean) :][: len(mean)]
                part.add_(mean[: len(part)], alpha=counting)  # the average divides by as many
                new[: bucket.numel].copy_(own[: bucket.numel])
        self._rank, self._workers = rank, workers
        moved, (own, means) = self._moved(), self.state.values()
        for bucket, residual in zip(self.buckets, own, strict=False):
            bucket.payload.addcmul_(residual[: bucket.numel], moved.to(residual.dtype))
            residual.masked_fill_(moved, 0)
        self._means_before = [mean.clone() for mean in means]
        super().begin(rank, workers, counting)
        self.scale = workers / counting  # the average is over all workers
        (scalars := Scalars(OWN_SCALARS)).attach(self.copies[0].scalars[: len(OWN_SCALARS)])
        self.attempt = Quantized(self.copies, scalars, rank, workers, cast(NarrowFormat, self.kind), (own, means))

    def undo(self) -> None:
        moved, (own, means) = self._moved(), self.state.values()
        for residual in own:  # without movement the payload is zero, so the own residual has stayed
            residual.masked_fill_(moved, 0)
        copy(means, self._means_before)

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        yield from self.attempt.stages(group, number)

    def _moved(self) -> Tensor:
        """Returns whether this worker had moved when it sent, 0-d bool."""
        return self._scalars["steps"] * self._scalars["weight"] != 0
