"""SlowMo: Local-SGD with an outer momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from ..assembly import Options, of_kind
from ..assembly.wire import WireConfig
from ..config import LARGE, is_number
from ..errors import UserError
from ..flat import copy, views
from ..outer import carried
from .local_sgd import Blocking


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
