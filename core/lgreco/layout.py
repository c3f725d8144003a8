"""Where each layer's elements lie while an allocation holds: the layers of one format side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..flat import Bucket, copy
from ..wires.formats import BLOCK, INTS, Wire
from ..wires.quantized import Part, chunk_of
from .choices import Choice, Layer


class Memory:
    """A bucket's tensors that outlive an allocation: staging, where the layers are gathered; errors and means, what
    error feedback holds back of the worker's own and of the means that it encodes."""

    def __init__(self, bucket: Bucket, world_size: int):
        slack = len(INTS) * world_size * BLOCK  # each int format is padded to whole blocks a worker
        self.staging = bucket.flat.new_zeros(bucket.numel + slack + len(bucket.values))
        self.errors = bucket.flat.new_zeros(bucket.numel + slack)
        self.means = bucket.flat.new_zeros(-(-bucket.numel // world_size) + len(INTS) * BLOCK)


class Layout:
    """For one bucket, the `number`-th, and one allocation: a flat order of its layers, first those of each int format,
    each padded to whole blocks a worker; then top-k's and low rank's; last those that travel as they are, and behind
    them the buffers.

    values, held: layer -> its elements in staging and in errors, 1-d, in the bucket's own order. raw: (start, elements)
    in staging of the layers that travel as they are. of_kind: kind -> layers.
    """

    def __init__(
        self,
        number: int,
        bucket: Bucket,
        memory: Memory,
        layers: Sequence[Layer],
        allocation: Sequence[Choice],
        world_size: int,
    ):
        self.bucket, self.memory, self.world_size = bucket, memory, world_size
        mine = [i for i, layer in enumerate(layers) if layer.bucket == number]
        self.of_kind = {k: [i for i in mine if allocation[i].kind == k] for k in ("int", "top", "rank", "raw")}
        starts: dict[int, int] = {}
        self._ints: list[tuple[Wire, int, int, int]] = []  # format, start, elements, elements of a worker's chunk
        end = 0
        for wire in INTS:
            begin = end
            for i in (i for i in self.of_kind["int"] if allocation[i].wire == wire):
                starts[i], end = end, end + layers[i].numel
            chunk = chunk_of(end - begin, world_size)
            if chunk:
                self._ints.append((wire, begin, end - begin, chunk))
            end = begin + world_size * chunk
        for kind in ("top", "rank", "raw"):
            begin = end
            for i in self.of_kind[kind]:
                starts[i], end = end, end + layers[i].numel
        self.raw = begin, end - begin
        self.values, self.held = (
            {i: flat[starts[i] : starts[i] + layers[i].numel] for i in mine} for flat in (memory.staging, memory.errors)
        )
        self._payload = in_bucket(bucket.payload, layers, mine)
        self._buffers = memory.staging[end : end + len(bucket.values)]

    def gather(self) -> None:
        """From the bucket's payload to staging, buffers too."""
        copy([*self.values.values()], self._payload)
        self._buffers.copy_(self.bucket.values)

    def land(self) -> None:
        """And back."""
        copy(self._payload, [*self.values.values()])
        self.bucket.values.copy_(self._buffers)

    def parts(self) -> Iterator[tuple[Part, Wire, Tensor, Tensor]]:
        """For each int format, at least one: its layers, in the first part also the values that travel as they are, and
        the memory of error feedback's two stages."""
        start, count = self.raw
        staging, values = self.memory.staging, self.memory.staging[start : start + count + len(self._buffers)]
        place = 0
        for wire, begin, size, chunk in self._ints or [(INTS[0], 0, 0, 0)]:
            own = self.memory.errors[begin : begin + self.world_size * chunk]
            part = Part(staging, size, staging[begin : begin + size], values, self.bucket.scalars)
            yield part, wire, own, self.memory.means[place : place + chunk]
            values, place = values[:0], place + chunk

    def owe(self, rank: int) -> None:
        """What this worker holds back of the means that it encoded it owes to all, so n times of it joins what it holds
        back of its own: nothing is lost, and nothing is sent."""
        for _, _, own, means in self.parts():
            chunk = len(means)
            own[rank * chunk : (rank + 1) * chunk].add_(means, alpha=self.world_size)
        self.memory.means.zero_()


def layers_of(buckets: Sequence[Bucket]) -> list[Layer]:
    """Every parameter with elements, in the buckets' order."""
    layers = []
    for number, bucket in enumerate(buckets):
        start = 0
        for p in bucket.params:
            if p.numel():
                rows = p.shape[0] if p.dim() > 1 else p.numel()
                columns = p.numel() // rows
                size = bucket.flat.element_size()
                layers.append(Layer(number, start, p.numel(), rows, columns, size, tuple(p.shape)))
            start += p.numel()
    return layers


def in_bucket(flat: Tensor, layers: Sequence[Layer], order: Sequence[int]) -> list[Tensor]:
    """The layers' elements in a bucket's payload, 1-d."""
    return [flat[layers[i].start : layers[i].start + layers[i].numel] for i in order]
