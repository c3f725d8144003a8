"""gap="inner": the staleness gap whose scale is tau times the first local step's length, the workers' mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import outer
from ..flat import views
from ..held import Held
from ..riders import Rider


class FirstStep(Rider):
    """Measures ||x_{t,1} - x_{t,0}||, and keeps the largest mean of the rounds that landed: a decaying learning rate
    does not shrink it. The method must keep where rounds start."""

    name, shared = "first_step", {"first_step": 1}
    steps_change_it = True

    def attach(self, method: Held) -> None:
        super().attach(method)
        self.restart()

    def restart(self) -> None:
        self.first = torch.zeros((), dtype=torch.float64, device=self.method.flight.device)
        self.largest = self.first.clone()

    @torch.no_grad()
    def began(self) -> None:
        norms = []  # one tensor at a time
        for bucket, flat in zip(self.method.buckets, self.method.starts, strict=True):
            for x, p in zip(views(flat, bucket.params), bucket.params, strict=True):
                norms += [outer.norm([p.to(x.dtype) - x.to(p.dtype)])] if p.numel() else []
        self.first = outer.norm(norms).double()

    def pack(self) -> None:
        weight = self.method.scalars["weight"].double()
        self.method.scalars.set("first_step", torch.where(weight > 0, weight * self.first, 0.0))

    def largest_now(self) -> Tensor:
        """0-d; what has landed included."""
        first, weight = self.method.scalars["first_step"].double(), self.method.scalars["weight"].double()
        torch.maximum(self.largest, torch.where(weight > 0, first / weight, 0.0), out=self.largest)
        return self.largest

    def state_dict(self) -> Any:
        return [self.first.clone(), self.largest.clone()]

    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        if state:
            self.first, self.largest = (t.to(self.first, copy=True) for t in state)
