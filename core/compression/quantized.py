"""Averages over the workers in a compressed format, with error feedback.

CO2Config.compression and ddp_compression choose it. Two stages replace an all-reduce, as in DoubleSqueeze (Tang et al.,
ICML 2019), with every worker as the server of one part:

1. Each worker encodes its differences, cut into n equal chunks, and sends chunk j to worker j (all-to-all).
2. Worker j decodes the chunks that it received and averages them in float32 (float64 for float64 parameters). It
   encodes the average and sends it to all workers (all-gather). Every worker decodes the same bytes, its own chunk
   included, so the results are equal bit for bit.

Each worker sends 2 (n - 1) / n of the encoded bytes, as a ring all-reduce sends of uncompressed bytes. Both encodings
leave an error. Error feedback adds it to the next encoding of the same worker (Seide et al., 2014; Karimireddy et al.,
ICML 2019). The scalars, and buffers such as BatchNorm's statistics, travel uncompressed in the same messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..buckets import Bucket, BucketShare, Part, Scalars, has_triton
from ..comm import BACKGROUND, Reducer, Stage, all_gather
from ..outer import GPU_SEGMENT, SEGMENT
from . import formats as compressions
from .formats import BLOCK, BLOCK_BYTES, NarrowFormat

HELD_BACK = ("error_feedback", "mean_error_feedback")  # names of a checkpoint's tensors


def make_codec(device: torch.device) -> Any:
    """Returns Triton's kernels on CUDA if Triton is installed. A TritonCodec has the same methods as a SegmentCodec."""
    if not has_triton(device):
        return SegmentCodec(device)
    from .kernels import TritonCodec  # importing Triton takes a second

    return TritonCodec()


class SegmentCodec:
    """Encodes payloads as uint8 [workers, bytes], with worker j's chunk in row j, and decodes them.

    It calls the functions of core/compression/formats.py, one segment at a time. Rows need not be contiguous.
    """

    def __init__(self, device: torch.device):
        self._segment = GPU_SEGMENT if device.type == "cuda" else SEGMENT

    def encode(self, payload: Tensor, rows: Tensor, compression: NarrowFormat, error: Tensor, moved: Tensor) -> None:
        """Encodes the payload to rows.

        It stores Q(d + e), and sets e <- d + e - Q(d + e). Without movement it stores Q(d), and sets
        e <- e + d - Q(d).

        Args:
            payload: d, [numel], with zeros beyond it.
            rows: The encoded rows, uint8 [workers, bytes].
            compression: Name of the format.
            error: e, [workers x chunk].
            moved: Whether this worker has moved, 0-d bool on the device.
        """
        for where, part in self._segments(rows, compression):
            piece, held = payload[where], error[where]
            d = pad(piece, (0, len(held) - len(piece)))
            held.add_(d)
            part.copy_(compressions.encode(torch.where(moved, held, d), compression, lost=held).view(part.shape))

    def average(self, rows: Tensor, out: Tensor, compression: NarrowFormat, error: Tensor, moved: Tensor) -> None:
        """Sums the rows, all of one chunk, in their order and in the error's dtype.

        It encodes the average to out, uint8 [bytes].
        """
        mean = torch.zeros_like(error)
        for where, part in self._segments(rows, compression):
            at = where.start % max(1, len(mean))
            for row in compressions.decode(part.flatten(), compression, mean.dtype).view(len(part), -1):
                mean[at : at + len(row)].add_(row)
        self.encode(mean.div_(mean.new_full((), len(rows))), out[None], compression, error, moved)

    def decode(self, rows: Tensor, compression: NarrowFormat, payload: Tensor) -> None:
        """Decodes rows to payload, [numel]. Elements beyond it are padding."""
        for where, part in self._segments(rows, compression):
            target = payload[where]
            target.copy_(compressions.decode(part.flatten(), compression, payload.dtype)[: len(target)])

    def mean(self, rows: Tensor) -> Tensor:
        """Returns the average of [workers, elements], summed in the rows' order."""
        total = torch.zeros_like(rows[0])
        for row in rows:
            total.add_(row)
        return total.div_(total.new_full((), len(rows)))

    def _segments(self, rows: Tensor, compression: NarrowFormat) -> Iterator[tuple[slice, Tensor]]:
        """Yields a segment's place among the elements of all rows, and its bytes, uint8 [some rows, some bytes].

        Small rows go together, because their kernels cost more than their bytes. Several segments belong to one row.
        """
        blocks, step, start = rows.shape[1] // BLOCK_BYTES[compression], self._segment, 0
        for some in rows.split(max(1, step // max(1, blocks * BLOCK))):
            for part in some.split(compressions.nbytes(compression, step), dim=1):
                end = start + part.numel() // BLOCK_BYTES[compression] * BLOCK
                yield slice(start, end), part
                start = end


def moved(scalars: Scalars) -> Tensor:
    """Returns whether any worker has moved, 0-d bool. It is a copy, because the scalars become averages."""
    return scalars["steps"] * scalars["weight"] != 0


def chunk_of(numel: int, world_size: int) -> int:
    """Returns the number of elements in each worker's chunk, in whole blocks."""
    return -(-numel // (world_size * BLOCK)) * BLOCK


def nothing_held_back(
    buckets: Sequence[Bucket | BucketShare | Part], world_size: int, device: str | None = None
) -> dict[str, list[Tensor]]:
    """Returns zero residuals for both stages, one tensor per bucket, on `device` or else the bucket's device.

    They have [workers x chunk] and [chunk] elements.
    """
    pairs = [(b, chunk_of(b.numel, world_size)) for b in buckets]
    return {
        name: [b.flat.new_zeros(copies * chunk, device=device) for b, chunk in pairs]
        for name, copies in zip(HELD_BACK, (world_size, 1), strict=True)
    }


class Quantized(Reducer):
    """The reducer of a compressed format, with one message of bytes per stage. It returns averages, so `scale` is 1.

    Only the parameters' part of a bucket is rounded; all else is sent uncompressed. If no worker has moved (the scalars
    "steps" and "weight"), the caller discards the average, and the residuals stay, as they do for an excluded worker. A
    single worker encodes and decodes as well, so that it trains as one of many. The residuals cost one copy of the
    parameters, and 1 / n of a copy for the second stage.

    Args:
        buckets, scalars, rank, world_size: See Reducer.
        compression: The format of all buckets, or one format per bucket.
        memory: Residuals of both stages, see nothing_held_back. None allocates them.
        plain: The reducer of float32, if `become` may change the format.

    Attributes:
        held: The residuals by name. There are none in float32.
    """

    encodes: Sequence[str] = HELD_BACK  # the stages that round, by the names of their residuals

    def __init__(
        self,
        buckets: Sequence[Bucket | BucketShare | Part],
        scalars: Scalars,
        rank: int,
        world_size: int,
        compression: NarrowFormat | Sequence[NarrowFormat],
        memory: tuple[list[Tensor], list[Tensor]] | None = None,
        plain: Reducer | None = None,
    ):
        self.buckets, self.scalars, self.plain, self.changes = buckets, scalars, plain, plain is not None
        self.rank, self.world_size = rank, world_size
        self.device = buckets[0].flat.device
        self.chunks = [chunk_of(b.numel, world_size) for b in buckets]
        self._codec = make_codec(self.device)
        self._use(compression, memory)

    def _use(self, kind: Any, memory: tuple[list[Tensor], list[Tensor]] | None = None) -> None:
        """Uses a format, or one per bucket, with these residuals or new ones."""
        self.kind, formats = (kind, [kind] * len(self.buckets)) if isinstance(kind, str) else ("mixed", [*kind])
        self.compressions: list[Any] = formats
        narrow = self.kind != Reducer.kind
        self.scale = 1.0 if narrow or self.plain is None else self.plain.scale
        new = memory or (nothing_held_back(self.buckets, self.world_size).values() if narrow else ())
        self.held: dict[str, list[Tensor]] = dict(zip(self.encodes, new, strict=False))

    @property
    def state(self) -> dict[str, list[Tensor]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Residuals, with the same keys and shapes for any format: a checkpoint of another format fits."""
        zeros = {} if self.held else nothing_held_back(self.buckets, self.world_size, "cpu")
        return self.held or {name: zeros[name] for name in self.encodes}

    def become(self, kind: str) -> None:
        """Changes the format, if it may change, while nothing is in flight. Error feedback begins anew.

        On a GPU this must not run in the background's stream: memory that is freed there would be used again while that
        stream still reads it.
        """
        if self.changes and kind != self.kind:
            self._use(kind)

    @property
    def rests(self) -> list[int]:
        """How many of each bucket's values a worker averages, which may change between rounds."""
        return [-(-len(b.values) // self.world_size) for b in self.buckets]

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        exact = self.plain if self.kind == Reducer.kind else None
        yield from exact.stages(group, number) if exact else self._stages(group)

    def _stages(self, group: dist.ProcessGroup | None) -> Iterator[Stage]:
        """Yields the stages of a narrow format."""
        yield BACKGROUND  # the encoding
        sent = received = self._outgoing()
        if group is not None:
            received = torch.empty_like(sent)
            work = dist.all_to_all_single(received, sent, group=group, async_op=True)
            assert work is not None
            yield [work], (self.world_size - 1) * sent.shape[1]
        mean = self._average(received)
        means = mean[None]
        if group is not None and len(mean):
            means = mean.new_empty(self.world_size, len(mean))
            yield all_gather(means, mean, group)
        self._unpack(means)

    def of_bucket(self, i: int, group: dist.ProcessGroup | None, number: int, turn: int) -> Iterator[Stage]:  # noqa: ARG002
        memory: Any = [[flats[i]] for flats in self.held.values()]
        workers, compression = (self.rank, self.world_size), self.compressions[i]
        return Quantized([self.buckets[i]], self.scalars, *workers, compression, memory).stages(group, number)

    def _layout(self, stage: int) -> list[int]:
        """Returns the bytes for one worker: every bucket's encoded chunk, then every bucket's share of the rest."""
        chunks = self.chunks if stage < len(self.encodes) else [0] * len(self.chunks)
        encoded = [compressions.nbytes(c, chunk) for c, chunk in zip(self.compressions, chunks, strict=True)]
        return encoded + [rest * b.flat.element_size() for rest, b in zip(self.rests, self.buckets, strict=True)]

    def _outgoing(self) -> Tensor:
        """Returns the first stage's message, uint8 [workers, bytes], row j for worker j. Each row has the scalars."""
        n, count, scalars = self.world_size, len(self.buckets), self.buckets[0].scalars
        layout = [*self._layout(0), scalars.nbytes]
        message = torch.empty(n, sum(layout), dtype=torch.uint8, device=self.device)
        parts, own = message.split(layout, dim=1), moved(self.scalars)
        for i, (bucket, rest, error) in enumerate(zip(self.buckets, self.rests, self.held[HELD_BACK[0]], strict=True)):
            self._codec.encode(bucket.payload, parts[i], self.compressions[i], error, own)
            rows = pad(bucket.values, (0, n * rest - len(bucket.values))).view(n, rest)
            parts[count + i].copy_(rows.view(torch.uint8))
        parts[-1].copy_(scalars.clone().view(torch.uint8).expand(n, -1))  # the clone is aligned
        return message

    def _average(self, received: Tensor) -> Tensor:
        """Returns the averages that this worker sends, uint8 [bytes], from the messages to it, uint8 [workers, bytes].

        It also averages the scalars in rank order. Every worker does so for itself, and all must agree.
        """
        count, scalars, layout = len(self.buckets), self.buckets[0].scalars, self._layout(1)
        parts = received.split([*self._layout(0), scalars.nbytes], dim=1)
        scalars.copy_(self._codec.mean(_raw(parts[-1], scalars.dtype)))
        payload = received.new_empty(sum(layout))
        out = payload.split(layout)
        for i, bucket in enumerate(self.buckets):
            self._average_chunk(i, parts[i], out[i])
            values = self._codec.mean(_raw(parts[count + i], bucket.flat.dtype))
            out[count + i].copy_(values.view(torch.uint8))
        return payload

    def _average_chunk(self, i: int, rows: Tensor, out: Tensor) -> None:
        """Averages the workers' rows of a bucket's chunk, uint8 [workers, bytes], and encodes the average to out."""
        self._codec.average(rows, out, self.compressions[i], self.held[HELD_BACK[1]][i], moved(self.scalars))

    def _unpack(self, means: Tensor) -> None:
        """Decodes uint8 [workers, bytes], with the average of chunk j in row j, into the buckets."""
        parts, count = means.split(self._layout(1), dim=1), len(self.buckets)
        for i, bucket in enumerate(self.buckets):
            self._codec.decode(parts[i], self.compressions[i], bucket.payload)
            values = _raw(parts[count + i], bucket.flat.dtype).view(-1)
            bucket.values.copy_(values[: len(bucket.values)])


class OwnedQuantized(Quantized):
    """Sends differences in a compressed format to the workers that own the parts, which get their averages unrounded.

    The owners take the outer step on their parts, and send x itself, which is no difference and is not compressed. So
    there is one encoding, and one residual. Each payload has a whole number of blocks for each worker.
    """

    encodes = HELD_BACK[:1]

    def _average_chunk(self, i: int, rows: Tensor, out: Tensor) -> None:  # noqa: ARG002
        bucket = self.buckets[i]
        own = bucket.payload.view(self.world_size, -1)[self.rank]
        total, one = torch.zeros_like(own), torch.empty_like(own)
        for row in rows.split(1) if bucket.numel else ():
            self._codec.decode(row, self.compressions[i], one)
            total.add_(one)
        own.copy_(total.div_(self.world_size))


def _raw(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns uint8 [rows, bytes] as [rows, elements]. The clone is aligned."""
    rows, size = payload.shape
    return payload.flatten().clone().view(dtype).view(rows, size // dtype.itemsize)
