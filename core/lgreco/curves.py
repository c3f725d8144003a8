"""What each choice would lose of a layer: its error curve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..fast.wire import BLOCK, LEVELS
from .choices import Choice, Layer
from .lowrank import product
from .sparse import largest

NOISE = 1e-12  # of a sum: below that it is the rounding of the sum
ROWS, GPU_ROWS = 128, 1 << 13  # blocks at once: the temporaries of all formats stay in a CPU's cache
ITERATIONS = 5  # of the power iteration, as released


def curve(values: Tensor, layer: Layer, choices: Sequence[Choice], offered: Sequence[bool], seed: int) -> Tensor:
    """float64 [choices]: ||G - C(G)||_2 for each choice that is offered, infinite for the others; NaN for all where G
    is not finite. values: G, [numel]. seed: of the power iteration's start."""
    errors = torch.full((len(choices),), float("inf"), dtype=torch.float64)
    if not torch.isfinite(squares := values.double().square().sum()):
        return errors.fill_(float("nan"))
    of_kind = {
        k: [i for i, c in enumerate(choices) if offered[i] and c.kind == k] for k in ("raw", "int", "top", "rank")
    }
    errors[of_kind["raw"]] = 0.0
    if of_kind["int"]:
        errors[of_kind["int"]] = _int_errors(values, [choices[i].wire for i in of_kind["int"]]).cpu()
    if of_kind["top"]:
        counts = [layer.kept(choices[i].value) for i in of_kind["top"]]
        errors[of_kind["top"]] = _top_errors(values, counts, squares).cpu()
    if of_kind["rank"]:
        ranks = [int(choices[i].value) for i in of_kind["rank"]]
        errors[of_kind["rank"]] = _rank_errors(values.view(layer.rows, -1), ranks, squares, seed).cpu()
    return errors


def _int_errors(values: Tensor, names: Sequence[str]) -> Tensor:
    """The norm of what each format's rounding leaves, float64 [formats]; as core/fast/wire.py rounds, to nearest."""
    levels = torch.tensor([[LEVELS[wire]] for wire in names], device=values.device)
    squares = torch.zeros(len(names), dtype=torch.float64, device=values.device)
    rows = GPU_ROWS if values.is_cuda else ROWS
    for blocks in pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK).split(rows):
        scale = torch.maximum(blocks.amax(1), -blocks.amin(1)).float() / levels  # [formats, blocks]
        scale = scale.masked_fill(scale == 0, 1.0)[..., None]
        y = blocks / scale
        lost = y.sub_(y.round()).square_().sum(-1, keepdim=True)
        squares += (lost.double() * scale.double().square()).sum((1, 2))
    return squares.sqrt()


def _top_errors(values: Tensor, counts: list[int], squares: Tensor) -> Tensor:
    """The norm of all but the largest k, for each k."""
    magnitudes = values.abs()
    largest_first = magnitudes[largest(magnitudes, max(counts))].sort(descending=True).values
    kept = largest_first.double().square().cumsum(0)[torch.tensor(counts, device=values.device) - 1]
    left = squares - kept
    return torch.where(left > NOISE * squares, left, 0.0).sqrt()


def _rank_errors(matrix: Tensor, ranks: list[int], squares: Tensor, seed: int) -> Tensor:
    """The norm of what is left of the best approximation of each rank that ITERATIONS power iterations find."""
    most = min(max(ranks), *matrix.shape)
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(matrix.shape[1], most, generator=draw).to(matrix)
    for _ in range(ITERATIONS):
        p = torch.linalg.qr(product(matrix, q)).Q
        q = product(matrix.T, p)
    strengths = torch.linalg.svdvals(q).double().square().cumsum(0)  # q = G^T p: what p's span holds of G
    found = strengths[torch.tensor([min(r, most) - 1 for r in ranks], device=matrix.device)]
    return (squares - found).clamp(min=0).sqrt()
