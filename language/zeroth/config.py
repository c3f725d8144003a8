"""The settings of zeroth-order training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from core.config import is_number, require


@dataclass(frozen=True)
class ZerothConfig:
    """Two forward passes a step, at W + eps z and W - eps z, and W <- W - lr (g z + weight_decay W)."""

    eps: float = 1e-3
    """How far the weights are moved along z to measure the slope; MeZO's."""
    weight_decay: float = 0.0
    """Of matrices, embeddings among them; not of biases and norms, which are vectors."""
    seed: int = 0
    """Of z, which depends on (seed, step, tensor, place in it) and nothing else."""
    pairs: bool | None = None
    """Two ranks (2 i and 2 i + 1) take the same data, one at W + eps z, one at W - eps z. None: where the number of
    workers is even. Otherwise every worker does both."""
    rng: Literal["device", "host"] = "device"
    """Where z is drawn. Devices of different kinds draw different numbers: workers that mix them need host."""

    def __post_init__(self) -> None:
        require(self, is_number(self.eps) and 0 < self.eps < math.inf, "eps", "give a number above 0, such as 1e-3")
        decays = is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf
        require(self, decays, "weight_decay", "give 0 or more")
        seeds = type(self.seed) is int and 0 <= self.seed < 1 << 63
        require(self, seeds, "seed", "give a whole number from 0 to 2^63 - 1")
        require(self, self.pairs in (None, True, False), "pairs", "give True, False or None")
        require(self, self.rng in ("device", "host"), "rng", "choose device or host")
