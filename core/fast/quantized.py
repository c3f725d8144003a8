"""The mean of CO2's pseudo-gradient in a narrow wire format, with error feedback (CO2Config.wire).

Two stages instead of an all-reduce, as in DoubleSqueeze (Tang et al., ICML 2019), every worker the server of one part:

1. each worker encodes its differences, cut into n equal chunks, and sends chunk j to worker j (all-to-all);
2. worker j decodes what it got, averages it in float32 (float64 for float64 parameters), encodes the mean, and sends it
   to all (all-gather). Every worker decodes the same bytes, its own chunk's too: results are bit-identical.

Each worker sends 2 (n - 1) / n of the encoded bytes, as a ring all-reduce does of plain ones. Both encodings leave an
error; error feedback adds it to what the same worker encodes next (Seide et al., 2014; Karimireddy et al., ICML 2019).
Buffers such as BatchNorm's statistics and the scalars travel in the same messages as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UserError
from ..flat import Bucket, Scalars
from ..groups import Stage, backend_for
from . import wire as wires
from .wire import BLOCK, ROUNDINGS, WIRES, Rounding, Wire

SEGMENT = 1 << 18  # elements that are encoded at once: the temporaries stay in a CPU's cache
GPU_SEGMENT = 1 << 24  # few kernels, and temporaries of some 64 MiB


@dataclass(frozen=True)
class WireConfig:
    """How the pseudo-gradient crosses the network."""

    format: Wire | Literal["auto"] = "float32"
    """float32 (float64 for float64 parameters, a plain all-reduce), or rounded to bfloat16, float16, int8, int4. auto,
    with tau auto: float32, or int8 where means are fresher over it."""
    rounding: Rounding = "nearest"
    """Of the narrow formats: nearest, or stochastic, whose mean over many rounds is exact."""
    error_feedback: bool = True
    """With a narrow format: what rounding left out goes along in the next round, for a copy of the parameters."""

    def __post_init__(self) -> None:
        for name, value, known in (("format", self.format, (*WIRES, "auto")), ("rounding", self.rounding, ROUNDINGS)):
            if value not in known:
                raise UserError(f"wire.{name}={value!r}: choose one of {', '.join(known)}")
        if self.format == "float32" and self.rounding != "nearest":
            raise UserError(f"wire.rounding={self.rounding!r}: float32 rounds nothing; set wire.format to a narrow one")

    def check(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        """Refuses what was never run, rather than to send something else than asked for."""
        if self.format == "float32":
            return
        what, remedy = f"wire.format={self.format!r}", "use wire.format float32"
        devices = sorted({str(t.device) for t in params})
        if len(devices) > 1:
            raise UserError(
                f"{what} with parameters on {', '.join(devices)}: they have to lie on one device, or {remedy}"
            )
        if not params or not dist.is_initialized():
            return
        kind, backend = params[0].device.type, backend_for(group, params[0].device)
        if backend not in ("gloo", "nccl"):
            raise UserError(f"{what} over {backend} backend for {kind} tensors: only gloo and nccl do, or {remedy}")

    @property
    def choices(self) -> dict[str, float]:
        """The formats to choose from, the widest first -> bytes an element. The loss over int4 was not measured, so
        auto leaves it out."""
        known: tuple[Wire, ...] = ("float32", "int8") if self.format == "auto" else (self.format,)
        return {wire: wires.BLOCK_BYTES.get(wire, 4 * BLOCK) / BLOCK for wire in known}

    def reducer(self, buckets: Sequence[Bucket], scalars: Scalars, rank: int, world_size: int) -> Quantized:
        """What sends the buckets in this format, unless that is float32."""
        assert self.format not in ("float32", "auto")
        return Quantized(buckets, scalars, rank, world_size, self)


class Quantized:
    """The reducer of a narrow format: one payload of bytes a stage. What lands are means, so `scale` is 1.

    Only the parameters' part of a bucket is rounded; the rest travels as it is. Where nobody has moved (the
    scalars "steps" and "weight") the mean is thrown away by its owner; what error feedback holds back must not be lost
    with it: it waits, as does that of a worker that is left out.

    One worker alone encodes and decodes as well, so that it trains as one of many. Error feedback keeps a copy of the
    parameters more, and 1 / n for the second stage: `state`. On a CPU the first encoding happens inside launch().
    """

    def __init__(self, buckets: Sequence[Bucket], scalars: Scalars, rank: int, world_size: int, config: WireConfig):
        self.buckets, self.scalars, self.config = buckets, scalars, config
        self.rank, self.world_size = rank, world_size
        assert config.format != "auto"
        self.wire: Wire = config.format
        self.scale = 1.0
        self.device = buckets[0].flat.device
        self.chunks = [-(-b.numel // (world_size * BLOCK)) * BLOCK for b in buckets]  # elements a worker, whole blocks
        self.rests = [-(-(len(b.rest) - len(b.scalars)) // world_size) for b in buckets]  # elements a worker
        self.state: dict[str, list[Tensor]] = {}
        self._errors: list[Tensor | None] = [None] * len(buckets)
        self._mean_errors: list[Tensor | None] = [None] * len(buckets)
        if config.error_feedback:
            pairs = list(zip(buckets, self.chunks, strict=True))
            own = [b.flat.new_zeros(world_size * chunk) for b, chunk in pairs]
            means = [b.flat.new_zeros(chunk) for b, chunk in pairs]
            self._errors, self._mean_errors = [*own], [*means]
            self.state = {"error_feedback": own, "mean_error_feedback": means}
        self._generator = torch.Generator(self.device) if config.rounding == "stochastic" else None
        self._segment = GPU_SEGMENT if self.device.type == "cuda" else SEGMENT

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        others = self.world_size - 1
        yield [], 0  # the encoding, too, is done in the background
        self._seed(number, 0)
        sent = self._outgoing()
        received = sent
        if group is not None:
            received = torch.empty_like(sent)
            yield [_all_to_all(received, sent, group)], others * sent.shape[1]
        self._seed(number, 1)
        mean = self._average(received)
        means = mean[None]
        if group is not None:
            means = mean.new_empty(self.world_size, len(mean))
            yield [_all_gather(means, mean, group)], others * len(mean)
        self._unpack(means)

    def _layout(self) -> list[int]:
        """Bytes of the payload for one worker: every bucket's encoded chunk, then every bucket's share of the rest."""
        encoded = [wires.nbytes(self.wire, chunk) for chunk in self.chunks]
        return encoded + [rest * b.flat.element_size() for rest, b in zip(self.rests, self.buckets, strict=True)]

    # -- the first stage --------------------------------------------------------------------------------------

    def _outgoing(self) -> Tensor:
        """uint8 [workers, bytes]: row j is for worker j. The scalars go to everyone."""
        n, count, scalars = self.world_size, len(self.buckets), self.buckets[0].scalars
        layout = [*self._layout(), scalars.nbytes]
        message = torch.empty(n, sum(layout), dtype=torch.uint8, device=self.device)
        parts = message.split(layout, dim=1)
        moved = self.scalars["steps"] * self.scalars["weight"] != 0
        for i, (bucket, chunk, rest) in enumerate(zip(self.buckets, self.chunks, self.rests, strict=True)):
            for j in range(n):
                piece = bucket.payload[j * chunk : (j + 1) * chunk]
                error = self._errors[i]
                error = None if error is None else error[j * chunk : (j + 1) * chunk]
                self._encode(pad(piece, (0, chunk - len(piece))), parts[i][j], error, moved)
            rows = pad(bucket.values, (0, n * rest - len(bucket.values))).view(n, rest)
            parts[count + i].copy_(rows.view(torch.uint8))
        parts[-1].copy_(scalars.clone().view(torch.uint8).expand(n, -1))  # the clone is aligned
        return message

    def _encode(self, values: Tensor, payload: Tensor, error: Tensor | None, moved: Tensor) -> None:
        """Fills payload with Q(d + e), e <- d + e - Q(d + e); without movement with Q(d), e <- e + d - Q(d).
        moved: 0-d bool on the device."""
        step = self._segment
        for i, part in enumerate(payload.split(wires.nbytes(self.wire, step))):
            where = slice(i * step, (i + 1) * step)
            send = values[where]
            if error is None:
                part.copy_(wires.encode(send, self.wire, self._generator))
                continue
            kept = error[where].add_(send)
            part.copy_(wires.encode(torch.where(moved, kept, send), self.wire, self._generator))
            kept.sub_(wires.decode(part, self.wire, kept.dtype))

    def _seed(self, number: int, stage: int) -> None:
        """Rounds at random in the same way in a resumed run, and differently on every worker."""
        if self._generator is not None:
            self._generator.manual_seed(seed(number, self.rank, self.world_size, stage))

    # -- the second stage -------------------------------------------------------------------------------------

    def _average(self, received: Tensor) -> Tensor:
        """uint8 [workers, bytes] of this worker's chunk -> uint8 [bytes], their mean; the scalars become their mean.

        Sums go in rank order: the scalars' are taken by every worker for itself, and have to agree.
        """
        scalars = self.buckets[0].scalars
        parts = received.split([*self._layout(), scalars.nbytes], dim=1)
        scalars.copy_(_raw_mean(parts[-1], scalars.dtype))
        moved = self.scalars["steps"] * self.scalars["weight"] != 0
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
        for i, (bucket, chunk) in enumerate(zip(self.buckets, self.chunks, strict=True)):
            for j, row in enumerate(parts[i]):
                self._decode(row, bucket.payload[j * chunk : (j + 1) * chunk])
            values = _raw(parts[count + i], bucket.flat.dtype).view(-1)
            bucket.values.copy_(values[: len(bucket.values)])


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


def seed(number: int, rank: int, world_size: int, stage: int) -> int:
    """Of stochastic rounding: another for every reduction, worker and stage."""
    return (number * world_size + rank) * 2 + stage
