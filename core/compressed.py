"""The mean of CO2's pseudo-gradient in a narrow wire format, with error feedback (CO2Config.wire).

Two stages instead of an all-reduce, as in DoubleSqueeze (Tang et al., ICML 2019), every worker the server of one part:

1. each worker encodes its differences, cut into n equal chunks, and sends chunk j to worker j (all-to-all);
2. worker j decodes what it got, averages it in float32 (float64 for float64 parameters), encodes the mean, and sends it
   to all (all-gather). Every worker decodes the same bytes, its own chunk's too: results are bit-identical.

Each worker sends 2 (n - 1) / n of the encoded bytes, as a ring all-reduce does of plain ones. Both encodings leave an
error; error feedback adds it to what the same worker encodes next (Seide et al., 2014; Karimireddy et al., ICML 2019).
Buffers such as BatchNorm's statistics and the tail's scalars travel in the same messages as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from core import wire as wires
from core.collectives import AsyncMean, Stage
from core.errors import UserError
from core.wire import BLOCK, Rounding, Wire

SEGMENT = 1 << 18  # elements that are encoded at once: the temporaries stay in a CPU's cache
GPU_SEGMENT = 1 << 24  # few kernels, and temporaries of some 64 MiB


class CompressedMean(AsyncMean):
    """AsyncMean with one payload of bytes a stage; what lands in the buffers are means, so `scale` is 1.

    lossy: ids of the tensors to encode, which come first among those of their dtype; the others travel as they are.
    moved: the place in the tail of a number that is 0 where this worker contributes nothing. A mean of nothing is
    thrown away by its owner, and what error feedback holds back must not be lost with it: it waits.

    One worker alone encodes and decodes as well, so that it trains as one of many. Error feedback keeps a copy of the
    parameters more, and 1 / n for the second stage: `state`. On a CPU the first encoding happens inside launch().
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        lossy: set[int],
        wire: Wire,
        *,
        rounding: Rounding = "nearest",
        error_feedback: bool = True,
        moved: int | None = None,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ):
        _check(tensors, wire, group)
        super().__init__(tensors, group=group, **kwargs)
        self.scale = 1.0
        self.wire: Wire = wire
        self.moved = moved
        n = self.world_size
        self.sizes = [sum(t.numel() for t in ts if id(t) in lossy) for ts in self.members]
        self.chunks = [-(-size // (n * BLOCK)) * BLOCK for size in self.sizes]  # elements a worker, whole blocks
        rests = [b.numel - size for b, size in zip(self.buckets, self.sizes, strict=True)]
        self.rests = [-(-rest // n) for rest in rests]  # elements a worker
        self._errors: list[Tensor | None] = [None] * len(self.buckets)
        self._mean_errors: list[Tensor | None] = [None] * len(self.buckets)
        if error_feedback:
            pairs = list(zip(self.buckets, self.chunks, strict=True))
            own = [b.flat.new_zeros(n * chunk) for b, chunk in pairs]
            means = [b.flat.new_zeros(chunk) for b, chunk in pairs]
            self._errors, self._mean_errors = [*own], [*means]
            self.state = {"error_feedback": own, "mean_error_feedback": means}
        self._generator = torch.Generator(self.device) if rounding == "stochastic" else None
        self._segment = GPU_SEGMENT if self.device.type == "cuda" else SEGMENT

    def _stages(self) -> Iterator[Stage]:
        others = self.world_size - 1
        sent = self._outgoing()
        received = sent
        if self.group is not None:
            received = torch.empty_like(sent)
            yield [_all_to_all(received, sent, self.group)], others * sent.shape[1]
        mean = self._average(received)
        means = mean[None]
        if self.group is not None:
            means = mean.new_empty(self.world_size, len(mean))
            yield [_all_gather(means, mean, self.group)], others * len(mean)
        self._unpack(means)

    def _layout(self) -> list[int]:
        """Bytes of the payload for one worker: every bucket's encoded chunk, then every bucket's share of the rest."""
        encoded = [wires.nbytes(self.wire, chunk) for chunk in self.chunks]
        return encoded + [rest * b.flat.element_size() for rest, b in zip(self.rests, self.buckets, strict=True)]

    def _tail_bytes(self) -> int:
        return self.tail * self.buckets[0].flat.element_size()

    # -- the first stage --------------------------------------------------------------------------------------

    def _outgoing(self) -> Tensor:
        """uint8 [workers, bytes]: row j is for worker j. The tail goes to everyone."""
        self._seed(0)
        n, count = self.world_size, len(self.buckets)
        payload = torch.empty(n, sum(self._layout()) + self._tail_bytes(), dtype=torch.uint8, device=self.device)
        parts = payload.split([*self._layout(), self._tail_bytes()], dim=1)
        moved = self._has_moved(self.tail_view)
        for i, (bucket, size, chunk, rest) in enumerate(
            zip(self.buckets, self.sizes, self.chunks, self.rests, strict=True)
        ):
            for j in range(n):
                piece = bucket.flat[:size][j * chunk : (j + 1) * chunk]
                error = self._errors[i]
                error = None if error is None else error[j * chunk : (j + 1) * chunk]
                self._encode(pad(piece, (0, chunk - len(piece))), parts[i][j], error, moved)
            rows = pad(bucket.flat[size : bucket.numel], (0, n * rest - (bucket.numel - size))).view(n, rest)
            parts[count + i].copy_(rows.view(torch.uint8))
        parts[-1].copy_(self.tail_view.contiguous().view(torch.uint8).expand(n, -1))
        return payload

    def _has_moved(self, tail: Tensor) -> Tensor | None:
        """0-d bool on the device; None when there is no such number."""
        return None if self.moved is None else tail[self.moved] != 0

    def _encode(self, values: Tensor, payload: Tensor, error: Tensor | None, moved: Tensor | None) -> None:
        """Fills payload with Q(d + e), e <- d + e - Q(d + e); without movement with Q(d), e <- e + d - Q(d)."""
        step = self._segment
        for i, part in enumerate(payload.split(wires.nbytes(self.wire, step))):
            where = slice(i * step, (i + 1) * step)
            send = values[where]
            if error is None:
                part.copy_(wires.encode(send, self.wire, self._generator))
                continue
            kept = error[where].add_(send)
            part.copy_(
                wires.encode(kept if moved is None else torch.where(moved, kept, send), self.wire, self._generator)
            )
            kept.sub_(wires.decode(part, self.wire, kept.dtype))

    def _seed(self, stage: int) -> None:
        """Rounds at random in the same way in a resumed run, and differently on every worker."""
        if self._generator is not None:
            self._generator.manual_seed(seed(self.launched, self.rank, self.world_size, stage))

    # -- the second stage -------------------------------------------------------------------------------------

    def _average(self, received: Tensor) -> Tensor:
        """uint8 [workers, bytes] of this worker's chunk -> uint8 [bytes], their mean; leaves the tail's mean in place.

        Sums go in rank order: the tail's are taken by every worker for itself, and have to agree.
        """
        self._seed(1)
        parts = received.split([*self._layout(), self._tail_bytes()], dim=1)
        self.tail_view.copy_(_raw_mean(parts[-1], self.buckets[0].flat.dtype))
        moved = self._has_moved(self.tail_view)
        payload = received.new_empty(sum(self._layout()))
        out = payload.split(self._layout())
        count = len(self.buckets)
        for i, (bucket, error) in enumerate(zip(self.buckets, self._mean_errors, strict=True)):
            mean = bucket.flat.new_zeros(self.chunks[i])
            for row in parts[i]:
                self._decode(row, mean, add=True)
            self._encode(mean.div_(self.world_size), out[i], error, moved)
            out[count + i].copy_(_raw_mean(parts[count + i], bucket.flat.dtype).view(torch.uint8))
        return payload

    def _decode(self, payload: Tensor, to: Tensor, *, add: bool = False) -> None:
        """to [at most the payload's elements]: what comes beyond is padding."""
        parts = payload.split(wires.nbytes(self.wire, self._segment))
        for target, part in zip(to.split(self._segment), parts, strict=False):
            values = wires.decode(part, self.wire, to.dtype)[: len(target)]
            target.add_(values) if add else target.copy_(values)

    def _unpack(self, means: Tensor) -> None:
        """uint8 [workers, bytes], row j the mean of chunk j -> the buffers."""
        parts = means.split(self._layout(), dim=1)
        count = len(self.buckets)
        for i, (bucket, size, chunk) in enumerate(zip(self.buckets, self.sizes, self.chunks, strict=True)):
            for j, row in enumerate(parts[i]):
                self._decode(row, bucket.flat[:size][j * chunk : (j + 1) * chunk])
            rest = _raw(parts[count + i], bucket.flat.dtype).view(-1)
            bucket.flat[size : bucket.numel].copy_(rest[: bucket.numel - size])


def _raw(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, bytes] -> [rows, elements]; the clone is aligned."""
    rows, size = payload.shape
    return payload.flatten().clone().view(dtype).view(rows, size // dtype.itemsize)


def _raw_mean(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, bytes] -> [elements], summed in the rows' order."""
    rows = _raw(payload, dtype)
    total = torch.zeros_like(rows[0])
    for row in rows:
        total.add_(row)
    return total.div_(len(rows))


def _all_to_all(to: Tensor, source: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_to_all_single(to, source, group=group, async_op=True)
    assert work is not None
    return work


def _all_gather(to: Tensor, source: Tensor, group: dist.ProcessGroup) -> dist.Work:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the old name is deprecated
    work = gather(to.view(-1), source, group=group, async_op=True)
    assert work is not None
    return work


def _check(tensors: Sequence[Tensor], wire: str, group: dist.ProcessGroup | None) -> None:
    """Refuses what was never run, rather than to send something else than asked for."""
    remedy = "use wire float32"
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise UserError(
            f"wire={wire!r} with parameters on {', '.join(devices)}: they have to lie on one device, or {remedy}"
        )
    kind = tensors[0].device.type
    if not dist.is_initialized():
        return
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    backend = backends.get(kind, "no")
    if backend not in ("gloo", "nccl"):
        raise UserError(f"wire={wire!r} over {backend} backend for {kind} tensors: only gloo and nccl do, or {remedy}")


def seed(launched: int, rank: int, world_size: int, stage: int) -> int:
    """Of stochastic rounding: another for every mean, worker and stage."""
    return (launched * world_size + rank) * 2 + stage
