"""CO2 whose means are merged when they land, or are mixed: the worker goes on from where it is (merge, delay)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import outer
from ..co2 import CO2
from ..flat import views
from ..rounds import Landing
from .config import AdaptiveConfig
from .merging import MergeRule, MergingBoundary, make_boundary


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

    def settle(self) -> bool:
        """See Loop: with merge keep no worker has progress of its own when it has merged what it just sent."""
        c = self.config
        if c.delay == "auto" and c.merge == "keep" and self.at_boundary and self.flight.in_flight:
            self._merge_early()
            self.moved(at_boundary=True)
        # with merge mix and delay 0 workers differ though nothing is in flight
        return super().settle() and not (c.merge == "mix" and self._differs())

    def _differs(self) -> bool:
        """Whether this worker is not where the outer iterate is."""
        flats = zip(self.buckets, self.starts, strict=True)
        pairs = (pair for b, flat in flats for pair in zip(b.params, views(flat, b.params), strict=True))
        return any(not torch.equal(p, x.to(p.dtype)) for p, x in pairs)  # one tensor at a time
