"""All workers of core/compression/lgreco/reducer.py in one process: what it must compute, without chunks or messages.

Tensors are [workers, ...]. A layer is one tensor, and all are of one dtype. The choices and their curves come from the
same functions; what is written again is how a choice sends, what is held back, and what a switch does with that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from core.compression.formats import BLOCK, decode, encode
from core.compression.lgreco.choices import SUMMED, Choice, Decider, Layer, curve, fill, orthonormal
from core.compression.quantized import chunk_of


class Reference:
    """shapes: of the layers. like, config: as LGreco's; with config.every and config.first set."""

    def __init__(self, shapes, workers, like, config, dtype):
        self.workers, self.config = workers, config
        self.layers = [_layer(shape, dtype) for shape in shapes]
        self.decider = Decider(self.layers, like, config, workers)
        self.chosen: Sequence[Choice] = self.decider.uniform
        self.errors = [torch.zeros(workers, z.numel, dtype=dtype) for z in self.layers]
        self.mean_errors = [torch.zeros(z.numel, dtype=dtype) for z in self.layers]
        self.q = [torch.zeros(z.columns, 0, dtype=dtype) for z in self.layers]
        self.number, self.next = 0, config.first
        self.wanted: list[list[Tensor]] = []  # since the last decision

    def reduce(self, differences: Sequence[Tensor]) -> list[Tensor]:
        """differences: a layer each, [workers, numel] -> what lands for it on every worker, [numel]."""
        assert self.config.every is not None and self.config.first is not None
        self.number += 1
        sends = [d + e for d, e in zip(differences, self.errors, strict=True)]
        self.wanted.append(sends)
        found = None
        if self.number == self.next and not self.decider.fixed:
            means = [torch.stack(each).mean(0) for each in zip(*self.wanted[-SUMMED:], strict=True)]
            curves = torch.stack([self._curve(i, mean) for i, mean in enumerate(means)])
            found = self.decider.decide(curves, self.chosen, self.number)
            self.next, self.wanted = self.number + min(self.number, self.config.every), []
        landed: list[Tensor] = [torch.empty(0)] * len(sends)
        for compression in {c.compression for c in self.chosen if c.kind == "int"}:
            self._int(
                compression,
                [i for i, c in enumerate(self.chosen) if c.kind == "int" and c.compression == compression],
                sends,
                landed,
            )
        for i, choice in enumerate(self.chosen):
            if choice.kind == "raw":
                landed[i], self.errors[i] = _mean(sends[i]), torch.zeros_like(sends[i])
            elif choice.kind == "top":
                landed[i] = self._top(i, sends[i])
            elif choice.kind == "rank":
                landed[i] = self._rank(i, sends[i], int(choice.value))
        if found is not None and list(found.choices) != list(self.chosen):
            self._switch(found.choices)
        return landed

    def _curve(self, i: int, send: Tensor) -> Tensor:
        """float64 [choices]: the mean of the workers' curves."""
        offered = self.decider.offered[i].tolist()
        return torch.stack([curve(row, self.layers[i], self.decider.choices, offered, i) for row in send]).mean(0)

    def _int(self, compression: str, members: list[int], sends: list[Tensor], landed: list[Tensor]) -> None:
        """The layers of one format as one vector, rounded by every worker, averaged, rounded again."""
        sizes = [self.layers[i].numel for i in members]
        whole = torch.cat([sends[i] for i in members], dim=1)
        got = torch.stack([_rounded(row, compression) for row in whole])
        mean = _mean(got) + torch.cat([self.mean_errors[i] for i in members])
        sent = _rounded(mean, compression)
        parts = zip(sent.split(sizes), (mean - sent).split(sizes), (whole - got).split(sizes, dim=1), strict=True)
        for i, (value, of_mean, own) in zip(members, parts, strict=True):
            landed[i], self.mean_errors[i], self.errors[i] = value, of_mean, own

    def _top(self, i: int, send: Tensor) -> Tensor:
        k = self.layers[i].kept(self.chosen[i].value)
        threshold = send.abs().topk(k, dim=1).values[:, -1:]
        kept = torch.where(send.abs() >= threshold, send, 0.0)
        self.errors[i] = send - kept
        return _mean(kept)

    def _rank(self, i: int, send: Tensor, r: int) -> Tensor:
        """One power iteration on the workers' mean."""
        layer, before = self.layers[i], self.q[i]
        q = torch.cat([before[:, :r], before.new_zeros(layer.columns, max(0, r - before.shape[1]))], dim=1)
        fill(q, before.shape[1], seed=i)
        mean = _mean(send).view(layer.rows, layer.columns)
        p = orthonormal(mean @ q)
        new = mean.T @ p
        self.q[i] = torch.where(new.isfinite().all(0) & (new != 0).any(0), new, q)
        landed = (p @ new.T).view(-1)
        self.errors[i] = send - landed
        return landed

    def _switch(self, choices: Sequence[Choice]) -> None:
        """What is held back of a mean joins what the worker that had averaged it keeps, n times: nothing is lost."""
        for compression in {c.compression for c in self.chosen if c.kind == "int"}:
            members = [i for i, c in enumerate(self.chosen) if c.kind == "int" and c.compression == compression]
            sizes = [self.layers[i].numel for i in members]
            owner = torch.arange(sum(sizes)) // chunk_of(sum(sizes), self.workers)
            for i, owners in zip(members, owner.split(sizes), strict=True):
                for worker in range(self.workers):
                    owed = torch.where(owners == worker, self.workers * self.mean_errors[i], 0.0)
                    self.errors[i][worker] += owed
                self.mean_errors[i] = torch.zeros_like(self.mean_errors[i])
        self.chosen = choices


def _layer(shape: tuple[int, ...], dtype: torch.dtype) -> Layer:
    numel = torch.Size(shape).numel()
    rows = shape[0] if len(shape) > 1 else numel
    return Layer(0, numel, rows, numel // rows, dtype.itemsize)


def _rounded(x: Tensor, compression: str) -> Tensor:
    padded = pad(x, (0, -len(x) % BLOCK))
    return decode(encode(padded, compression), compression, x.dtype)[: len(x)]


def _mean(rows: Tensor) -> Tensor:
    """[workers, ...] -> [...]; summed in the workers' order."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total / len(rows)
