"""Local-SGD, and what every method shares that waits for the mean of the parameters."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable
from typing import Unpack

import torch
from torch import Tensor

from ..assembly import CO2Config, Options, plugs_of_other
from ..assembly.wire import WireConfig
from ..checkpoints.saved import Saved
from ..checks import tensors_of
from ..flat import copy, rescale, views


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
