"""The outer step of CO2 (arXiv 2401.16265, steps 3 to 7 of Algorithm 1): the formulas, then the passes over memory.

Symbols as in the paper: x_{t,0} is the outer iterate of round t, m_t the outer momentum, Lambda_t >= 1 the staleness
gap, Delta = x_{t-1,0} - mean_i x^i_{t-1,tau} the pseudo-gradient, which arrives a round late in the paper's order.

`update` applies the formulas to a segment of the model and so defines what a boundary does. `OuterStep` runs it over a
bucket. `FusedOuterStep` does the same in one pass over a CPU's memory, and outer_kernels.TritonOuterStep in one kernel
on a GPU. shares.py runs the same passes on its shares. Nothing here communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .buckets import copy_each, copy_where, elements, group_pieces, views

EPS = 1e-12  # keeps Lambda finite if a pseudo-gradient is exactly zero
# Elements updated or encoded at a time. On a CPU their tensors, some 5 MiB in float32, stay in the cache. A GPU needs
# few kernels, and temporaries of some 64 MiB are cheap there.
SEGMENT, GPU_SEGMENT = 1 << 18, 1 << 24

Merge = Literal["restart", "keep_local"]


# -- formulas: they change nothing in place, and take whole flat tensors or slices of them, in any floating dtype ------


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm over all elements of all tensors, 0-d, in the widest dtype given.

    On a CPU it sums piece by piece, because one float32 sum over 3e8 elements loses a third of the total there.
    """
    squares, widest, device = [], tensors[0].dtype, tensors[0].device
    for t in tensors:
        flat, widest = t.reshape(-1), torch.promote_types(widest, t.dtype)
        for part in [flat] if flat.is_cuda else flat.split(SEGMENT):
            square = torch.linalg.vector_norm(part).square() if part.is_cuda else torch.dot(part, part)
            squares.append(square.to(device, torch.float64))
    return torch.stack(squares).sum().sqrt().to(widest)


def gap_elementwise(last_step: Tensor, c: Tensor) -> Tensor:
    """Step 4: Lambda_t = 1 + |x_{t,0} - x_{t-1,0}| / (c_t + eps), element by element.

    Gap-Aware (Barkai et al., ICLR 2020), read so that the pseudo-gradient sets the scale.

    Args:
        last_step: x_{t,0} - x_{t-1,0}, any shape.
        c: The RMS of the last outer pseudo-gradient, 0-d.
    """
    return 1 + last_step.abs() / (c.to(last_step.dtype) + EPS)


def gap_scalar(last_step_norm: Tensor, c: Tensor) -> Tensor:
    """Step 4 with one Lambda_t for the whole model: 1 + ||x_{t,0} - x_{t-1,0}|| / (||Delta|| + eps), 0-d."""
    return 1 + last_step_norm / (c + EPS)


def momentum(m: Tensor, delta: Tensor, beta: float | Tensor, gap: Tensor | None = None) -> Tensor:
    """Step 5: m_t = beta m_{t-1} + Delta / Lambda_t. The penalty scales the new term only.

    Args:
        gap: Shaped as delta, or 0-d. None means Lambda = 1.
    """
    return penalized(delta, gap) + beta * m


def penalized(delta: Tensor, gap: Tensor | None) -> Tensor:
    """Delta / Lambda."""
    return delta if gap is None else delta / gap.to(delta.dtype)


def carried(beta: float, growth: float) -> float:
    """Returns beta * growth, at most 1: the factor of m_{t-1} if Delta covers `growth` times as many local steps.

    Twice the steps lead about twice as far, so a momentum of fewer steps counts more. At 1 the momentum by itself never
    moves x farther than before. Lambda, phi and alpha stay. This rule is ours. Gu et al. (ICLR 2024) change tau
    without an outer momentum.
    """
    return min(1.0, growth * beta)


def clip_elements(m: Tensor, phi: float) -> Tensor:
    """Step 6: clip(m_t, -phi, phi), element by element. The result is what is stored."""
    return m.clamp(-phi, phi)


def outer_step(x: Tensor, m: Tensor, alpha: float | Tensor) -> Tensor:
    """Step 7: x_{t+1,0} = x_{t,0} - alpha m_t."""
    return x - alpha * m


def nesterov(m: Tensor, new: Tensor, beta: float) -> Tensor:
    """Step 7's direction under Nesterov momentum, in place of m_t: beta m_t + Delta_t / Lambda_t.

    DiLoCo (Douillard et al. 2023) takes its outer step so, as torch.optim.SGD does, after Sutskever et al. (2013). m_t
    is clipped, the added term is not.

    Args:
        m: m_t, which already contains `new`.
        new: Delta_t / Lambda_t.
    """
    return beta * m + new


def keep_local(x: Tensor, p: Tensor, snapshot: Tensor) -> Tensor:
    """Merge `keep_local`: x_{t+1,0} plus the worker's progress since its all-reduce started, p - snapshot.

    LOSCAR-SGD (arXiv 2605.20866), hivemind's delta rule and CoCoD-SGD do the same.
    """
    return x + (p - snapshot)


def consensus_distance(squares: Tensor, weight: Tensor, mean_norm: Tensor) -> Tensor:
    """Returns how far the workers' parameters were from their average when they sent, 0-d float64.

    It is the root of mean_i ||x^i - mean||^2. Worker i sends d^i = x - x^i with one x on all workers, so this is
    mean_i ||d^i||^2 - ||mean d||^2. As a difference of two squares it cannot resolve less than a thousandth of
    ||mean d||, and it includes what a compression rounds.

    Args:
        squares: The sum of ||d^i||^2 over the workers that count, 0-d.
        weight: The number of these workers, in the unit of `squares`, 0-d.
        mean_norm: ||mean d||, 0-d.
    """
    mean = torch.where(weight > 0, squares.double() / weight.double(), 0.0)
    return (mean - mean_norm.to(mean).square()).clamp(min=0).sqrt()


# -- stability, on a quadratic whose error tau local steps reduce by the share rho -----------------------------------


@functools.cache
def largest_outer_lr(merge: Merge, beta: float, late: float, nesterov: bool = False) -> float:
    """Returns the outer learning rate from which the outer step, without a penalty, makes some direction grow.

    tau local steps leave the share a of an error, and the local steps behind a merge on arrival leave b = a^(1 - late).
    Without a delay the limit is 2 (1 + beta), under Nesterov momentum over 1 + 2 beta. keep_local adds the old
    momentum's kick late. A restart one round late has x_{t+1} = (1 + beta) x_t - beta x_{t-1} - alpha rho x_{t-1}.
    Jury's criterion at rho = 1, the worst case without overshoot, is beta + alpha < 1. Under Nesterov momentum,
    (1 + beta) x_{t-1} - beta x_{t-2} takes the place of the last x_{t-1}, and the criterion is
    beta + (1 - beta^2) alpha + beta^2 alpha^2 < 1.

    Args:
        merge: How the worker continues.
        beta: Outer momentum.
        late: Local steps between the start of the all-reduce and the merge, over tau. 1 or 0 for a restart.
        nesterov: Whether the momentum is Nesterov's.
    """
    n = beta * nesterov
    undelayed = 2 * (1 + beta) / (1 + 2 * n)
    if merge == "restart" and late:
        linear = 1 - n * beta
        return 2 * (1 - beta) / (linear + (linear**2 + 4 * n**2 * (1 - beta)) ** 0.5)
    if not late:
        return undelayed
    return min(undelayed, *(_limit(i / SHARES, beta, late, n, undelayed) for i in range(SHARES)))


SHARES = 400  # values of a to try


def _limit(a: float, beta: float, late: float, n: float, most: float) -> float:
    """The smallest alpha below `most` with which keep_local grows one direction. n: beta under Nesterov momentum, or 0.

    The map of (x, m, p) has the characteristic polynomial (z - 1)(z - beta)(z + v) + alpha ((1 + n) z - n)
    ((1 - b) z + v), with v = b - a. Jury's criterion says when a root leaves the unit circle.
    """
    b = a ** (1 - late)
    v = b - a

    def grows(alpha: float) -> bool:
        c2 = v - 1 - beta + alpha * (1 + n) * (1 - b)
        c1 = beta - v * (1 + beta) + alpha * ((1 + n) * v - n * (1 - b))
        c0 = beta * v - alpha * n * v
        return not (
            1 + c2 + c1 + c0 > 0 and 1 - c2 + c1 - c0 > 0 and abs(c0) < 1 and abs(c0 * c0 - 1) > abs(c0 * c2 - c1)
        )

    high = next((most * i / 50 for i in range(1, 51) if grows(most * i / 50)), None)
    if high is None:
        return most
    low = high - most / 50
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if grows(middle) else (middle, high)
    return low


# -- one boundary ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The numbers of one outer step.

    The defaults change neither m nor x if d is finite, since 0 times a NaN is a NaN. Only step 3 and the merge
    remain, as in the first round, in which no average has arrived.
    """

    beta: float | Tensor = 1.0
    """Outer momentum, as `carried`."""
    alpha: float | Tensor = 0.0
    """Outer learning rate."""
    last_alpha: float | Tensor = 0.0
    """The outer learning rate of the last step, or 0 if the last boundary took none: x_{t,0} - x_{t-1,0} =
    -last_alpha m, or -last_alpha times the last direction under Nesterov momentum."""
    phi: float | None = None
    """Clips the momentum's elements to [-phi, phi]. None means no clipping."""
    scale: float | Tensor = 0.0
    """Delta = scale * d: one over the sum of the weights if d holds a weighted sum over the workers."""
    delta_rms: Tensor | None = None
    """0-d: the RMS of Delta over the whole model, for the elementwise gap."""
    gap: Tensor | None = None
    """0-d: Lambda itself, if it is one number."""
    nesterov: float | None = None
    """beta of Nesterov's step, or None for step 7 as it is."""
    merge: Merge = "restart"
    """How the worker continues."""
    takes_difference: bool = True
    """Whether step 3 follows from the parameters now, and d holds it afterwards. Otherwise `take` has run before."""


def rule_of(c: Any, growth: float, delta_norm: Tensor, last_step_norm: Tensor, numel: int) -> Rule:
    """Returns what follows for the Rule from the settings `c`, a CO2Config.

    The norms of Delta and of x_{t,0} - x_{t-1,0} are over the same `numel` elements. `growth`: see carried.
    """
    return Rule(
        beta=carried(c.outer_momentum, growth),  # beta, unless tau has changed
        alpha=c.outer_lr,
        phi=c.clip,
        delta_rms=delta_norm / max(1, numel) ** 0.5 if c.gap == "elementwise" else None,
        gap=gap_scalar(last_step_norm, delta_norm) if c.gap == "norm" else None,
        nesterov=c.outer_momentum if c.nesterov else None,
    )


@dataclass(frozen=True)
class Segment:
    """A part of a bucket.

    Attributes:
        params: Slices of the live parameters, in any shapes.
        x_views, d_views: The same elements of x and d, in the shapes of params.
        snapshot: With keep_local, the same elements at the start of the all-reduce. Otherwise empty.
        d, x, m: Slices of the buffer that travels, the outer iterate and the momentum, [n].
        direction: The last direction of step 7, [n], if Nesterov momentum and a gap need it.
    """

    params: list[Tensor]
    x_views: list[Tensor]
    d_views: list[Tensor]
    snapshot: list[Tensor]
    d: Tensor
    x: Tensor
    m: Tensor
    direction: Tensor | None = None


def update(s: Segment, rule: Rule) -> Tensor:
    """Steps 3 to 7 and the merge on a segment, in place.

    Step 3 is computed first, while the workers are where local steps led them, and written last, because d holds the
    average until then.

    Returns:
        Statistics, [4] float64: see new_momentum.
    """
    own_difference = difference(s) if rule.takes_difference else s.d  # 3
    delta = (rule.scale.to(s.d) if isinstance(rule.scale, Tensor) else rule.scale) * s.d
    last = None if s.direction is None else -rule.last_alpha * s.direction
    m, stats = new_momentum(s.m, delta, rule, last)  # 4, 5, 6
    step = m
    if rule.nesterov is not None:
        step = nesterov(m, penalized(delta, staleness_gap(s.m, rule, last)), rule.nesterov)
    s.m.copy_(m)
    if s.direction is not None:
        s.direction.copy_(step)
    s.x.copy_(outer_step(s.x, step, rule.alpha))  # 7
    s.d.copy_(own_difference)
    continue_from(s, rule)
    return stats


def difference(s: Segment) -> Tensor:
    """Step 3: x_{t,0} - x^i_{t,tau}, [n]. The local steps began at x_{t,0} as the parameters' dtype holds it."""
    return torch.cat([(x.to(p.dtype).to(x.dtype) - p).reshape(-1) for x, p in zip(s.x_views, s.params, strict=True)])


def new_momentum(m: Tensor, delta: Tensor, rule: Rule, last_step: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Steps 4 to 6.

    Args:
        last_step: x_{t,0} - x_{t-1,0} if that is not -last_alpha m_{t-1}.

    Returns:
        m_t, and [4] float64: the sum of m_t^2, the sum and the maximum of Lambda, and the number of clipped elements.
    """
    gap = staleness_gap(m, rule, last_step)
    raw = momentum(m, delta, rule.beta, gap)
    new = raw if rule.phi is None else clip_elements(raw, rule.phi)
    gap = torch.ones_like(m) if gap is None else gap.to(m.dtype).expand_as(m)
    clipped = torch.zeros_like(m[0]) if rule.phi is None else (raw.abs() > rule.phi).sum()
    return new, torch.stack([v.double() for v in (torch.dot(new, new), gap.sum(), gap.amax(), clipped)])


def staleness_gap(m: Tensor, rule: Rule, last_step: Tensor | None = None) -> Tensor | None:
    """Step 4 as the rule says: shaped as m, 0-d, or None for Lambda = 1."""
    if rule.delta_rms is None:
        return rule.gap
    return gap_elementwise(rule.last_alpha * m if last_step is None else last_step, rule.delta_rms)


def continue_from(s: Segment, rule: Rule) -> None:
    """The merge, in the precision of x."""
    if rule.merge == "restart":
        copy_each(s.params, s.x_views)
        return
    for p, x, snapshot in zip(s.params, s.x_views, s.snapshot, strict=True):
        p.copy_(keep_local(x, p.to(x.dtype), snapshot))


def combine_stats(parts: Sequence[Tensor]) -> Tensor:
    """Combines the statistics of all parts, [4] from [4] each."""
    if len(parts) == 1:
        return parts[0]
    stats = torch.stack([p.to(parts[0].device) for p in parts])
    return torch.stack([stats[:, 0].sum(), stats[:, 1].sum(), stats[:, 2].max(), stats[:, 3].sum()])


def segment_size(flat: Tensor) -> int:
    """How many elements are updated at a time on this tensor's device."""
    return GPU_SEGMENT if flat.is_cuda else SEGMENT


class OuterStep:
    """`update` over one bucket, segment after segment. The faster passes derive from it and must equal it.

    A parameter whose storage was replaced (`p.data = ...`) is noticed.

    Args:
        params: The live parameters, of one dtype and device, in any shapes and strides, with at least one element.
        d, x, m: Flat, [sum of their numel], in the parameters' order. Float32 for 16-bit parameters, else their dtype.
        snapshot: Flat as x, for merge keep_local.
        direction: Flat as x, for Nesterov momentum with a gap.
        start: The first element of `params` that the flat tensors hold. They may also end before the last one.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        d: Tensor,
        x: Tensor,
        m: Tensor,
        snapshot: Tensor | None = None,
        direction: Tensor | None = None,
        start: int = 0,
    ):
        self.params, self.d, self.x, self.m, self.snapshot, self.direction = params, d, x, m, snapshot, direction
        self._start, total = start, len(d)
        assert start + total <= sum(p.numel() for p in params)
        assert all(f.shape == (total,) and f.is_contiguous() and f.dtype == d.dtype for f in (d, x, m))
        assert all(p.dtype == params[0].dtype and p.device == d.device for p in params)
        self.segments: list[Segment] = []
        self._layout: list[tuple[int, tuple[int, ...]]] = []

    @torch.no_grad()
    def run(self, rule: Rule) -> Tensor:
        """Runs steps 3 to 7 and the merge over the bucket; returns statistics, [4] float64 on d's device."""
        self.locate()
        return self.update(rule)

    @torch.no_grad()
    def take(self) -> None:
        """Only step 3: d becomes the difference to send, and the snapshot the parameters. Parameters and x stay."""
        self.locate()
        for s in self.segments:
            s.d.copy_(difference(s))
            if s.snapshot:
                copy_each(s.snapshot, s.params)

    @torch.no_grad()
    def restart(self, where: Tensor | None = None) -> None:
        """The worker continues from the outer iterate, as if it had sent it, if the 0-d bool `where` is True, or None.

        The host never waits for a GPU.
        """
        self.locate()
        for s in self.segments:
            if where is None:
                copy_each(s.params, s.x_views)
            else:
                copy_where(where, s.params, s.x_views)
                copy_where(where, s.snapshot, s.params[: len(s.snapshot)])

    def locate(self) -> None:
        """Plans the segments again if a parameter's storage has moved."""
        layout = [(p.data_ptr(), p.stride()) for p in self.params]
        if layout != self._layout:
            self.plan()
            self._layout = layout

    def own(self) -> list[Tensor]:
        """Returns views of the parameters' elements that the flat tensors hold."""
        return elements(self.params, self._start, self._start + len(self.d))

    def plan(self) -> None:
        """Cuts the bucket into segments."""
        self.segments, start = [], 0
        for pieces in group_pieces(self.own(), segment_size(self.d)):
            place = slice(start, start := start + sum(p.numel() for p in pieces))
            d, x, m = (f[place] for f in (self.d, self.x, self.m))
            snapshot = [] if self.snapshot is None else views(self.snapshot[place], pieces)
            direction = None if self.direction is None else self.direction[place]
            self.segments.append(Segment(pieces, views(x, pieces), views(d, pieces), snapshot, d, x, m, direction))

    def update(self, rule: Rule) -> Tensor:
        """Runs `update` on all segments."""
        return combine_stats([update(s, rule) for s in self.segments])


def run_all(steps: Sequence[OuterStep], rule: Rule) -> Tensor:
    """Runs the outer step of every bucket, and returns the statistics of all of them, [4] float64."""
    return combine_stats([step.run(rule) for step in steps])


class FusedOuterStep(OuterStep):
    """One pass over memory, a cache-sized segment after the other. It would synchronize a GPU.

    p, d, x and m cross the memory's bus once; the elementwise gap reads d once more before. The result can differ from
    `update` in the last bit if the number of workers is no power of two, or the gap is elementwise: it divides by
    Lambda / scale instead of Lambda, and computes the slope of Lambda once.
    """

    def plan(self) -> None:
        super().plan()
        self._scratch = self.d.new_empty(max((len(s.d) for s in self.segments), default=0))

    def update(self, rule: Rule) -> Tensor:
        slope = 0.0 if rule.delta_rms is None else float(rule.last_alpha) / (rule.delta_rms.item() + EPS)
        gap = 1.0 if rule.gap is None else rule.gap.item()
        stats = []
        for s in self.segments:
            stats.append(self._momentum(s, rule, gap, slope))  # 4, 5, 6
            if rule.takes_difference:
                s.d.copy_(difference(s))  # 3: d is free now, and p is still x^i_{t,tau}
            s.x.sub_(s.m, alpha=float(rule.alpha))  # 7
            continue_from(s, rule)
        squares, gaps, tops, clipped = zip(*stats, strict=True)
        numbers = [sum(squares), sum(gaps), max(tops), sum(clipped)]
        return torch.tensor(numbers, dtype=torch.float64, device=self.d.device)

    def _momentum(self, s: Segment, rule: Rule, gap: float, slope: float) -> tuple[float, float, float, float]:
        """m <- clip(beta m + Delta / Lambda), with Lambda = 1 + slope |m|, or `gap` if slope is 0.

        Returns:
            Statistics as plain numbers, because .item() costs nothing on a CPU.
        """
        scratch, scale = self._scratch[: len(s.d)], float(rule.scale)
        beta, gap_sum, gap_max, clipped = float(rule.beta), gap * len(s.m), gap, 0.0
        if slope:
            torch.abs(s.m, out=scratch)  # then Lambda / scale, which saves a pass that scales d
            torch.add(s.m.new_tensor(1 / scale), scratch, alpha=slope / scale, out=scratch)
            gap_sum = scratch.sum().item() * scale
            gap_max = scratch.amax().item() * scale
            torch.div(s.d, scratch, out=scratch)
            torch.add(scratch, s.m, alpha=beta, out=s.m)
        else:
            s.m.mul_(beta).add_(s.d, alpha=scale / gap)
        if rule.phi is not None:
            low, high = torch.aminmax(s.m)
            if not (-rule.phi <= low.item() and high.item() <= rule.phi):  # usually nothing is clipped
                clipped = torch.abs(s.m, out=scratch).gt_(rule.phi).sum().item()
                s.m.clamp_(-rule.phi, rule.phi)
        return torch.dot(s.m, s.m).item(), gap_sum, gap_max, clipped
