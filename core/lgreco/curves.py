"""The error of each choice for a layer: its error curve. Nothing here makes the host wait for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..wires.formats import BLOCK, LEVELS
from .choices import Choice, Layer
from .senders import largest, product

NOISE = 1e-12  # of a sum: below that it is the rounding of the sum
ROWS, GPU_ROWS = 128, 1 << 13  # blocks at once: the temporaries of all formats stay in a CPU's cache
ITERATIONS = 5  # of the power iteration, as released


def curve(values: Tensor, layer: Layer, choices: Sequence[Choice], offered: Sequence[bool], seed: int) -> Tensor:
    """float64 [choices], where the values lie: ||G - C(G)||_2 for each choice that is offered, infinite for the others;
    NaN for all where G is not finite. values: G, [numel]. seed: of the power iteration's start."""
    squares = norm(values).square()
    of_kind: dict[str, list[int]] = {"raw": [], "int": [], "top": [], "rank": []}
    for i, (choice, ok) in enumerate(zip(choices, offered, strict=True)):
        if ok:
            of_kind[choice.kind].append(i)
    errors = dict.fromkeys(of_kind["raw"], torch.zeros_like(squares))
    if of_kind["int"]:
        found = _int_errors(values, [choices[i].wire for i in of_kind["int"]])
        errors |= zip(of_kind["int"], found.unbind(), strict=True)
    if of_kind["top"]:
        counts = [layer.kept(choices[i].value) for i in of_kind["top"]]
        errors |= zip(of_kind["top"], _top_errors(values, counts, squares), strict=True)
    if of_kind["rank"]:
        ranks = [int(choices[i].value) for i in of_kind["rank"]]
        errors |= zip(of_kind["rank"], _rank_errors(values.view(layer.rows, -1), ranks, squares, seed), strict=True)
    without = torch.full_like(squares, float("inf"))
    row = torch.stack([errors.get(i, without) for i in range(len(choices))])
    return torch.where(squares.isfinite(), row, float("nan"))


def norm(values: Tensor) -> Tensor:
    """||values||_2, summed in float64; 0-d."""
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def _int_errors(values: Tensor, names: Sequence[str]) -> Tensor:
    """The norm of each format's rounding errors, float64 [formats]; to nearest, as core/wires/formats.py rounds."""
    squares = torch.zeros(len(names), dtype=torch.float64, device=values.device)
    rows = GPU_ROWS if values.is_cuda else ROWS
    for blocks in pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK).split(rows):
        top = torch.maximum(blocks.amax(1), -blocks.amin(1)).float()
        scale = torch.stack([top / LEVELS[wire] for wire in names])  # [formats, blocks]
        scale = scale.masked_fill_(scale == 0, 1.0)[..., None]
        y = blocks / scale
        lost = torch.linalg.vector_norm(y.sub_(y.round()), dim=-1, keepdim=True)
        squares += (lost.double() * scale).square_().sum((1, 2))
    return squares.sqrt()


def _top_errors(values: Tensor, counts: Sequence[int], squares: Tensor) -> list[Tensor]:
    """The norm of all but the largest k, for each k."""
    magnitudes = values.abs()
    largest_first = magnitudes[largest(magnitudes, max(counts))].sort(descending=True).values
    lost = squares - largest_first.double().square_().cumsum(0)
    errors = torch.where(lost > NOISE * squares, lost, 0.0).sqrt()
    return [errors[k - 1] for k in counts]


def _rank_errors(matrix: Tensor, ranks: Sequence[int], squares: Tensor, seed: int) -> list[Tensor]:
    """The norm of what is left of the approximation of each rank that ITERATIONS power iterations find. One iteration
    of the highest rank is that of all: what QR makes of the first r columns depends on these alone."""
    draw = torch.Generator(matrix.device).manual_seed(seed)
    q = torch.randn(matrix.shape[1], max(ranks), generator=draw, device=matrix.device, dtype=matrix.dtype)
    for _ in range(ITERATIONS):
        p = torch.linalg.qr(product(matrix, q)).Q
        q = product(matrix.T, p)  # q = G^T p: what p's span holds of G
    lost = squares - q.double().square().sum(0).cumsum(0)
    return [lost[r - 1].clamp(min=0).sqrt() for r in ranks]
