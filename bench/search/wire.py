"""The mean of what the workers send in a narrow format, as core/wires/quantized.py makes it, in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from core.reference import mean
from core.wires.formats import BLOCK, BLOCK_BYTES, decode, encode


class NarrowMean:
    """Two encodings with error feedback, rounded to nearest: of what each worker sends, and of the mean of that.

    Worker j averages the j-th of as many chunks, whole blocks each; together the chunks are one vector here.
    """

    def __init__(self, wire: str):
        self.wire = wire
        self.errors: Tensor | None = None  # [workers, n], n filled up to equal chunks
        self.mean_error: Tensor | None = None  # [n]

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[workers, n] -> [n]. weights: [workers], 1, or 0 for a worker that is left out, whose error waits."""
        workers, n = rows.shape
        rows = pad(rows, (0, -n % (workers * BLOCK)))
        before = torch.zeros_like(rows) if self.errors is None else self.errors
        arrived, kept = self.send(rows, before)
        self.errors = torch.where(weights[:, None] == 0, before, kept)
        average, self.mean_error = self.send(mean(arrived, weights), self.mean_error)
        return average[:n]

    def send(self, values: Tensor, error: Tensor | None) -> tuple[Tensor, Tensor]:
        """What arrives of `values` and the error kept back, and what is kept back now; each shaped as values."""
        values = values if error is None else values + error
        arrived = decode(encode(values.reshape(-1), self.wire), self.wire, values.dtype).view_as(values)
        return arrived, values - arrived


def mean_over(wire: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What a wire format makes of [workers, n] with weights, [workers]: their mean, [n]."""
    return mean if wire == "float32" else NarrowMean(wire)


def bits(wire: str) -> float:
    """That a number takes, its share of the block's scale included."""
    return 32.0 if wire == "float32" else 8 * BLOCK_BYTES[wire] / BLOCK
