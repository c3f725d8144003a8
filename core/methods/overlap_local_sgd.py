"""Overlap-Local-SGD: hidden communication by pulling towards an anchor that is averaged in the background."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor

from ..assembly import CO2Config, Options, of_kind, plugs_of_other
from ..assembly.config import WireConfig
from ..checkpoints.saved import Saved
from ..config import is_number
from ..errors import UserError
from ..flat import copy, copy_where, rescale, tensors_of, views
from ..outer import carried


@dataclass(frozen=True)
class OverlapLocalConfig:
    """Overlap-Local-SGD's settings (Wang, Liang and Joshi, ICASSP 2020); the period is CO2's tau."""

    pull: float = 0.6
    """a: how far each boundary pulls the local model towards the anchor."""
    anchor_momentum: float = 0.7
    """Momentum of the anchor."""

    def __post_init__(self) -> None:
        if not (is_number(self.pull) and 0 < self.pull <= 1):
            raise UserError(f"overlap_local pull={self.pull}: give a number in (0, 1]")
        if not (is_number(self.anchor_momentum) and 0 <= self.anchor_momentum < 1):
            raise UserError(f"overlap_local anchor_momentum={self.anchor_momentum}: give a number in [0, 1)")


class OverlapLocalSGD(Saved):
    """Overlap-Local-SGD (Wang, Liang and Joshi, ICASSP 2020): an anchor model, averaged in the background.

    At a boundary the mean launched one round ago moves the anchor, v <- mu v + (mean - z), z <- z + v; each worker is
    pulled towards it, x^i <- x^i - a (x^i - z); and the mean of the pulled models is launched. Workers differ
    until finish(), which leaves all with the mean. What travels is z less the pulled model, for z is equal on all;
    wire: how it crosses the network. options: see core.assembly.Options.
    """

    name = "OverlapLocalSGD"

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int | Literal["auto"],
        config: OverlapLocalConfig | None = None,
        *,
        tau_max: int = 192,
        wire: WireConfig | None = None,
        **options: Unpack[Options],
    ):
        self.config = of_kind(config, OverlapLocalConfig, "config")
        shared = CO2Config(tau=tau, tau_max=tau_max, wire=wire or WireConfig())
        super().__init__(given := tensors_of(params, "parameters"), **plugs_of_other(given, shared, options))
        self._z = self.state.new("outer_iterate", of_params=True)
        self._v = self.state.new("anchor_momentum")
        self.replicas = self.starts = self._z
        self.starts_roughly = True

    @contextlib.contextmanager
    def shared_model(self) -> Iterator[bool]:
        """See Loop: the mean of what was just sent, with which step(last=True) would have ended, takes the model's
        place."""
        if (equal := self.settle()) or not self.at_boundary:
            yield equal
            return
        if not self.flight.landed():
            with self.clock.early_merge(self.tau), self.flight.counted():  # it is merged at the round's end
                self.flight.settle()
        scale = 1 / self.scalars["weight"].double()  # NaN or infinite where no worker counts
        held = [t for b in self.buckets for t in (*b.params, *b.buffers)]
        own = [t.clone() for t in held]
        means: list[Tensor] = []
        for bucket, z in zip(self.buckets, self._z, strict=True):
            means += views(z - bucket.payload * scale.to(z), bucket.params)
            means += [v * scale.to(v) for v in bucket.buffer_views]
        self._lend(held, means)
        for rider in self.riders:
            rider.settled(equal=True)
        try:
            yield True
        finally:
            self._lend(held, own)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _lend(self, held: list[Tensor], values: list[Tensor]) -> None:
        copy(held, values)
        self.moved(at_boundary=True)

    def close_round(self, *, finished: bool) -> bool:
        if self.flight.in_flight:
            landing = self.land(finished=finished)
            self._move_anchor()
            if landing.last:
                for bucket in self.buckets:
                    copy(bucket.params, bucket.payload_views)
                return True
        for bucket, z in zip(self.buckets, self._z, strict=True):
            for p, anchor in zip(bucket.params, views(z, bucket.params), strict=True):
                p.lerp_(anchor.to(p.dtype), self.config.pull)
            bucket.flatten(bucket.payload)
            torch.sub(z, bucket.payload, out=bucket.payload)
        self.send(finished=finished)
        return False

    def left_out(self, where: Tensor) -> None:
        super().left_out(where)
        for bucket, z in zip(self.buckets, self._z, strict=True):
            copy_where(where, bucket.params, views(z, bucket.params))

    def _move_anchor(self) -> None:
        """Makes means of the payloads, too."""
        for bucket, z, v in zip(self.buckets, self._z, self._v, strict=True):
            rescale(bucket.payload, self.scale)
            v.mul_(carried(self.config.anchor_momentum, self.growth)).sub_(bucket.payload)
            torch.sub(z, bucket.payload, out=bucket.payload)
            z.add_(v)
