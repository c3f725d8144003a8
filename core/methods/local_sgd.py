"""Local-SGD and SlowMo, and what every method shares that waits for the mean of the parameters."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from ..assembly import CO2Config, Options, of_kind, plugs_of_other
from ..assembly.config import WireConfig
from ..checkpoints.saved import Saved
from ..config import LARGE, is_number
from ..errors import UserError
from ..flat import copy, rescale, tensors_of, views
from ..outer import carried


class Blocking(Saved):
    """A method that waits at every boundary for a mean: of the differences from `starts`, or of the parameters where
    it keeps none. wire: how they cross the network."""

    def __init__(
        self, params: Iterable[Tensor], tau: int, *, wire: WireConfig | None = None, **options: Unpack[Options]
    ):
        given, shared = tensors_of(params, "parameters"), CO2Config(tau=tau, wire=wire or WireConfig())
        super().__init__(given, **plugs_of_other(given, shared, options, hidden=False))

    def close_round(self, *, finished: bool) -> bool:
        for bucket, start in itertools.zip_longest(self.buckets, self.starts):
            bucket.flatten(bucket.payload)
            if start is not None:
                torch.sub(start, bucket.payload, out=bucket.payload)
        self.send(finished=finished)
        landing = self.land(finished=finished)
        if not landing.empty:
            for bucket in self.buckets:
                rescale(bucket.payload, self.scale)
            self.apply()
        return landing.last

    @abstractmethod
    def apply(self) -> None:
        """Uses the mean, which the payloads hold."""


class LocalSGD(Blocking):
    """Local-SGD (Stich, ICLR 2019): every tau local steps the parameters are averaged, and everyone waits.

    wire: in a narrow format differences from the last mean are sent, for a copy of the parameters: rounded, the
    parameters themselves would lose more than a round moves them. options: see core.assembly.Options.
    """

    name = "LocalSGD"

    def __init__(
        self, params: Iterable[Tensor], tau: int, *, wire: WireConfig | None = None, **options: Unpack[Options]
    ):
        super().__init__(params, tau, wire=wire, **options)
        if wire is not None and wire.format != "float32":
            self.replicas = self.starts = self.state.new("outer_iterate", of_params=True)

    def apply(self) -> None:
        for bucket, start in itertools.zip_longest(self.buckets, self.starts):
            mean = bucket.payload if start is None else start.sub_(bucket.payload)
            copy(bucket.params, views(mean, bucket.params))


@dataclass(frozen=True)
class SlowMoConfig:
    """SlowMo's settings (Wang et al., ICLR 2020); the period is CO2's tau."""

    outer_lr: float = 1.0
    """alpha"""
    outer_momentum: float = 0.5
    """beta"""

    def __post_init__(self) -> None:
        if not (is_number(self.outer_lr) and 0 < self.outer_lr < LARGE):
            raise UserError(f"slowmo.outer_lr={self.outer_lr}: give a finite number above 0, as 1.0 is usual")
        if not (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            raise UserError(f"slowmo outer_momentum={self.outer_momentum}: give a number in [0, 1)")


class SlowMo(Blocking):
    """SlowMo (Wang et al., ICLR 2020): Local-SGD whose average takes a step with momentum.

    u <- beta u + mean_i (x_{t,0} - x^i_{t,tau}) / gamma;  x_{t+1,0} = x_{t,0} - alpha gamma u. lr: returns gamma, the
    inner learning rate of now; None stands for a constant one, which cancels. The other arguments: see
    LocalSGD.
    """

    name = "SlowMo"

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        config: SlowMoConfig | None = None,
        *,
        lr: Callable[[], float] | None = None,
        wire: WireConfig | None = None,
        **options: Unpack[Options],
    ):
        self.config = of_kind(config, SlowMoConfig, "config")
        super().__init__(params, tau, wire=wire, **options)
        self._lr = lr or (lambda: 1.0)
        self._x = self.state.new("outer_iterate", of_params=True)
        self._u = self.state.new("outer_momentum")
        self.replicas = self.starts = self._x

    def apply(self) -> None:
        gamma = max(self._lr(), 1e-12)  # a schedule may end at exactly 0
        for bucket, x, u in zip(self.buckets, self._x, self._u, strict=True):
            u.mul_(carried(self.config.outer_momentum, self.growth)).add_(bucket.payload, alpha=1 / gamma)
            x.sub_(u, alpha=self.config.outer_lr * gamma)
            copy(bucket.params, views(x, bucket.params))
