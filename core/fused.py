"""CO2's outer boundary in one pass over memory: momentum, clip, next snapshot, outer step and restart together.

The formulas are those of core/outer.py; here they run cache-sized piece by piece, so that each element of the
parameters p, the landed buffer d, the outer iterate x and the momentum m is read and written once: 8 accesses, 32
bytes a float32 parameter. The elementwise gap needs the RMS of d over the whole model first: 4 bytes more. On CUDA
one Triton kernel does the same (core/fused_triton.py).
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Flag

import torch
from torch import Tensor

from core.outer import EPS

# Elements per segment. Smaller ones, for the L2 cache, cost more in calls than they save: with 2^18, d, x, m, p and
# the scratch are 5 MiB in float32 and stay in the L3 cache.
CHUNK = 1 << 18


class Work(Flag):
    """What a pass does, in this order."""

    MOMENTUM = 1  # m <- clip(beta m + Delta / Lambda)
    SNAPSHOT = 2  # d <- r(x) - p, with r(x) = x rounded to p's dtype, from which p restarted
    ADVANCE = 4  # x <- x - alpha m
    RESTORE = 8  # p <- x


@dataclass(frozen=True)
class Rule:
    """The scalars of steps 4 to 7, and where Lambda comes from: c (elementwise), gap (one number), or neither (1)."""

    beta: float = 0.0
    """Outer momentum."""
    alpha: float = 0.0
    """Outer learning rate."""
    last_alpha: float = 0.0
    """|x_{t,0} - x_{t-1,0}| = last_alpha |m|: alpha, or 0 where the last boundary took no outer step."""
    phi: float | None = None
    """Clips the momentum's elements to [-phi, phi]."""
    scale: float = 1.0
    """Delta = scale * d: one over the number of workers where d holds their sum."""
    c: Tensor | None = None
    """0-d: the RMS of Delta over the whole model."""
    gap: Tensor | None = None
    """0-d: Lambda itself."""


@dataclass(frozen=True)
class BoundaryStats:
    """What a pass with Work.MOMENTUM has seen, 0-d tensors on the device: sums over this object's elements."""

    momentum_squares: Tensor  # of the clipped momentum
    gap_sum: Tensor  # of Lambda
    gap_max: Tensor
    clipped: Tensor  # how many elements


class Boundary(ABC):
    """One bucket's boundary. params: the live parameters, of one dtype and device, in any shapes and strides. d, x, m:
    flat [sum of their numel], in the parameters' order; float32 where the parameters are 16-bit, else their dtype.

    Nothing is allocated per call but 0-d tensors (clipping and 16-bit snapshots aside: one segment at a time). A
    parameter whose storage was replaced (`p.data = ...`) is noticed.
    """

    def __init__(self, params: list[Tensor], d: Tensor, x: Tensor, m: Tensor):
        self.params, self.d, self.x, self.m = params, d, x, m
        total = sum(p.numel() for p in params)
        assert all(f.shape == (total,) and f.is_contiguous() and f.dtype == d.dtype for f in (d, x, m))
        assert all(p.dtype == params[0].dtype and p.device == d.device for p in params)
        self._where: list[tuple[int, tuple[int, ...]]] | None = None

    @abstractmethod
    def rms_sum(self, scale: float = 1.0) -> Tensor:
        """Sum of Delta^2 = (scale d)^2, 0-d: c is the root of its mean over all buckets' elements."""

    def step(self, rule: Rule, *, snapshot: bool = True) -> BoundaryStats:
        """Steps 4 to 7. snapshot=False: nothing is to be sent, d stays as it is."""
        work = Work.MOMENTUM | Work.ADVANCE | Work.RESTORE
        return self.run(work | Work.SNAPSHOT if snapshot else work, rule)

    def first(self) -> None:
        """Nothing has landed: only snapshot and restart."""
        self.run(Work.SNAPSHOT | Work.RESTORE, Rule())

    def restore(self) -> None:
        """The parameters restart from x."""
        self.run(Work.RESTORE, Rule())

    @torch.no_grad()
    def run(self, work: Work, rule: Rule) -> BoundaryStats:
        """Any selection of the work; clipping by norm is MOMENTUM, then m.mul_(factor), then the rest."""
        where = [(p.data_ptr(), p.stride()) for p in self.params]
        if where != self._where:
            self._plan()
            self._where = where
        return self._run(work, rule)

    @abstractmethod
    def _plan(self) -> None:
        """Notes where the parameters lie."""

    @abstractmethod
    def _run(self, work: Work, rule: Rule) -> BoundaryStats: ...


def boundary(params: list[Tensor], d: Tensor, x: Tensor, m: Tensor) -> Boundary:
    """The boundary for this device: Triton's on CUDA where it is installed (any CUDA build for Linux brings it). The
    other is right on CUDA too, but synchronises."""
    if d.is_cuda and importlib.util.find_spec("triton") is not None:
        from core.fused_triton import TritonBoundary

        return TritonBoundary(params, d, x, m)
    return ChunkedBoundary(params, d, x, m)


@dataclass(frozen=True)
class Segment:
    """At most CHUNK elements: slices of d, x, m and of the scratch, and the pieces of parameters over them."""

    d: Tensor
    x: Tensor
    m: Tensor
    scratch: Tensor
    rounded: Tensor | None  # scratch in the parameters' dtype, where that is not d's
    params: list[Tensor]
    x_views: list[Tensor]  # as params
    d_views: list[Tensor]


class ChunkedBoundary(Boundary):
    """In plain tensor operations, one segment after the other while it lies in the cache."""

    @torch.no_grad()
    def rms_sum(self, scale: float = 1.0) -> Tensor:
        # not vector_norm of the whole: on a CPU its float32 accumulators stop growing beyond some 10^8 elements
        total = sum(torch.dot(part, part).item() for part in self.d.split(CHUNK))
        return torch.tensor(scale**2 * total, dtype=torch.float64, device=self.d.device)

    def _plan(self) -> None:
        groups = list(group_pieces(self.params, CHUNK))
        longest = max((sum(p.numel() for p in group) for group in groups), default=0)
        scratch = self.d.new_empty(longest)
        narrow = bool(self.params) and self.params[0].dtype != self.d.dtype
        rounded = scratch.to(self.params[0].dtype) if narrow else None
        self._segments = []
        start = 0
        for group in groups:
            n = sum(p.numel() for p in group)
            d, x, m = (f[start : start + n] for f in (self.d, self.x, self.m))
            r = None if rounded is None else rounded[:n]
            self._segments.append(Segment(d, x, m, scratch[:n], r, group, views(x, group), views(d, group)))
            start += n

    def _run(self, work: Work, rule: Rule) -> BoundaryStats:
        momentum, snapshot = Work.MOMENTUM in work, Work.SNAPSHOT in work
        advance, restore = Work.ADVANCE in work, Work.RESTORE in work
        slope = 0.0 if rule.c is None else rule.last_alpha / (rule.c.item() + EPS)
        gap = 1.0 if rule.gap is None else rule.gap.item()
        seen = [(0.0, 0.0, gap, 0.0)]
        for segment in self._segments:
            if momentum:
                seen.append(_momentum(segment, rule, gap, slope))
            if snapshot:
                _snapshot(segment)
            if advance:
                segment.x.sub_(segment.m, alpha=rule.alpha)
            if restore:
                torch._foreach_copy_(segment.params, segment.x_views)  # pyright: ignore[reportPrivateImportUsage]
        squares, gaps, tops, clipped = zip(*seen, strict=True)
        numbers = sum(squares), sum(gaps), max(tops), sum(clipped)
        return BoundaryStats(*(torch.tensor(v, dtype=torch.float64, device=self.d.device) for v in numbers))


def _momentum(s: Segment, rule: Rule, gap: float, slope: float) -> tuple[float, float, float, float]:
    """m <- clip(beta m + Delta / Lambda); Lambda = 1 + slope |m|, or `gap` where slope is 0. Returns the statistics:
    sum of m^2, sum and maximum of Lambda, clipped elements. A CPU's .item() costs nothing worth saving."""
    gap_sum, gap_max, clipped = gap * len(s.m), gap, 0.0
    if slope:
        torch.abs(s.m, out=s.scratch)  # then Lambda / scale, which saves scaling d
        torch.add(s.m.new_tensor(1 / rule.scale), s.scratch, alpha=slope / rule.scale, out=s.scratch)
        gap_sum = s.scratch.sum().item() * rule.scale
        gap_max = s.scratch.amax().item() * rule.scale
        torch.div(s.d, s.scratch, out=s.scratch)
        torch.add(s.scratch, s.m, alpha=rule.beta, out=s.m)
    else:
        s.m.mul_(rule.beta).add_(s.d, alpha=rule.scale / gap)
    if rule.phi is not None:
        low, high = torch.aminmax(s.m)
        if not (-rule.phi <= low.item() and high.item() <= rule.phi):  # mostly nothing is clipped: one read
            clipped = torch.abs(s.m, out=s.scratch).gt_(rule.phi).sum().item()
            s.m.clamp_(-rule.phi, rule.phi)
    return torch.dot(s.m, s.m).item(), gap_sum, gap_max, clipped


def _snapshot(s: Segment) -> None:
    """d <- r(x) - p."""
    if s.rounded is None and len(s.params) == 1:
        torch.sub(s.x_views[0], s.params[0], out=s.d_views[0])
        return
    s.d.copy_(s.x if s.rounded is None else s.rounded.copy_(s.x))
    torch._foreach_sub_(s.d_views, s.params)  # pyright: ignore[reportPrivateImportUsage]


def pieces(p: Tensor, limit: int) -> Iterator[Tensor]:
    """Views of at most `limit` elements that cover p in row-major order; flat where p is contiguous."""
    if p.is_contiguous():
        yield from (piece for piece in p.view(-1).split(limit) if piece.numel())
    elif p.numel() <= limit:
        yield p
    elif rows := limit // p[0].numel():
        yield from p.split(rows)
    else:
        for row in p:
            yield from pieces(row, limit)


def group_pieces(params: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The pieces of all parameters, consecutive ones together up to `limit` elements."""
    group: list[Tensor] = []
    filled = 0
    for piece in (piece for p in params for piece in pieces(p.detach(), limit)):
        if filled + piece.numel() > limit:
            yield group
            group, filled = [], 0
        group.append(piece)
        filled += piece.numel()
    if group:
        yield group


def views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Consecutive slices of a 1-d tensor, in the shapes of `like`."""
    slices = flat.split([t.numel() for t in like])
    return [piece.view(t.shape) for piece, t in zip(slices, like, strict=True)]
