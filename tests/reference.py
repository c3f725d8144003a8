"""The executable specification of core/methods/delayed.py's policies and of clipping by norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.reference import LateReference, Sent


@dataclass
class DelayedReference(LateReference):
    """policy, taylor, clip_by: as in DelayedConfig. With policy eager workers have outer iterates of their own: the
    tensors of `outer` are [workers, n]."""

    policy: str = "penalty"
    taylor: float = 0.5
    clip_by: str = "element"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy != "eager":
            return
        if self.merge != "outer" or not self.whole_round or self.gap != "none":
            raise ValueError("eager: its own part is that of a round; merge outer, a whole round late, gap none")
        self.z = self.x.clone()
        self.m, self.outer = torch.zeros_like(self.z), [self.z]
        nothing = torch.zeros_like(self.x)  # no difference was sent before the first
        self.in_flight = [Sent(-1, self.tau, nothing, nothing[0], self.z)]

    def pseudo_gradient(self) -> Tensor:
        delta = self.landed.mean
        if self.policy == "taylor":
            return delta + self.taylor * delta**2 * (self.z - self.landed.start)
        if self.policy == "eager":
            newest = self.in_flight[0].own if self.in_flight else torch.zeros_like(self.x)
            return delta + (newest - self.landed.own) / len(self.x)
        return delta

    def clipped(self, m: Tensor) -> Tensor:
        if self.phi is None or self.clip_by == "element":
            return super().clipped(m)
        norms = m.norm(dim=-1, keepdim=True)
        return torch.where(norms > self.phi, m * (self.phi / norms), m)

    def finish(self) -> None:
        super().finish()
        if self.policy == "eager":
            self.z, self.m = (v.mean(dim=0, keepdim=True).expand_as(v) for v in (self.z, self.m))
            self.x.copy_(self.z)
            self.base = self.x.clone()
