"""The outer step of CO2 (arXiv 2401.16265, steps 3 to 7 of Algorithm 1): first its formulas, then `update`, which
applies them to a segment of the model and so defines what a boundary does.

Symbols as in the paper: x_{t,0} the outer iterate of round t, m_t the outer momentum, Lambda_t >= 1 the
staleness gap, Delta = x_{t-1,0} - mean_i x^i_{t-1,tau} the pseudo-gradient that arrives one round late.
Nothing here communicates. The formulas change nothing in place; their tensors may be whole flat tensors or slices of
them, in any floating dtype; what needs the whole vector (a norm, an RMS) is a 0-d tensor handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .flat import copy, group_pieces, kernels_of, views

EPS = 1e-12  # keeps Lambda finite when a pseudo-gradient is exactly zero
# Elements updated at a time: on a CPU what belongs to them, some 5 MiB in float32, stays in its cache; on a GPU few
# kernels are wanted, and temporaries of some 64 MiB are cheap.
SEGMENT, GPU_SEGMENT = 1 << 18, 1 << 24


def segment_size(flat: Tensor) -> int:
    """How many elements are updated at a time where this tensor lies."""
    return GPU_SEGMENT if flat.is_cuda else SEGMENT


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all elements of all tensors, 0-d, in the widest dtype given.

    On a CPU piece by piece: torch's sum over one float32 tensor there loses a third of it at 3e8 elements.
    """
    squares = []
    for flat in (t.reshape(-1) for t in tensors):
        for part in [flat] if flat.is_cuda else flat.split(SEGMENT):
            squares.append(torch.linalg.vector_norm(part).square() if part.is_cuda else torch.dot(part, part))
    widest = max((q.dtype for q in squares), key=lambda d: torch.finfo(d).bits)
    return torch.stack([q.to(squares[0].device, torch.float64) for q in squares]).sum().sqrt().to(widest)


def gap_elementwise(last_step: Tensor, c: Tensor) -> Tensor:
    """Step 4: Lambda_t = 1 + |x_{t,0} - x_{t-1,0}| / (c_t + eps), element by element.

    last_step: x_{t,0} - x_{t-1,0}, any shape. c: 0-d, the RMS of the last outer pseudo-gradient. The reading
    of Gap-Aware (Barkai et al., ICLR 2020) in which the pseudo-gradient sets the scale.
    """
    return 1 + last_step.abs() / (c.to(last_step.dtype) + EPS)


def gap_scalar(last_step_norm: Tensor, c: Tensor) -> Tensor:
    """Step 4 with one Lambda_t for the whole model: 1 + ||x_{t,0} - x_{t-1,0}|| / (c + eps), 0-d.

    `norm`: c = ||Delta||. `inner`: c = tau x the norm of the first inner step's displacement.
    """
    return 1 + last_step_norm / (c + EPS)


def momentum(m: Tensor, delta: Tensor, beta: float, gap: Tensor | None = None) -> Tensor:
    """Step 5: m_t = beta m_{t-1} + Delta / Lambda_t. The penalty scales the new term only.

    gap: shaped as delta, or 0-d; None stands for Lambda = 1.
    """
    new = delta if gap is None else delta / gap.to(delta.dtype)
    return new + beta * m


def carried(beta: float, growth: float) -> float:
    """beta growth, at most 1: the factor of m_{t-1} where Delta is of `growth` times as many local steps as before.

    Twice the steps lead about twice as far, so that what m holds of fewer steps counts more, and of more steps less.
    But where tau leaps, a few steps' direction says little of many, and multiplied by hundreds it would overshoot: the
    momentum alone never moves x farther than it has moved last. Lambda and phi compare and limit lengths as they are,
    alpha is a share: they stay. Ours; Gu et al. (ICLR 2024), whose rule changes tau, have no outer momentum.
    """
    return min(1.0, growth * beta)


def clip_elements(m: Tensor, phi: float) -> Tensor:
    """Step 6: clip(m_t, -phi, phi), element by element; the result is what is stored."""
    return m.clamp(-phi, phi)


def outer_step(x: Tensor, m: Tensor, alpha: float | Tensor) -> Tensor:
    """Step 7: x_{t+1,0} = x_{t,0} - alpha m_t."""
    return x - alpha * m


def settles(alpha: float, beta: float) -> bool:
    """Whether a step delayed by one round, without a penalty, settles however far tau local steps solve a direction.

    On a quadratic whose error tau local steps reduce by the share rho, x_{t+1} = (1 + beta) x_t - beta x_{t-1} - alpha
    rho x_{t-1}. Jury's criterion at rho = 1, the worst: beta + alpha < 1. Local steps that overshoot, as momentum
    inside may at small tau, have rho above 1: then beta + rho alpha < 1 is what settles.
    """
    return beta + alpha < 1


@dataclass(frozen=True)
class Rule:
    """The numbers of one boundary, and where Lambda comes from: c (elementwise), gap (one number), or neither (1)."""

    beta: float = 1.0
    """Outer momentum, as `carried`."""
    alpha: float | Tensor = 0.0
    """Outer learning rate."""
    last_alpha: float | Tensor = 0.0
    """|x_{t,0} - x_{t-1,0}| = last_alpha |m|: alpha, or 0 where the last boundary took no outer step."""
    phi: float | None = None
    """Clips the momentum's elements to [-phi, phi]."""
    scale: float | Tensor = 0.0
    """Delta = scale * d: one over the sum of the weights where d holds a weighted sum over the workers."""
    c: Tensor | None = None
    """0-d: the RMS of Delta over the whole model."""
    gap: Tensor | None = None
    """0-d: Lambda itself."""


# m and x stay what they are, if d is finite: 0 times a NaN is a NaN. What remains is step 3 and the restart.
NOTHING_LANDED = Rule()


@dataclass(frozen=True)
class Segment:
    """A part of the model. params: slices of the live parameters, in any shapes; d, x, m: [n], of the buffer in which a
    mean has landed, of the outer iterate and of the momentum; x_views, d_views: x, d in params' shapes."""

    params: list[Tensor]
    x_views: list[Tensor]
    d_views: list[Tensor]
    d: Tensor
    x: Tensor
    m: Tensor


def update(s: Segment, rule: Rule) -> Tensor:
    """Steps 3 to 7 on a segment, in place; returns what was seen there, [4] (see new_momentum).

    Step 3 stands first, for the workers are still where local steps led them; it is written last, for d holds the mean.
    """
    own_difference = difference(s)  # 3
    seen = advance(s, rule)
    s.d.copy_(own_difference)
    copy(s.params, s.x_views)
    return seen


def advance(s: Segment, rule: Rule) -> Tensor:
    """Steps 4 to 7 on m and x; returns what was seen."""
    scale = rule.scale.to(s.d) if isinstance(rule.scale, Tensor) else rule.scale
    m, seen = new_momentum(s.m, scale * s.d, rule)  # 4, 5, 6
    s.m.copy_(m)
    s.x.copy_(outer_step(s.x, m, rule.alpha))  # 7
    return seen


def difference(s: Segment) -> Tensor:
    """Step 3: x_{t,0} - x^i_{t,tau}, [n]; the local steps began at x_{t,0} as the parameters' dtype holds it."""
    return torch.cat([(x.to(p.dtype).to(x.dtype) - p).reshape(-1) for x, p in zip(s.x_views, s.params, strict=True)])


def new_momentum(m: Tensor, delta: Tensor, rule: Rule, last_step: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Steps 4 to 6: m_t, and what was seen: [4] float64, the sum of m_t^2, the sum and the maximum of Lambda, and how
    many elements were clipped. last_step: x_{t,0} - x_{t-1,0} where that is not -last_alpha m_{t-1}."""
    gap = staleness_gap(m, rule, last_step)
    raw = momentum(m, delta, rule.beta, gap)
    new = raw if rule.phi is None else clip_elements(raw, rule.phi)
    gap = torch.ones_like(m) if gap is None else gap.to(m.dtype).expand_as(m)
    clipped = torch.zeros_like(m[0]) if rule.phi is None else (raw.abs() > rule.phi).sum()
    return new, torch.stack([v.double() for v in (torch.dot(new, new), gap.sum(), gap.amax(), clipped)])


def staleness_gap(m: Tensor, rule: Rule, last_step: Tensor | None = None) -> Tensor | None:
    """Step 4 as the rule says: shaped as m, 0-d, or None for Lambda = 1."""
    if rule.c is None:
        return rule.gap
    return gap_elementwise(rule.last_alpha * m if last_step is None else last_step, rule.c)


def all_seen(parts: Sequence[Tensor]) -> Tensor:
    """What was seen in all parts together, [4], from [4] of each."""
    seen = torch.stack([p.to(parts[0].device) for p in parts])
    return torch.stack([seen[:, 0].sum(), seen[:, 1].sum(), seen[:, 2].max(), seen[:, 3].sum()])


class Boundary:
    """`update` over one bucket, segment after segment; the faster ways to do the same derive from it.

    params: the live parameters, of one dtype and device, in any shapes and strides, at least one element in all.
    d, x, m: flat [sum of their numel], in the parameters' order; float32 where the parameters are 16-bit, else their
    dtype. A parameter whose storage was replaced (`p.data = ...`) is noticed.
    """

    def __init__(self, params: Sequence[Tensor], d: Tensor, x: Tensor, m: Tensor):
        self.params, self.d, self.x, self.m = params, d, x, m
        total = sum(p.numel() for p in params)
        assert all(f.shape == (total,) and f.is_contiguous() and f.dtype == d.dtype for f in (d, x, m))
        assert all(p.dtype == params[0].dtype and p.device == d.device for p in params)
        self.segments: list[Segment] = []
        self._where: list[tuple[int, tuple[int, ...]]] | None = None

    @torch.no_grad()
    def run(self, rule: Rule) -> Tensor:
        """Steps 3 to 7 of the whole bucket; what was seen, [4] float64 on d's device."""
        self.locate()
        return self.update(rule)

    def locate(self) -> None:
        """Plans anew where a parameter's storage has moved."""
        where = [(p.data_ptr(), p.stride()) for p in self.params]
        if where != self._where:
            self.plan()
            self._where = where

    def plan(self) -> None:
        """Notes where the parameters lie: once, and again when they have moved."""
        self.segments, start = [], 0
        for pieces in group_pieces(self.params, segment_size(self.d)):
            end = start + sum(p.numel() for p in pieces)
            self.segments.append(self.segment(pieces, slice(start, end)))
            start = end

    def segment(self, pieces: list[Tensor], place: slice) -> Segment:
        """The one of these slices of the parameters, which lies there in the flat tensors."""
        d, x, m = (f[place] for f in (self.d, self.x, self.m))
        return Segment(pieces, views(x, pieces), views(d, pieces), d, x, m)

    def update(self, rule: Rule) -> Tensor:
        return all_seen([update(s, rule) for s in self.segments])


class ChunkedBoundary(Boundary):
    """In one pass over memory, a cache-sized segment after the other; correct on any device, but it synchronises a GPU.

    Each element of p, d, x and m is read and written once; the elementwise gap reads d once more before. The result is
    not bit for bit that of `update`: Lambda / scale is divided by instead of Lambda, and the slope of Lambda is
    computed once. Both round differently where the number of workers is no power of two, or the gap is elementwise.
    """

    def plan(self) -> None:
        super().plan()
        longest = max((len(s.d) for s in self.segments), default=0)
        self._scratch = self.d.new_empty(longest)
        self.narrow = self.params[0].dtype != self.d.dtype
        self._rounded = self._scratch.to(self.params[0].dtype) if self.narrow else None

    def update(self, rule: Rule) -> Tensor:
        slope = 0.0 if rule.c is None else float(rule.last_alpha) / (rule.c.item() + EPS)
        gap = 1.0 if rule.gap is None else rule.gap.item()
        seen = []
        for s in self.segments:
            seen.append(_momentum(s, self._scratch[: len(s.d)], rule, gap, slope))
            self.send(s, rule)
            s.x.sub_(s.m, alpha=float(rule.alpha))
            self.restart_segment(s, rule)
        squares, gaps, tops, clipped = zip(*seen, strict=True)
        numbers = [sum(squares), sum(gaps), max(tops), sum(clipped)]
        return torch.tensor(numbers, dtype=torch.float64, device=self.d.device)

    def send(self, s: Segment, rule: Rule) -> None:
        """Step 3 of a segment."""
        self.take_difference(s)

    def restart_segment(self, s: Segment, rule: Rule) -> None:
        """What the worker continues from."""
        copy(s.params, s.x_views)

    def take_difference(self, s: Segment) -> None:
        """d <- r(x) - p, with r(x) = x rounded to p's dtype."""
        if self._rounded is None and len(s.params) == 1:
            torch.sub(s.x_views[0], s.params[0], out=s.d_views[0])
            return
        s.d.copy_(s.x if self._rounded is None else self._rounded[: len(s.d)].copy_(s.x))
        torch._foreach_sub_(s.d_views, s.params)  # pyright: ignore[reportPrivateImportUsage]


def _momentum(s: Segment, scratch: Tensor, rule: Rule, gap: float, slope: float) -> tuple[float, float, float, float]:
    """m <- clip(beta m + Delta / Lambda), where Lambda = 1 + slope |m|, or `gap` where slope is 0. Returns what was
    seen, as new_momentum does, in plain numbers: on a CPU .item() costs nothing worth saving."""
    gap_sum, gap_max, clipped, scale = gap * len(s.m), gap, 0.0, float(rule.scale)
    if slope:
        torch.abs(s.m, out=scratch)  # then Lambda / scale, which saves scaling d
        torch.add(s.m.new_tensor(1 / scale), scratch, alpha=slope / scale, out=scratch)
        gap_sum = scratch.sum().item() * scale
        gap_max = scratch.amax().item() * scale
        torch.div(s.d, scratch, out=scratch)
        torch.add(scratch, s.m, alpha=rule.beta, out=s.m)
    else:
        s.m.mul_(rule.beta).add_(s.d, alpha=scale / gap)
    if rule.phi is not None:
        low, high = torch.aminmax(s.m)
        if not (-rule.phi <= low.item() and high.item() <= rule.phi):  # mostly nothing is clipped: one read
            clipped = torch.abs(s.m, out=scratch).gt_(rule.phi).sum().item()
            s.m.clamp_(-rule.phi, rule.phi)
    return torch.dot(s.m, s.m).item(), gap_sum, gap_max, clipped


def make_boundary(params: Sequence[Tensor], d: Tensor, x: Tensor, m: Tensor) -> Boundary:
    """Triton's kernel on CUDA where Triton is installed, the in-place pass on a CPU; elsewhere the plain one."""
    if kernels := kernels_of(d.device):
        return kernels.TritonBoundary(params, d, x, m)
    return (Boundary if d.is_cuda else ChunkedBoundary)(params, d, x, m)
