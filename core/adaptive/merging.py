"""CO2 whose means are merged when they land, or are mixed: the worker goes on from where it is (merge, delay).

A worker may continue from elsewhere than the outer iterate (merge mix, keep), and the sending and the merge may come
apart (delay): core/outer.py's update with a merge behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import outer
from ..co2 import CO2
from ..flat import copy, copy_where, kernels_of, views
from ..outer import Boundary, ChunkedBoundary, Rule, Segment, advance, all_seen, difference
from ..rounds import Landing
from .config import AdaptiveConfig, Merge


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
    """As core.outer.make_boundary."""
    if kernels := kernels_of(d.device):
        return kernels.TritonBoundary(params, d, x, m, sent)
    return (MergingBoundary if d.is_cuda else MergingInPlace)(params, d, x, m, sent)


class OnArrival(CO2):
    """The arguments: see CO2; config: an AdaptiveConfig, whose merge and delay say from what a worker continues, and
    when.

    Where means are merged on arrival settle() waits for the one that was just sent, and merges it; the time counts as
    exposed.
    """

    config: AdaptiveConfig
    reads = AdaptiveConfig
    _boundaries: list[MergingBoundary]  # pyright: ignore[reportIncompatibleVariableOverride]

    def make_boundaries(self) -> list[MergingBoundary]:  # pyright: ignore[reportIncompatibleMethodOverride]
        c, self._finishing = self.config, False
        self.starts_roughly = c.merge != "outer"
        sent = self.state.new("sent", of_params=True, own=True) if c.merge == "keep" else [None] * len(self.buckets)
        flats = zip(self.buckets, self._x, self._m, sent, strict=True)
        return [make_boundary(b.params, b.payload, x, m, y) for b, x, m, y in flats if b.numel]

    def step(self, *, last: bool = False) -> bool:
        """See Rounds; merges the mean that is in flight where it is due within the round."""
        closed = super().step(last=last)
        if not closed and self.flight.in_flight and self.pacing.merges(self):
            self._merge_early()
        return closed

    @torch.inference_mode(False)
    @torch.no_grad()
    def _merge_early(self) -> None:
        with self.clock.early_merge(self.local_steps):
            self.merge()
            self.moved(at_boundary=False)

    def close_round(self, *, finished: bool) -> bool:
        c, self._finishing = self.config, finished
        papers_order = c.merge != "keep" and c.at_boundary
        landing = self.merge(finished=finished) if self.flight.in_flight and not papers_order else None
        if landing and landing.last:
            return True
        if finished and not self.local_steps:
            self._restart()  # what an earlier mean was mixed with is no local step
        if papers_order:
            return super().close_round(finished=finished)
        for boundary in self._boundaries:
            boundary.take()
        self.send(finished=finished)
        return c.delay == 0 and self.merge(finished=finished).last

    def merge(self, *, finished: bool = False) -> Landing:
        """Steps 2 and 4 to 7, and the merge. In finish() no step follows, so nothing is mixed."""
        self._finishing = finished
        landing = self.land(finished=finished)
        if not landing.empty:
            self.pass_over(MergeRule(**vars(self.rule()), sends=False))
        if landing.last:  # nothing is stale any more
            self._restart()
            self._last_lr = 0.0
        return landing

    def continued(self, rule: outer.Rule) -> outer.Rule:
        c, finishing = self.config, self._finishing
        if isinstance(rule, MergeRule):  # it is merged alone
            return replace(rule, merge=c.merge, share=0.0 if finishing and c.delay != 0 else c.mix)
        return MergeRule(**vars(rule), merge="outer" if finishing else c.merge, share=c.mix)

    def settings(self) -> Any:
        return self.config.changing(self.tau)

    def left_out(self, where: Tensor) -> None:
        super().left_out(where)
        for boundary in self._boundaries if self.config.merge != "outer" else []:  # else every boundary restarts it
            boundary.restart(where)

    def _restart(self) -> None:
        for boundary in self._boundaries:
            boundary.restart()

    def is_common(self) -> bool:
        """See Rounds: with merge keep no worker has progress of its own when it has merged what it just sent."""
        c = self.config
        if c.delay == "auto" and c.merge == "keep" and self.at_boundary and self.flight.in_flight:
            self._merge_early()
            self.moved(at_boundary=True)
        # with merge mix and delay 0 workers differ though nothing is in flight
        return super().is_common() and not (c.merge == "mix" and self._differs())

    def _differs(self) -> bool:
        """Whether this worker is not where the outer iterate is."""
        flats = zip(self.buckets, self.starts, strict=True)
        pairs = (pair for b, flat in flats for pair in zip(b.params, views(flat, b.params), strict=True))
        return any(not torch.equal(p, x.to(p.dtype)) for p, x in pairs)  # one tensor at a time
