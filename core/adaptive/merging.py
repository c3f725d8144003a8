"""The boundary where a worker continues from elsewhere than the outer iterate (merge mix, keep), and where the sending
and the merge come apart (delay): core/outer.py's update with a merge behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..flat import copy, copy_where, kernels_of, views
from ..outer import Boundary, Rule, Segment, advance, all_seen, difference
from ..passes import ChunkedBoundary

Merge = Literal["outer", "mix", "keep"]
MERGES: tuple[Merge, ...] = ("outer", "mix", "keep")


def mix(x: Tensor, p: Tensor, share: float) -> Tensor:
    """Merge `mix`: share x_{t+1,0} + (1 - share) x^i, between the outer iterate and the worker's own parameters.

    The next difference is still taken from the outer iterate.
    Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512).
    """
    return share * x + (1 - share) * p


def keep(x: Tensor, p: Tensor, sent: Tensor) -> Tensor:
    """Merge `keep`: x_{t+1,0} and, on top, the worker's own progress since it sent what has landed, p - sent.

    LOSCAR-SGD (arXiv 2605.20866); also hivemind's delta rule, and CoCoD-SGD's.
    """
    return x + (p - sent)


def largest_outer_lr(merge: Merge, beta: float, late: float) -> float:
    """The outer learning rate from which on a mean that is not merged in the paper's order makes some direction of a
    quadratic grow, without a penalty. beta: outer momentum. late: local steps from sending to merging, over tau.

    After what is left of an error by tau local steps (a) and by those behind the merge (b), Jury's criterion on the
    mean's map. Undelayed, and for all but keep: 2 (1 + beta). keep adds the old momentum's kick late: from late = 1,
    the worst, 2 (1 - beta^2).
    """
    limits = [2 * (1 + beta)]
    for i in range(1, 1000) if merge == "keep" and late > 0 else ():
        a = i / 1000
        b = a ** (1 - late)
        v = b - a
        limits.append((1 - beta) * (1 + v) * (1 + beta * v) / (v * (1 - beta + beta * b)))
    return 2 * (1 - beta**2) if merge == "keep" and late == 1 else min(limits)


@dataclass(frozen=True)
class MergeRule(Rule):
    """The numbers of one boundary, and the merge."""

    merge: Merge = "outer"
    """What the worker continues from: x_{t+1,0} (the paper), `mix` or `keep`."""
    share: float = 1.0
    """Of merge mix: that of the outer iterate."""
    sends: bool = True
    """Whether step 3 is taken here, and d holds the worker's difference afterwards; else it was taken before."""


def with_merge(rule: Rule) -> MergeRule:
    """A rule without one is the paper's."""
    return rule if isinstance(rule, MergeRule) else MergeRule(**vars(rule))


@dataclass(frozen=True)
class MergeSegment(Segment):
    """sent: with merge keep the parameters as they were at the sending, in their shapes, else empty."""

    sent: list[Tensor]


def update(s: MergeSegment, rule: MergeRule) -> Tensor:
    """outer.update, then the merge; returns what was seen, [4]."""
    own_difference = difference(s) if rule.sends else s.d  # 3
    seen = advance(s, rule)  # 4 to 7
    s.d.copy_(own_difference)
    restart(s, rule)
    return seen


def restart(s: MergeSegment, rule: MergeRule) -> None:
    """The merge, in the precision of x."""
    if rule.merge == "outer":
        copy(s.params, s.x_views)
    for i, (p, x) in enumerate(zip(s.params, s.x_views, strict=True)):
        if rule.merge == "mix":
            p.copy_(mix(x, p.to(x.dtype), rule.share))
        elif rule.merge == "keep":
            p.copy_(keep(x, p.to(x.dtype), s.sent[i]))


class MergingBoundary(Boundary):
    """`update` over one bucket. sent: flat as x, where merge keep needs it. The others: see Boundary."""

    segments: list[MergeSegment]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, params: Sequence[Tensor], d: Tensor, x: Tensor, m: Tensor, sent: Tensor | None = None):
        super().__init__(params, d, x, m)
        self.sent = sent

    @torch.no_grad()
    def take(self) -> None:
        """Step 3 alone: d becomes what this worker sends, the parameters and x stay."""
        self.locate()
        for s in self.segments:
            self.take_difference(s)
            copy(s.sent, s.params[: len(s.sent)])

    @torch.no_grad()
    def restart(self, where: Tensor | None = None) -> None:
        """The worker continues from the outer iterate, as if it had sent it. where: 0-d truth value, None for always;
        a GPU is not waited for."""
        self.locate()
        for s in self.segments:
            if where is None:
                copy(s.params, s.x_views)
            else:
                copy_where(where, s.params, s.x_views)
                copy_where(where, s.sent, s.params[: len(s.sent)])

    def segment(self, pieces: list[Tensor], place: slice) -> MergeSegment:
        sent = [] if self.sent is None else views(self.sent[place], pieces)
        return MergeSegment(**vars(super().segment(pieces, place)), sent=sent)

    def update(self, rule: Rule) -> Tensor:
        return all_seen([update(s, with_merge(rule)) for s in self.segments])

    def take_difference(self, s: Segment) -> None:
        """Step 3 of a segment."""
        s.d.copy_(difference(s))


class MergingInPlace(ChunkedBoundary, MergingBoundary):
    """The same in one pass over memory on a CPU."""

    def send(self, s: Segment, rule: Rule) -> None:
        if with_merge(rule).sends:
            self.take_difference(s)

    def restart_segment(self, s: Segment, rule: Rule) -> None:
        assert isinstance(s, MergeSegment)
        rule = with_merge(rule)
        if self.narrow or rule.merge == "outer":
            restart(s, rule)
        elif rule.merge == "mix":
            torch._foreach_lerp_(s.params, s.x_views, rule.share)  # pyright: ignore[reportPrivateImportUsage]
        else:
            torch._foreach_sub_(s.params, s.sent)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(s.params, s.x_views)  # pyright: ignore[reportPrivateImportUsage]


def make_boundary(
    params: Sequence[Tensor], d: Tensor, x: Tensor, m: Tensor, sent: Tensor | None = None
) -> MergingBoundary:
    """As core.passes.make_boundary."""
    if kernels := kernels_of(d.device):
        return kernels.TritonBoundary(params, d, x, m, sent)
    return (MergingBoundary if d.is_cuda else MergingInPlace)(params, d, x, m, sent)
