"""What to do about a mean that arrives one round late: comparators of CO2's penalty, and Nesterov's outer momentum.

A policy has two hooks: the pseudo-gradient that is used for the one that arrived, and where a worker restarts. The
penalty itself needs neither and has a single fused pass (core/fused.py); whatever else is chosen runs in the plain
tensor operations of core/outer.py, piece by piece: slower, and with more memory where more state is kept.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from core import outer
from core.fused import BoundaryStats, ChunkedBoundary, Rule, Segment, Work

PolicyName = Literal["penalty", "eager", "mix", "taylor"]
POLICIES: tuple[PolicyName, ...] = ("penalty", "eager", "mix", "taylor")


class Policy:
    """`penalty`: the mean as it arrived, and the outer iterate. Subclasses change one of the two."""

    own_part = False
    """Whether a worker's own newest difference enters: then it takes an outer step before any mean has arrived, its
    outer iterate and momentum differ from the others', and finish() takes their mean."""
    finishing = False
    """Set by finish(): workers then restart from the outer iterate itself."""

    def pseudo_gradient(self, delta: Tensor, moved: Tensor, own: Tensor | None, last_own: Tensor | None) -> Tensor:
        """What is used for delta, the mean of the last round. moved: x_{t,0} - x_{t-1,0}. own, last_own: d^i_t and
        d^i_{t-1}, this worker's differences of the round that just ended and of the one before, with own_part."""
        return delta

    def restart(self, x: Tensor, p: Tensor) -> Tensor:
        """Where the worker goes on. x: x_{t+1,0}. p: its own x^i_{t,tau}, in the dtype of x."""
        return x


class Eager(Policy):
    """See outer.eager. The own parts cancel from round to round, so that with beta = 0 and no clipping the workers'
    outer iterates differ by alpha d^i_t / G and never drift apart; a clipped momentum may let them."""

    own_part = True

    def __init__(self, workers: int):
        self.share = 1 / workers

    def pseudo_gradient(self, delta: Tensor, moved: Tensor, own: Tensor | None, last_own: Tensor | None) -> Tensor:
        assert own is not None and last_own is not None
        return outer.eager(delta, own, last_own, self.share)


class Mix(Policy):
    """See outer.mix. The next difference is still taken from the outer iterate."""

    def __init__(self, share: float):
        self.share = share

    def restart(self, x: Tensor, p: Tensor) -> Tensor:
        return x if self.finishing else outer.mix(x, p, self.share)


class Taylor(Policy):
    """See outer.delay_compensated."""

    def __init__(self, strength: float):
        self.strength = strength

    def pseudo_gradient(self, delta: Tensor, moved: Tensor, own: Tensor | None, last_own: Tensor | None) -> Tensor:
        return outer.delay_compensated(delta, moved, self.strength)


def choose(name: PolicyName, *, workers: int, mix: float, taylor: float) -> Policy:
    """workers: whose mean it is. mix, taylor: as in CO2Config."""
    if name == "eager":
        return Eager(workers)
    if name == "mix":
        return Mix(mix)
    return Taylor(taylor) if name == "taylor" else Policy()


class PolicyBoundary(ChunkedBoundary):
    """The boundary (core/fused.py) with a policy. step: the last outer step over -alpha, if Nesterov is to be used;
    last_own: d^i_{t-1}, if the policy needs it. Both flat, as d, x and m."""

    def __init__(
        self,
        params: list[Tensor],
        d: Tensor,
        x: Tensor,
        m: Tensor,
        policy: Policy,
        step: Tensor | None = None,
        last_own: Tensor | None = None,
    ):
        super().__init__(params, d, x, m)
        self.policy, self.step_taken, self.last_own = policy, step, last_own

    def _run(self, work: Work, rule: Rule) -> BoundaryStats:
        seen = [torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64, device=self.d.device)]
        start = 0
        for segment in self._segments:
            where = slice(start, start + len(segment.d))
            start = where.stop
            if Work.MOMENTUM in work:
                seen.append(self._momentum(segment, where, rule))
            if Work.SNAPSHOT in work:
                segment.d.copy_(_difference(segment))
            if Work.ADVANCE in work:
                self._advance(segment, where, rule)
            if Work.RESTORE in work:
                for p, x in zip(segment.params, segment.x_views, strict=True):
                    p.copy_(self.policy.restart(x, p.to(x.dtype)))
        squares, gaps, tops, clipped = torch.stack(seen).unbind(1)
        return BoundaryStats(squares.sum(), gaps.sum(), tops.max(), clipped.sum())

    def _momentum(self, s: Segment, where: slice, rule: Rule) -> Tensor:
        """m, and with Nesterov Delta / Lambda in the place of the step; the statistics, [4], as BoundaryStats."""
        moved = -rule.last_alpha * (s.m if self.step_taken is None else self.step_taken[where])
        own = last_own = None
        if self.last_own is not None:
            own, last_own = _difference(s), self.last_own[where]
        delta = self.policy.pseudo_gradient(rule.scale * s.d, moved, own, last_own)
        gap = rule.gap if rule.c is None else outer.gap_elementwise(moved, rule.c)
        gap = torch.ones_like(delta) if gap is None else gap.to(delta.dtype).expand_as(delta)
        new = delta / gap
        raw = outer.momentum(s.m, new, rule.beta)
        s.m.copy_(raw if rule.phi is None else outer.clip_elements(raw, rule.phi))
        if self.step_taken is not None:
            self.step_taken[where] = new
        if self.last_own is not None and own is not None:
            self.last_own[where] = own
        clipped = torch.zeros_like(gap[0]) if rule.phi is None else (raw.abs() > rule.phi).sum()
        return torch.stack([v.double() for v in (torch.dot(s.m, s.m), gap.sum(), gap.amax(), clipped)])

    def _advance(self, s: Segment, where: slice, rule: Rule) -> None:
        step = s.m
        if self.step_taken is not None:
            step = self.step_taken[where].copy_(outer.nesterov(s.m, self.step_taken[where], rule.beta))
        s.x.copy_(outer.outer_step(s.x, step, rule.alpha))


def _difference(s: Segment) -> Tensor:
    """r(x) - p, flat, with r(x) = x rounded to p's dtype, from which p restarted."""
    return torch.cat([(x.to(p.dtype).to(x.dtype) - p).reshape(-1) for x, p in zip(s.x_views, s.params, strict=True)])


def instability(policy: PolicyName, alpha: float, beta: float, nesterov: bool) -> str:
    """Why a delayed outer step without a penalty may diverge with these settings; empty where it cannot.

    No policy here changes the limit that outer.settles gives: where tau local steps solve a direction (rho = 1) a
    mixed restart forgets its local part; Taylor's term is of third order, so that beyond the limit a cycle replaces
    the minimum; and an own part of 1 / G leaves beta + (1 - 1 / G) alpha < 1, which tends to the same with the number
    of workers G, unknown here.
    """
    if outer.settles(alpha, beta, nesterov):
        return ""
    remedy = "set gap='elementwise'" if policy == "penalty" else "set policy='penalty' and gap='elementwise'"
    limit = "a sum below 1"
    if nesterov:
        limit = "(1 - outer_momentum^2) outer_lr + (outer_momentum outer_lr)^2 < 1 - outer_momentum (Nesterov)"
    return (
        f"outer_momentum={beta} + outer_lr={alpha} = {alpha + beta:g} with gap='none' is unstable: a step delayed by "
        "one round settles only while beta + alpha rho / Lambda < 1, where rho nears 1 in directions that tau local "
        f"steps solve; {remedy}, or lower the two to {limit} (allow_unstable=True runs it regardless)"
    )
