"""Where each layer's elements lie while an allocation holds: those that travel in one format side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..flat import Bucket
from ..wires.formats import BLOCK, INTS, Wire
from ..wires.quantized import chunk_of
from .choices import Choice, Layer


@dataclass(frozen=True)
class Part:
    """What core/wires/quantized.py takes for a bucket: the layers of one format, and with the first what travels as it
    is."""

    flat: Tensor
    payload: Tensor
    values: Tensor
    scalars: Tensor

    @property
    def numel(self) -> int:
        return len(self.payload)


def slack(world_size: int) -> int:
    """Elements beyond its own that a bucket's layout may need: each int format is padded to whole blocks a worker."""
    return len(INTS) * world_size * BLOCK


class Layout:
    """For one bucket and one allocation: a flat order of its layers, first those of each int format, each padded to
    whole blocks a worker; then top-k's and low rank's; last those that travel as they are.

    starts: layer -> its first element. ints: format -> (start, elements, padded elements). raw: (start, elements).
    """

    def __init__(self, number: int, layers: Sequence[Layer], allocation: Sequence[Choice], world_size: int):
        mine = [i for i, layer in enumerate(layers) if layer.bucket == number]
        self.of_kind = {k: [i for i in mine if allocation[i].kind == k] for k in ("int", "top", "rank", "raw")}
        self.starts: dict[int, int] = {}
        self.ints: dict[Wire, tuple[int, int, int]] = {}
        end = 0
        for wire in INTS:
            begin = end
            for i in (i for i in self.of_kind["int"] if allocation[i].wire == wire):
                self.starts[i], end = end, end + layers[i].numel
            padded = world_size * chunk_of(end - begin, world_size)
            if padded:
                self.ints[wire] = begin, end - begin, padded
            end = begin + padded
        for kind in ("top", "rank", "raw"):
            begin = end
            for i in self.of_kind[kind]:
                self.starts[i], end = end, end + layers[i].numel
        self.raw = begin, end - begin
        self.order = mine

    def views(self, flat: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
        """The layers' elements in a flat tensor of this order, 1-d, in the bucket's own order."""
        return [flat[self.starts[i] : self.starts[i] + layers[i].numel] for i in self.order]


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
